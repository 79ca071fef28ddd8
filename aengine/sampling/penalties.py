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
        rows = step.rows[members]
        lengths = self._offsets[rows] + step.positions[members]
        width = int(lengths.max())
        if width == 0:
            return
        indices, slots, ends = self._put(np.stack((members, self._slots[rows], lengths)))
        there = torch.arange(width, device=self._device) < ends[:, None, None]
        lists = self._lists[:, :, :width].index_select(0, slots)
        ids, counts = torch.where(there, lists, lists[:, :, :1]).unbind(1)
        repetition, frequency, presence = self._factors.index_select(0, slots)[:, :, None].unbind(1)
        flat = (ids + indices[:, None] * logits.shape[1]).view(-1)
        scores = logits.view(-1).index_select(0, flat).view(ids.shape)
        scores = torch.where(scores < 0, scores * repetition, scores / repetition).clamp_(max=HIGHEST_LOGIT)
        scores = scores - frequency * counts - presence * (counts > 0)
        logits.view(-1).index_copy_(0, flat, scores.view(-1))

    def record(self, step: StepRows, members: NDArray[np.int64], tokens: Tensor) -> None:
        """Adds the tokens of the rows `members`, of [m] int64 `tokens` on the device."""
        rows = step.rows[members]
        entries = self._offsets[rows] + step.positions[members]
        width = int(entries.max()) + 1
        self._reserve(0, width)
        indices, slots, entry = self._put(np.stack((members, self._slots[rows], entries)))
        sampled = tokens.index_select(0, indices).to(torch.int32)
        ids, counts = self._lists[:, :, :width].index_select(0, slots).unbind(1)
        same = (ids == sampled[:, None]).logical_and_(torch.arange(width, device=self._device) < entry[:, None])
        counts += same
        count = torch.where(same, counts, 1).amax(-1)
        self._lists[:, 1, :width].index_copy_(0, slots, counts)
        self._lists[slots, :, entry] = torch.stack((sampled, count), dim=1)

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
