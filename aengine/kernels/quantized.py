"""`QuantizedRows`: rows of a quantised matrix, in the one form that all formats of files become and that all kernels read.

Knows nothing of files or of how a kernel packs the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_CHUNK_ROWS = 1024  # that are dequantised at a time


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows [rows, columns] with value[r, c] = number(codes[r, c]) * scales[r, g] + offsets[r, g], where g = c // group_size.

    The number of a code is the code itself, or `table[code]`. Groups are those of `group_size` consecutive columns; the last one may be
    shorter.
    """

    codes: Tensor  # [rows, columns] int8, uint8 or float8_e4m3fn, contiguous columns; of 4 bits: uint8 below 16
    scales: Tensor  # [rows, groups] float32
    group_size: int  # in columns; all of them for one scale per row
    bits: int  # that a kernel keeps of a code: 4 or 8
    offsets: Tensor | None = None  # [rows, groups] float32: -zero_point * scale, or the minimum of a group; None: 0
    table: Tensor | None = None  # [2 ** bits] float32: the numbers of the codes (nf4, mxfp4); None: the codes are the numbers
    order: Tensor | None = None
    """[columns] int64: column c of this form is column order[c] of the model's matrix (act-order of GPTQ); None: the same."""

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = -(-columns // self.group_size)
        for name in ("scales", "offsets"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != (rows, groups):
                raise ValueError(f"{name} of shape {tuple(tensor.shape)} do not match {rows} rows of {groups} groups")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> QuantizedRows:
        """Some of the rows: those of a slice, or the [n] int64 ones in their order."""
        as_bytes = self.codes.view(torch.uint8)  # not every dtype of codes can be indexed
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, codes=as_bytes[rows].view(self.codes.dtype), scales=self.scales[rows], offsets=offsets)

    def columns(self, first: int, stop: int) -> QuantizedRows:
        """Columns [first, stop) of the model's matrix, on the borders of groups. Raises ValueError for others."""
        columns, size = self.shape[1], self.group_size
        if self.order is not None:
            raise ValueError("its groups are not of consecutive columns (act-order)")
        if size < columns and (first % size or (stop % size and stop < columns)):
            raise ValueError(f"{first} to {stop} are not on the borders of its groups of {size}")
        groups = slice(first // size, -(-stop // size))
        offsets = None if self.offsets is None else self.offsets[:, groups]
        codes = self.codes.view(torch.uint8)[:, first:stop].view(self.codes.dtype)
        return replace(self, codes=codes, scales=self.scales[:, groups], group_size=min(size, stop - first), offsets=offsets)

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel reads of them: the codes at their bits, and what belongs to the groups."""
        extra = sum(tensor.nbytes for tensor in (self.scales, self.offsets) if tensor is not None)
        return self.codes.numel() * self.bits // 8 + extra

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[rows, columns] in the order of the model's columns; in float32 it is what every kernel's product is compared with. Takes little
        more memory than the result."""
        values = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for begin in range(0, len(self), _CHUNK_ROWS):
            values[begin : begin + _CHUNK_ROWS] = self[begin : begin + _CHUNK_ROWS]._numbers()
        return values

    def _numbers(self) -> Tensor:
        numbers = self.codes.float() if self.table is None else self.table[self.codes.long()]
        columns = torch.arange(self.codes.shape[1]) // self.group_size
        numbers *= self.scales[:, columns]
        if self.offsets is not None:
            numbers += self.offsets[:, columns]
        if self.order is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(1, self.order, numbers)


Rows = Tensor | QuantizedRows
"""Consecutive rows of a parameter: [rows, columns], or [rows] of a bias or vector."""


def common_zero_point(parts: Sequence[QuantizedRows]) -> int | None:
    """The integer z with offsets = -z * scales everywhere; None: there is none."""
    points: set[int] = set()
    for part in parts:
        if not len(part):
            continue
        if part.offsets is None:
            points.add(0)
            continue
        largest = part.scales.abs().argmax()
        ratio = -(part.offsets.flatten()[largest] / part.scales.flatten()[largest])
        if not ratio.isfinite() or ratio.abs() > 255 or not torch.equal(part.offsets, -ratio.round() * part.scales):
            return None
        points.add(int(ratio.round()))
    return points.pop() if len(points) == 1 else None


def exact_dtype(numbers: Sequence[Tensor]) -> torch.dtype:
    """The smallest dtype that has all of the float32 `numbers` exactly, as finite ones: bfloat16, float16 or float32."""
    return next(dtype for dtype in (torch.bfloat16, torch.float16, torch.float32) if all(_fits(one, dtype) for one in numbers))


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are None, or tensors of the same numbers."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _fits(numbers: Tensor, dtype: torch.dtype) -> bool:
    rounded = numbers.to(dtype)
    return dtype is torch.float32 or bool((rounded.float() == numbers).all() and rounded.isfinite().all())
