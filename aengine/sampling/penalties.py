"""Repetition, frequency and presence penalties.

Owns, on the device and for penalised rows only, which tokens a row has seen. They are kept as lists, not as tables over the vocabulary: a
step touches as many logits as a row has tokens. Sampled tokens are added on the device, so that the next step need not wait for this one.
Knows nothing of the other processors.
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
    """Penalised rows take slots, which are made as they are needed. A slot lists the distinct tokens of a row's prompt, where a penalty
    looks at them, and then its output; drafts take the places of the tokens that they stand for.

    A token may be listed several times: all of its entries lead to the same new logit, so that it does not matter which is written last.
    For the same reason entries that a row does not have yet are replaced by its first one; an empty list has token 0, with factors and a
    count that change nothing.
    """

    feature = int(Features.PENALTIES)

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._slots = np.full(max_rows, -1, dtype=np.int64)
        self._offsets = np.zeros(max_rows, dtype=np.int64)  # the token at position p has entry offset + p
        self._outputs = np.zeros(max_rows, dtype=np.int64)  # the first entry of the output
        self._free: list[int] = []
        self._lists = torch.zeros(0, _FIRST_ENTRIES, dtype=torch.int64, device=device)  # [slots, entries]: token ids
        self._factors = torch.zeros(0, 3, dtype=torch.float32, device=device)  # repetition, frequency, presence
        self._buffer = torch.empty(0, 0, device=device)

    def update(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            slot = int(self._slots[new.row])
            if slot >= 0:
                self._free.append(slot)
                self._slots[new.row] = -1
        penalised = [new for new in new_rows if int(new.params.features) & self.feature]
        if not penalised:
            return
        lists = [_prompt_entries(new) for new in penalised]
        ends = [len(ids) + len(new.tokens) - new.prompt_len for new, ids in zip(penalised, lists, strict=True)]
        self._reserve(len(penalised), max(ends))
        packed = np.zeros((len(penalised), self._lists.shape[1]), dtype=np.int64)
        slots = np.empty(len(penalised), dtype=np.int64)
        for i, (new, ids, end) in enumerate(zip(penalised, lists, ends, strict=True)):
            packed[i, : len(ids)], packed[i, len(ids) : end] = ids, new.tokens[new.prompt_len :]
            slots[i] = self._slots[new.row] = self._free.pop()
            self._outputs[new.row], self._offsets[new.row] = len(ids), end - len(new.tokens)
        factors = np.array(
            [(max(p.repetition_penalty, _LEAST), p.frequency_penalty, p.presence_penalty) for p in (new.params for new in penalised)],
            dtype=np.float32,
        )
        at = self._put(slots)
        self._lists.index_copy_(0, at, self._put(packed))
        self._factors.index_copy_(0, at, self._put(factors))

    def apply(self, logits: Tensor, step: StepRows, members: NDArray[np.int64]) -> None:
        rows, ends = step.rows[members], self._ends(step, members)
        self._reserve(0, int(ends.max()) + 1)  # for what will be sampled, too
        if step.drafts is not None and len(drafted := members[step.drafts[members] >= 0]):
            self._write(step, drafted, self._put(step.drafts[drafted].astype(np.int64)))
        at = self._put(np.stack((members * logits.shape[1], self._slots[rows], self._outputs[rows], ends)))
        lines, slots, outputs, limits = at[:, :, None]
        entries = torch.arange(max(1, int(ends.max())), device=self._device)
        there = entries < limits
        ids = self._lists[:, : len(entries)].index_select(0, slots[:, 0])
        ids = torch.where(there, ids, ids[:, :1])
        is_output = (there & (entries >= outputs)).to(torch.float32)
        table = self._table(len(ids), logits.shape[1])
        counts = table.scatter_(1, ids, 0.0).scatter_add_(1, ids, is_output).gather(1, ids)
        repetition, frequency, presence = self._factors.index_select(0, slots[:, 0])[:, :, None].unbind(1)
        flat = (ids + lines).view(-1)
        scores = logits.view(-1).index_select(0, flat).view(ids.shape)
        scores = torch.where(scores < 0, scores * repetition, scores / repetition).clamp_(max=HIGHEST_LOGIT)
        scores = scores - frequency * counts - presence * (counts > 0)
        logits.view(-1).index_copy_(0, flat, scores.view(-1))

    def record(self, step: StepRows, members: NDArray[np.int64], tokens: Tensor) -> None:
        """Adds the tokens of `members`, of [m] int64 `tokens` on the device. Those that do not count are overwritten."""
        self._write(step, members, tokens.index_select(0, self._put(members)))

    def _write(self, step: StepRows, members: NDArray[np.int64], tokens: Tensor) -> None:
        """Into the entries of these tokens of a step."""
        slots, entries = self._put(np.stack((self._slots[step.rows[members]], self._ends(step, members))))
        self._lists[slots, entries] = tokens

    def _ends(self, step: StepRows, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many entries the rows of these tokens have before them, those of drafts included."""
        return self._offsets[step.rows[members]] + step.positions[members]

    def _table(self, rows: int, vocab_size: int) -> Tensor:
        """[rows, vocab_size] float32, any numbers. On a CPU it is kept: the first writes to new memory would take longer than all else."""
        if self._device.type != "cpu":
            return torch.empty(rows, vocab_size, device=self._device)
        if len(self._buffer) < rows:
            self._buffer = torch.empty(rows, vocab_size)
        return self._buffer[:rows]

    def _reserve(self, slots: int, entries: int) -> None:
        """Makes room for this many more slots, and for this many entries in each."""
        num_slots, width = self._lists.shape
        missing = max(0, slots - len(self._free))
        if missing == 0 and entries <= width:
            return
        more_slots = max(missing, num_slots) if missing else 0
        more_entries = max(width, entries - width) if entries > width else 0
        lists = torch.zeros(num_slots + more_slots, width + more_entries, dtype=torch.int64, device=self._device)
        lists[:num_slots, :width] = self._lists
        self._lists = lists
        self._factors = torch.cat((self._factors, torch.zeros(more_slots, 3, device=self._device)))
        self._free.extend(range(num_slots, num_slots + more_slots))

    def _put(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self._device)


def _prompt_entries(new: NewRow) -> NDArray[np.int32]:
    """The distinct tokens of the prompt, where a penalty looks at them."""
    return np.unique(new.tokens[: 0 if new.params.repetition_penalty == 1.0 else new.prompt_len])
