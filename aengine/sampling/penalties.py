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
        self._ids = torch.zeros(0, _FIRST_ENTRIES, dtype=torch.int32, device=device)
        self._counts = torch.zeros_like(self._ids)
        self._factors = torch.zeros(0, 3, dtype=torch.float32, device=device)  # repetition, frequency, presence

    def update(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            slot = int(self._slots[new.row])
            if slot >= 0:
                self._free.append(slot)
                self._slots[new.row] = -1
        penalised = [new for new in new_rows if new.params.features & Features.PENALTIES]
        if not penalised:
            return
        lists = [_entries(new) for new in penalised]
        self._reserve(len(penalised), max(len(ids) for ids, _ in lists))
        packed = np.zeros((2, len(penalised), self._ids.shape[1]), dtype=np.int32)
        slots = np.empty(len(penalised), dtype=np.int64)
        for i, (new, (ids, counts)) in enumerate(zip(penalised, lists, strict=True)):
            packed[0, i, : len(ids)], packed[1, i, : len(ids)] = ids, counts
            slots[i] = self._slots[new.row] = self._free.pop()
            self._offsets[new.row] = len(ids) - len(new.tokens)
        factors = np.array(
            [(max(p.repetition_penalty, _LEAST), p.frequency_penalty, p.presence_penalty) for p in (new.params for new in penalised)],
            dtype=np.float32,
        )
        at = self._put(slots)
        moved = self._put(packed)
        self._ids.index_copy_(0, at, moved[0])
        self._counts.index_copy_(0, at, moved[1])
        self._factors.index_copy_(0, at, self._put(factors))

    def apply(self, logits: Tensor, step: StepRows, members: NDArray[np.int64]) -> None:
        rows = step.rows[members]
        lengths = self._offsets[rows] + step.positions[members]
        width = int(lengths.max())
        if width == 0:
            return
        indices, slots, ends = self._put(np.stack((members, self._slots[rows], lengths)))
        there = torch.arange(width, device=self._device) < ends[:, None]
        ids = self._ids[:, :width].index_select(0, slots)
        ids = torch.where(there, ids, ids[:, :1])
        counts = self._counts[:, :width].index_select(0, slots)
        counts = torch.where(there, counts, counts[:, :1])
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
        ids = self._ids[:, :width].index_select(0, slots)
        counts = self._counts[:, :width].index_select(0, slots)
        same = (ids == sampled[:, None]).logical_and_(torch.arange(width, device=self._device) < entry[:, None])
        counts += same
        count = torch.where(same, counts, 1).amax(-1)
        self._counts[:, :width].index_copy_(0, slots, counts)
        self._ids.index_put_((slots, entry), sampled)
        self._counts.index_put_((slots, entry), count)

    def _reserve(self, slots: int, entries: int) -> None:
        """Makes room for this many more slots, and for this many entries in each."""
        have, width = self._ids.shape
        missing = max(0, slots - len(self._free))
        if entries > width:
            width = max(2 * width, entries)
        if missing == 0 and width == self._ids.shape[1]:
            return
        count = have + (max(missing, have) if missing else 0)
        for name in ("_ids", "_counts"):
            old: Tensor = getattr(self, name)
            new = torch.zeros(count, width, dtype=torch.int32, device=self._device)
            new[:have, : old.shape[1]] = old
            setattr(self, name, new)
        factors = torch.zeros(count, 3, dtype=torch.float32, device=self._device)
        factors[:have] = self._factors
        self._factors = factors
        self._free.extend(range(have, count))

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
