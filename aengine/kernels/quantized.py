"""Quantising: a matrix at load, to 4 bits in groups of 32 columns, or to int8 or float8 with one scale per row; and activations to float8
with one scale per row, for products of 8-bit floats.

Every device makes the same codes and scales, so that weights which are read again, into host memory, are those that were loaded.

`QuantizedRows`: rows of a quantised matrix, in the one form that all formats of files become and that all kernels read.

Knows nothing of files or of how a kernel packs the codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from aengine.api.dataclass import dataclass

if TYPE_CHECKING:
    import torch
    from torch import Tensor


LARGEST = 448.0  # of float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Float8Rows:
    codes: Tensor  # [T, size] float8_e4m3fn
    scales: Tensor  # [T, 1] float32; value = code * scale

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def of(cls, x: Tensor) -> Float8Rows:
        """[T, size]: the largest magnitude of a row becomes `LARGEST`."""
        import torch

        wide = x.float()
        largest = wide.abs().amax(-1, keepdim=True)
        scales = torch.where(largest == 0, 1.0, quotient(largest, LARGEST))
        return cls((wide / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)


def quotient(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, the same on every device: CUDA multiplies by the inverse of a number that is no tensor, which may round otherwise."""
    import torch

    return x / torch.full_like(x, divisor)


INT4_GROUP = 32
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the step: cutting the largest numbers of a group off can lower its error
_CHUNK_ROWS = 4096


def quantize_rows(matrix: Tensor, quantization: str) -> QuantizedRows:
    """[rows, columns] of any float dtype -> "int4", "int8" or "fp8"."""
    import torch

    quantize = {"int4": _int4, "int8": _int8, "fp8": _fp8}[quantization]
    chunks = [quantize(chunk.float()) for chunk in torch.split(matrix, _CHUNK_ROWS)]
    codes = torch.cat([codes.view(torch.uint8) for codes, _ in chunks]).view(chunks[0][0].dtype)  # not every dtype can be joined
    scales = torch.cat([scales for _, scales in chunks])
    return int4_rows(codes, scales) if quantization == "int4" else QuantizedRows(codes, scales, matrix.shape[1], bits=8)


def int4_rows(codes: Tensor, scales: Tensor) -> QuantizedRows:
    """Codes [rows, columns] of (code - 8) * scale."""
    return QuantizedRows(codes, scales, INT4_GROUP, bits=4, offsets=-8.0 * scales)


def _int4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0..15 of (code - 8) * scale: of several roundings of each group, each with its best bfloat16 scale, that of least squared
    error."""
    import torch

    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % INT4_GROUP))
    groups = padded.view(rows, -1, INT4_GROUP).movedim(-1, 0).contiguous()
    # The number of the largest magnitude becomes -8, the code of the largest magnitude, or is cut off there.
    largest = groups.gather(0, groups.abs().argmax(0, keepdim=True)) / -8.0
    best = torch.full(groups.shape[1:], torch.inf)
    codes, scales = torch.zeros(groups.shape, dtype=torch.uint8), torch.zeros(groups.shape[1:])
    for shrink in _SHRINKS:
        found = torch.where(largest == 0, 0.0, groups / (largest * shrink)).round_().clamp_(-8, 7)
        # The scale of least squared error: sum (x - s q)^2 has its minimum at s = sum x q / sum q^2.
        scale = (_sum(found * groups) / _sum(found.square()).clamp(min=1.0)).bfloat16().float()
        error = _sum((found * scale - groups).square())
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better, (found + 8).to(torch.uint8), codes)
        scales = torch.where(better, scale, scales)
    return codes.movedim(0, -1).reshape(rows, -1)[:, :columns].contiguous(), scales


def _sum(groups: Tensor) -> Tensor:
    """Over the first dimension, of INT4_GROUP numbers, in one order on every device."""
    while (half := len(groups) // 2) > 0:
        groups = groups[:half] + groups[half:]
    return groups[0]


def _int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -127..127: the largest magnitude of a row becomes the largest."""
    import torch

    scales = quotient(matrix.abs().amax(-1, keepdim=True), 127)
    return (matrix / torch.where(scales == 0, 1.0, scales)).round_().to(torch.int8), scales


def _fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn with the largest magnitude of a row at the largest number."""
    import torch

    scales = quotient(matrix.abs().amax(-1, keepdim=True), LARGEST)
    return (matrix / torch.where(scales == 0, 1.0, scales)).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


_DEQUANTIZED_ROWS = 1024  # that are dequantised at a time


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
        import torch

        as_bytes = self.codes.view(torch.uint8)  # not every dtype of codes can be indexed
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, codes=as_bytes[rows].view(self.codes.dtype), scales=self.scales[rows], offsets=offsets)

    def columns(self, first: int, stop: int) -> QuantizedRows:
        """Columns [first, stop) of the model's matrix, on the borders of groups. Raises ValueError for others."""
        import torch

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

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, columns] of the dtype, None: of float32, in the order of the model's columns; in float32 it is what every kernel's product
        is compared with. Takes little more memory than the result."""
        import torch

        values = torch.empty(self.shape, dtype=dtype or torch.float32, device=self.codes.device)
        for begin in range(0, len(self), _DEQUANTIZED_ROWS):
            values[begin : begin + _DEQUANTIZED_ROWS] = self[begin : begin + _DEQUANTIZED_ROWS]._numbers()
        return values

    def _numbers(self) -> Tensor:
        import torch

        numbers = self.codes.float() if self.table is None else self.table[self.codes.long()]
        columns = torch.arange(self.codes.shape[1]) // self.group_size
        numbers *= self.scales[:, columns]
        if self.offsets is not None:
            numbers += self.offsets[:, columns]
        if self.order is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(1, self.order, numbers)


Rows: TypeAlias = "Tensor | QuantizedRows"
"""Consecutive rows of a parameter: [rows, columns], or [rows] of a bias or vector."""


def common_zero_point(parts: Sequence[QuantizedRows]) -> int | None:
    """The integer z with offsets = -z * scales everywhere; None: there is none."""
    import torch

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
    import torch

    return next(dtype for dtype in (torch.bfloat16, torch.float16, torch.float32) if all(_fits(one, dtype) for one in numbers))


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are None, or tensors of the same numbers."""
    import torch

    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _fits(numbers: Tensor, dtype: torch.dtype) -> bool:
    import torch

    rounded = numbers.to(dtype)
    return dtype is torch.float32 or bool((rounded.float() == numbers).all() and rounded.isfinite().all())
