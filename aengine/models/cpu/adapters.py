"""Packs an `Adapter` for the CPU kernels: the low-rank matrices of all parameters, in one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.api.errors import AdapterError
from aengine.kernels.cpu.library import BLOCK, EMBEDDING, PANEL, CLowRank, CLowRankBlock
from aengine.kernels.cpu.ops import PackedAdapter
from aengine.kernels.warm_memory import lazy_bytes
from aengine.models.adapters import Adapter, LowRankPart
from aengine.models.cpu.weights import PackedWeights

_A_ROWS = 4  # that are multiplied together
_COLUMNS = 16  # of a block of B
_ALIGNMENT = 64  # bytes


def pack_adapter(weights: PackedWeights, numbers: Mapping[str, int], adapter: Adapter) -> PackedAdapter:
    """`numbers` of the matrices that adapters add to, by name. Takes its own memory alone, so it can run beside steps.

    Raises AdapterError for an adapter of another parameter or shape.
    """
    packings = []
    for name, parts in adapter.parts.items():
        number = numbers.get(name)
        if number is None or (number != EMBEDDING and name not in weights.linears):
            raise AdapterError(f"adapters cannot be added to {name}")
        if number == EMBEDDING:
            shape, interleaved = (weights.spec.hidden_size, weights.spec.vocab_size), False
        else:
            linear = weights.linears[name]
            shape, interleaved = (linear.out_features, linear.in_features), linear.interleaved
        packings.append(_Packing(name, number, parts, shape, _rows_of_columns(shape[0], interleaved), weights.dtype))
    memory = lazy_bytes(sum(packing.nbytes for packing in packings))
    matrices, first = {}, 0
    for packing in packings:
        matrices[packing.number] = packing.write(memory[first : first + packing.nbytes])
        first += packing.nbytes
    return PackedAdapter(memory, matrices, len(numbers))


@dataclass
class _Packing:
    name: str
    number: int
    parts: Sequence[LowRankPart]
    shape: tuple[int, int]  # of the parameter
    rows: NDArray[np.int64]  # [blocks, 16], of the packed columns; -1: padding
    dtype: torch.dtype

    def __post_init__(self) -> None:
        of_row = np.full(self.shape[0] + 1, -1)  # the part of each row; the last is that of padding
        for number, part in enumerate(self.parts):
            rank, rows = len(part.a), part.rows
            if part.a.shape[1] != self.shape[1] or part.b.shape != (len(rows), rank) or rows.stop > self.shape[0]:
                found = f"{list(part.a.shape)} and {list(part.b.shape)}, which are added to rows {rows.start} to {rows.stop - 1}"
                raise AdapterError(f"{self.name} of shape {list(self.shape)} does not fit an adapter of shapes {found}")
            of_row[rows.start : rows.stop] = number
        ranks = [len(part.a) for part in self.parts]
        self.firsts = np.cumsum([0, *ranks])  # of the rows of A of each part, and the end
        parts = of_row[self.rows]
        self.last = parts.max(1)  # of the parts of each block; -1: it has none
        self.first = np.where(parts < 0, len(ranks), parts).min(1)
        counts = np.where(self.last < 0, 0, self.firsts[self.last + 1] - self.firsts[np.minimum(self.first, self.last)])
        self.blocks = np.zeros(len(self.rows), np.dtype(CLowRankBlock))
        self.blocks["row"] = np.cumsum(counts) - counts
        self.blocks["first"] = np.where(self.last < 0, 0, self.firsts[np.maximum(self.first * (self.last >= 0), 0)])
        self.blocks["count"] = counts
        self.size = -(-int(self.firsts[-1]) // _A_ROWS) * _A_ROWS
        width = self.shape[1]
        self.a_shape = (width, self.size) if self.number == EMBEDDING else (self.size, -(-width // BLOCK) * BLOCK)
        self.b_shape = (int(counts.sum()), _COLUMNS)

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        """Bytes of A, B and the blocks."""
        item = self.dtype.itemsize
        sizes = (math.prod(self.a_shape) * item, math.prod(self.b_shape) * item, self.blocks.nbytes)
        return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]

    def write(self, memory: NDArray[np.uint8]) -> CLowRank:
        """Write the matrices and blocks to `memory`, which holds zeros, and return the struct that points into it."""
        begin = np.cumsum([0, *self._sizes])
        a, b = (
            torch.from_numpy(memory[at : at + math.prod(shape) * self.dtype.itemsize]).view(self.dtype).view(shape)
            for at, shape in zip(begin, (self.a_shape, self.b_shape), strict=False)
        )
        memory[begin[2] : begin[2] + self.blocks.nbytes] = self.blocks.view(np.uint8)
        wide = a.T if self.number == EMBEDDING else a
        for number, (part, first) in enumerate(zip(self.parts, self.firsts, strict=False)):
            rank = len(part.a)
            wide[first : first + rank, : self.shape[1]] = part.a
            self._write_b(b, number, part, rank)
        return CLowRank(*(memory[at:].ctypes.data for at in begin[:3]), self.size)

    def _write_b(self, b: Tensor, number: int, part: LowRankPart, rank: int) -> None:
        blocks = np.flatnonzero((self.first <= number) & (number <= self.last))
        rows = self.rows[blocks] - part.rows.start
        columns = torch.cat((part.b.to(self.dtype), part.b.new_zeros(1, rank, dtype=self.dtype)))
        of_blocks = columns[torch.from_numpy(np.where((rows >= 0) & (rows < len(part.rows)), rows, len(part.rows)))]
        firsts = self.blocks["row"][blocks].astype(np.int64) + self.firsts[number] - self.blocks["first"][blocks]
        b[torch.from_numpy(firsts[:, None] + np.arange(rank))] = of_blocks.transpose(1, 2)


def _rows_of_columns(out_features: int, interleaved: bool) -> NDArray[np.int64]:
    """Return the row of the parameter in each packed column, as `row_of_column` of `src/packing.h`: [blocks, 16]; -1: padding."""
    width = out_features // 2 if interleaved else out_features
    per_panel = PANEL // 2 if interleaved else PANEL
    places = np.arange(-(-width // per_panel) * per_panel)
    rows = np.where(places < width, places, -1).reshape(-1, _COLUMNS)
    if not interleaved:
        return rows
    return np.stack((rows, np.where(rows < 0, -1, rows + width)), axis=1).reshape(-1, _COLUMNS)
