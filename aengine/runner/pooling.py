"""Pooling: one vector of the hidden states of a prompt. Owns which rows ask for it, and how. A step gives a part for each chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention import StepLayout
from aengine.kernels.upload import to_device
from aengine.scheduler.plan import NewRow, PooledStates


@dataclass(frozen=True, slots=True)
class DevicePooled:
    """`PooledStates` of k chunks."""

    rows: tuple[tuple[int, int], ...]  # [k]: the row, and the position that its chunk begins at
    states: Tensor  # [k, hidden_size] float32

    def on_host(self) -> tuple[PooledStates, ...]:
        """The tensor must be in host memory."""
        return tuple(PooledStates(row, start, states) for (row, start), states in zip(self.rows, self.states.numpy(), strict=True))


class Pooler:
    def __init__(self, device: torch.device, factor: float = 1.0) -> None:
        """`factor`: that the hidden states are given with."""
        self._device = device
        self._factor = factor
        self._wanted: dict[int, tuple[str, int]] = {}  # row -> its pooling, the length of its prompt

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Assigns rows to new sequences."""
        for new in new_rows:
            self._wanted.pop(new.row, None)
            if new.params.pooling is not None:
                self._wanted[new.row] = new.params.pooling, new.prompt_len

    def pool(self, rows: NDArray[np.int32], layout: StepLayout, hidden: Tensor) -> DevicePooled | None:
        """Of the step's chunks, whose `hidden` states are [T, hidden_size]; None if no row asks for it."""
        found, indices, counts = [], [], []
        for i in range(layout.num_decodes, len(rows)):
            pooling, prompt_len = self._wanted.get(int(rows[i]), ("", 0))
            first, end = int(layout.qo_indptr[i]), int(layout.qo_indptr[i + 1])
            if pooling == "last" and layout.seq_lens[i] == prompt_len:
                first = end - 1
            elif pooling != "mean":
                continue
            found.append((int(rows[i]), int(layout.seq_lens[i]) - (end - int(layout.qo_indptr[i]))))
            indices.append(np.arange(first, end, dtype=np.int32))
            counts.append(end - first)
        if not found:
            return None
        states = hidden.index_select(0, to_device(np.concatenate(indices), self._device)).float()
        sums = [one.sum(0) for one in torch.split(states, counts)]  # each alone, so that it does not depend on the others
        return DevicePooled(tuple(found), torch.stack(sums).div_(self._factor))
