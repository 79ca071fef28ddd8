"""Repetition, frequency and presence penalties.

Owns, on the device and for penalised rows only, which tokens a row has seen and how often its output holds them. They are kept as
lists, not as tables over the vocabulary: a step touches as many logits as a row has tokens. Sampled tokens are added on the device,
so that the next step need not wait for this one. Knows nothing of the other processors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.draw_params import HIGHEST_LOGIT
from aengine.kernels.upload import to_device
from aengine.sampling.processors import Processor, StepRows
from aengine.scheduler.plan import Features, NewRow

_FIRST_ENTRIES = 256
_LEAST = float(np.finfo(np.float32).tiny)  # repetition_penalty divides, and less may be zero in float32


class Penalties(Processor):
    """Penalised rows take slots, which are made as they are needed. A slot lists token ids, each with its count in the output.

    A token may be listed several times, with the same count each time: all of its entries then lead to the same new logit, so that it
    does not matter which is written last. For the same reason entries that a row does not have are replaced by its first one; that of
    an empty list is token 0 with a count of 0, which changes nothing.
    """

    feature = int(Features.PENALTIES)

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._slots = np.full(max_rows, -1, dtype=np.int64)
        self._offsets = np.zeros(max_rows, dtype=np.int64)  # the token at position p has entry offset + p
        self._free: list[int] = []
        self._lists = torch.zeros(0, 2, _FIRST_ENTRIES, dtype=torch.int32, device=device)  # [slots, 2, entries]: token ids, counts
        self._factors = torch.zeros(0, 3, dtype=torch.float32, device=device)  # repetition, frequency, presence

    def update(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            slot = int(self._slots[new.row])
            if slot >= 0:
                self._free.append(slot)
                self._slots[new.row] = -1
        penalised = [new for new in new_rows if int(new.params.features) & self.feature]
        if not penalised:
            return
        lists = [_entries(new) for new in penalised]
        self._reserve(len(penalised), max(len(ids) for ids, _ in lists))
        packed = np.zeros((len(penalised), 2, self._lists.shape[2]), dtype=np.int32)
        slots = np.empty(len(penalised), dtype=np.int64)
        for i, (new, (ids, counts)) in enumerate(zip(penalised, lists, strict=True)):
            packed[i, :, : len(ids)] = ids, counts
            slots[i] = self._slots[new.row] = self._free.pop()
            self._offsets[new.row] = len(ids) - len(new.tokens)
        factors = np.array(
            [(max(p.repetition_penalty, _LEAST), p.frequency_penalty, p.presence_penalty) for p in (new.params for new in penalised)],
            dtype=np.float32,
        )
        at = self._put(slots)
        self._lists.index_copy_(0, at, self._put(packed))
        self._factors.index_copy_(0, at, self._put(factors))

    def apply(self, logits: Tensor, step: StepRows, members: NDArray[np.int64]) -> None:
        numbers = step.numbers[members]
        most = int(numbers.max())
        lengths = self._ends(step, members) - numbers
        indices, slots, ends, num_drafts = self._put(np.stack((members, self._slots[step.rows[members]], lengths, numbers)))
        drafts = torch.zeros(len(members), 0, dtype=torch.int32, device=self._device)
        if step.drafts is not None and most:
            firsts = (members - numbers)[:, None]
            drafts = self._put(step.drafts[np.minimum(firsts + np.arange(most), len(step.drafts) - 1)])
        ids, counts = self._with_tokens(slots, ends, int(lengths.max()), drafts, num_drafts)
        repetition, frequency, presence = self._factors.index_select(0, slots)[:, :, None].unbind(1)
        flat = (ids + indices[:, None] * logits.shape[1]).view(-1)
        scores = logits.view(-1).index_select(0, flat).view(ids.shape)
        scores = torch.where(scores < 0, scores * repetition, scores / repetition).clamp_(max=HIGHEST_LOGIT)
        scores = scores - frequency * counts - presence * (counts > 0)
        logits.view(-1).index_copy_(0, flat, scores.view(-1))

    def record(self, step: StepRows, members: NDArray[np.int64], tokens: Tensor, accepted: Tensor | None) -> None:
        """Adds the tokens that are `accepted` (as of `SampledTokens`) of the rows of `members`, of [m] int64 `tokens` on the device."""
        firsts = members[step.numbers[members] == 0]
        most = int(step.numbers[members].max()) + 1
        lengths = self._ends(step, firsts)
        self._reserve(0, int(lengths.max()) + most)
        indices, slots, ends = self._put(np.stack((firsts, self._slots[step.rows[firsts]], lengths)))
        entries = torch.arange(most, device=self._device)
        sampled = tokens[(indices[:, None] + entries).clamp_(max=len(tokens) - 1)].to(torch.int32)
        num_tokens = torch.full_like(indices, 1) if accepted is None else accepted[self._put(np.searchsorted(step.firsts, firsts))]
        ids, counts = self._with_tokens(slots, ends, int(lengths.max()), sampled, num_tokens)
        width = ids.shape[1] - most
        self._lists[:, 1, :width].index_copy_(0, slots, counts[:, :width])
        self._lists[slots[:, None], :, ends[:, None] + entries] = torch.stack((ids[:, width:], counts[:, width:]), dim=2)

    def _ends(self, step: StepRows, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many entries the rows of these tokens have before them, those of drafts included."""
        return self._offsets[step.rows[indices]] + step.positions[indices]

    def _with_tokens(self, slots: Tensor, ends: Tensor, width: int, tokens: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and counts [k, w] int32 of slots [k] with `ends` [k] entries, `width` at most, to which the first `num_tokens` [k] of
        `tokens` [k, n] are added: the last n of the w."""
        width, added = max(1, width), tokens.shape[1]
        lists = self._lists[:, :, :width].index_select(0, slots)
        there = torch.arange(width, device=self._device) < ends[:, None, None]
        ids, counts = torch.where(there, lists, lists[:, :, :1]).unbind(1)
        if not added:
            return ids, counts
        is_new = torch.arange(added, device=self._device) < num_tokens[:, None]
        new_ids = torch.where(is_new, tokens, ids[:, :1])
        new_counts = [torch.where(ids == token[:, None], counts, 0).amax(-1) for token in new_ids.unbind(1)]
        ids, counts = torch.cat((ids, new_ids), 1), torch.cat((counts, torch.stack(new_counts, 1)), 1)
        for token, counted in zip(new_ids.unbind(1), is_new.unbind(1), strict=True):
            counts = counts + ((ids == token[:, None]) & counted[:, None])
        return ids, counts

    def _reserve(self, slots: int, entries: int) -> None:
        """Makes room for this many more slots, and for this many entries in each."""
        num_slots, _, width = self._lists.shape
        missing = max(0, slots - len(self._free))
        if missing == 0 and entries <= width:
            return
        more_slots = max(missing, num_slots) if missing else 0
        more_entries = max(width, entries - width) if entries > width else 0
        lists = torch.zeros(num_slots + more_slots, 2, width + more_entries, dtype=torch.int32, device=self._device)
        lists[:num_slots, :, :width] = self._lists
        self._lists = lists
        self._factors = torch.cat((self._factors, torch.zeros(more_slots, 3, device=self._device)))
        self._free.extend(range(num_slots, num_slots + more_slots))

    def _put(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self._device)


def _entries(new: NewRow) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The distinct tokens of a row, those of its prompt only where a penalty looks at them, and their counts in the output."""
    output, counts = np.unique(new.tokens[new.prompt_len :], return_counts=True)
    if new.params.repetition_penalty == 1.0:
        return output, counts
    ids = np.unique(new.tokens)
    all_counts = np.zeros(len(ids), dtype=np.int64)
    all_counts[np.searchsorted(ids, output)] = counts
    return ids, all_counts
