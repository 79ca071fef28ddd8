"""`Codes`: quantised matrices in GPU memory, as `code_products.py` reads them.

E2M1 codes in words of eight, which become numbers two at a time.

A code has a sign, two bits of exponent and one of mantissa. Of each 32 columns word t has columns 8 i + 2 t in its low half and the columns
after them in its high half, for i from 0 to 3: those that a thread has of a row of the matrix in a product on tensor cores. In a half the
first code has its bits where bfloat16 has them, the second three bits lower, the third six bits lower, and the fourth in the bits left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.kernels.arrays import as_tensor, torch_dtype
from aengine.kernels.quantized import QuantizedRows, common_zero_point, equal, exact_dtype


def e2m1_words(codes: Tensor) -> Tensor:
    """[rows, columns] codes as [rows, columns / 8] int32."""
    first, second, third, fourth = codes.view(len(codes), -1, 4, 4, 2).to(torch.int32).unbind(2)
    halves = _at(first, 15, 6) | _at(second, 12, 3) | _at(third, 9, 0)
    halves |= (fourth >> 3) << 14 | (fourth & 1) << 13 | (fourth >> 1 & 3) << 10
    return (halves[..., 0] | halves[..., 1] << 16).flatten(1)


def _at(codes: Tensor, sign: int, low: int) -> Tensor:
    """With the sign at one bit, and the others from another one on."""
    return (codes >> 3) << sign | (codes & 7) << low


@triton.jit
def e2m1_numbers(words, second: tl.constexpr, dtype: tl.constexpr):
    """The numbers [rows, columns] of the first 16 of each 32 columns, or of the second 16, of words [rows, columns / 4]."""
    words = words.to(tl.uint32, bitcast=True)
    if second:
        last = ((words << 1) & 0x80008000) | ((words >> 3) & 0x01800180) | ((words >> 7) & 0x00400040)
        numbers = tl.join(_halves(words << 6, dtype), _halves(last, dtype))
    else:
        numbers = tl.join(_halves(words, dtype), _halves(words << 3, dtype))
    rows: tl.constexpr = words.shape[0]
    columns: tl.constexpr = 4 * words.shape[1]
    return numbers.reshape([rows, columns // 16, 4, 2, 2]).permute(0, 1, 4, 2, 3).reshape([rows, columns])


@triton.jit
def _halves(words, dtype: tl.constexpr):
    """The two numbers of words whose halves have a code where bfloat16 has its bits, and other bits elsewhere: [..., 2]. Exponents are
    smaller than meant by the difference of the biases."""
    bits = words & 0x81C081C0
    if dtype == tl.float16:
        bits = (bits & 0x80008000) | ((bits & 0x01C001C0) << 3)
    halves = tl.join(bits.to(tl.uint16), (bits >> 16).to(tl.uint16))
    if dtype == tl.float32:
        return (halves.to(tl.uint32) << 16).to(tl.float32, bitcast=True) * 2.0**126
    else:
        return (halves.to(dtype, bitcast=True) * (2.0**14 if dtype == tl.float16 else 2.0**126)).to(dtype)


INTEGERS, FLOATS, TABLE = range(3)
HALF = 16  # columns between the two of a byte of 4-bit codes
SHARED_BLOCKS = 256  # of a product, at most, whose depth several programs share
_PADDED = 128  # the number of columns is a multiple of it
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True, slots=True)
class Format:
    """What the parts of a matrix have in common."""

    bits: int
    kind: int  # INTEGERS: value = (code - zero) * scale; FLOATS: float8_e4m3fn or E2M1; TABLE
    group_size: int  # 0: one scale per row
    zero: int
    signed: bool
    with_offsets: bool
    scale_dtype: torch.dtype  # the smallest that has all scales and offsets exactly
    table: Tensor | None  # [2 ** bits] float32

    @property
    def is_e2m1(self) -> bool:
        return self.kind == FLOATS and self.bits == 4

    @classmethod
    def of(cls, parts: Sequence[QuantizedRows]) -> Format | None:
        """None: they differ, or no kernel reads them."""
        first = parts[0]
        columns, whole, group_size = first.shape[1], first.scales.shape[1] == 1, first.group_size
        for part in parts:
            same = (part.bits, part.shape[1], part.codes.dtype) == (first.bits, columns, first.codes.dtype)
            same_groups = part.scales.shape[1] == 1 if whole else part.group_size == group_size
            if not same or not same_groups or not equal(part.table, first.table):
                return None
        signed, float8 = first.codes.dtype == torch.int8, first.codes.dtype == torch.float8_e4m3fn
        bits = 4 if first.bits <= 4 else 8  # that there are kernels for
        unit = 2 * HALF if bits == 4 else 16
        if (not whole and group_size % unit) or (bits == 4 and float8):
            return None
        table, kind = first.table, FLOATS if float8 else INTEGERS if first.table is None else TABLE
        if bits == 4 and equal(table, torch.cat((_E2M1, -_E2M1))):
            table, kind = None, FLOATS
        offsets = [part.offsets for part in parts if part.offsets is not None]
        zero = common_zero_point(parts) if kind == INTEGERS else None
        if zero is None or not 0 <= zero + 128 * signed < 256:  # then code - zero would not be exact in bfloat16
            zero = 0
        else:
            offsets = []
        dtype = exact_dtype([*(part.scales for part in parts), *offsets])
        return cls(bits, kind, 0 if whole else group_size, zero, signed, bool(offsets), torch_dtype(dtype), table)


@dataclass(frozen=True, slots=True)
class Codes:
    """Matrices [out_features, in_features] of one shape: a linear layer, or those of all experts."""

    format: Format
    words: Tensor
    """[matrices, out_features, words of a row]. E2M1: int32 (`codes.py`). Others: bytes, uint8 or int8; of 4 bits, byte i of each 32
    columns has column i in its low bits and column 16 + i in its high ones."""
    scales: Tensor  # [matrices, groups, out_features]
    offsets: Tensor | None  # as scales
    order: Tensor | None  # [matrices, in_features] int32, the column of the activations that each column is multiplied with
    table: Tensor | None  # that of the format
    arrivals: Tensor
    """[SHARED_BLOCKS] int32, zeros between products: programs that are done with their share of a block. So products with the same matrix
    must not run at the same time."""
    out_features: int
    in_features: int

    def __len__(self) -> int:
        return len(self.words)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.words, self.scales, self.offsets, self.order) if tensor is not None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """That hold its numbers, the table as well."""
        return tuple(one for one in (self.words, self.scales, self.offsets, self.order, self.table) if one is not None)

    @property
    def form(self) -> object:
        """Equal where tensors of the same shapes and dtypes mean the same."""
        form = self.format
        has = [tensor is None for tensor in (self.offsets, self.order, self.table)]
        return form.bits, form.kind, form.group_size, form.zero, form.signed, tuple(has), self.out_features, self.in_features

    @property
    def padded_features(self) -> int:
        return -(-self.in_features // _PADDED) * _PADDED

    @classmethod
    def of(cls, parts: Sequence[QuantizedRows], matrices: int, device: torch.device) -> Codes | None:
        """The rows of `parts`, those of one matrix after another. None: no kernel reads them, or they differ in format."""
        parts = [_of_tensors(part) for part in parts]
        form = Format.of(parts)
        if form is None:
            return None
        rows, columns = sum(len(part) for part in parts) // matrices, parts[0].shape[1]
        placed = list(_placed(parts, rows))
        orders: dict[int, Tensor | None] = {}
        for matrix, _, part in placed:
            if not equal(orders.setdefault(matrix, part.order), part.order):
                return None
        padded = -(-columns // _PADDED) * _PADDED
        groups = -(-padded // form.group_size) if form.group_size else 1

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((matrices, *shape), dtype=dtype, device=device)

        dtype = torch.int32 if form.is_e2m1 else torch.int8 if form.signed else torch.uint8
        words = zeros(dtype, rows, padded * form.bits // (8 * dtype.itemsize))
        scales = zeros(form.scale_dtype, groups, rows)
        offsets = zeros(form.scale_dtype, groups, rows) if form.with_offsets else None
        for matrix, first, part in placed:
            here = slice(first, first + len(part))
            codes = part.codes.view(torch.uint8).to(device)
            if form.bits == 4:
                codes = torch.nn.functional.pad(codes, (0, padded - columns))
            if form.is_e2m1:
                words[matrix, here] = e2m1_words(codes)
            elif form.bits == 4:
                halves = codes.view(len(part), -1, 2, HALF)
                words[matrix, here] = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
            else:
                words[matrix, here, :columns] = codes.view(words.dtype)
            given = part.scales.shape[1]
            scales[matrix, :given, here] = part.scales.to(device).t()
            if offsets is not None and part.offsets is not None:
                offsets[matrix, :given, here] = part.offsets.to(device).t()
        order = None
        if any(one is not None for one in orders.values()):
            plain = torch.arange(columns)
            order = torch.stack([plain if one is None else one for one in orders.values()]).to(device, torch.int32)
        table = None if form.table is None else form.table.to(device)
        arrivals = torch.zeros(SHARED_BLOCKS, dtype=torch.int32, device=device)
        return cls(form, words, scales, offsets, order, table, arrivals, rows, columns)


def _of_tensors(rows: QuantizedRows) -> QuantizedRows:
    """The rows, of tensors if they are of arrays."""
    numbers = (rows.scales, rows.offsets, rows.table, rows.order)
    scales, offsets, table, order = (as_tensor(one) if isinstance(one, np.ndarray) else one for one in numbers)
    codes = as_tensor(rows.codes) if isinstance(rows.codes, np.ndarray) else rows.codes
    return QuantizedRows(codes, scales, rows.group_size, rows.bits, offsets, table, order)


def _placed(parts: Sequence[QuantizedRows], rows: int) -> Iterator[tuple[int, int, QuantizedRows]]:
    """The parts cut where matrices of so many rows end: matrix, row in it, part."""
    at = 0
    for part in parts:
        done = 0
        while done < len(part):
            matrix, first = divmod(at, rows)
            count = min(rows - first, len(part) - done)
            yield matrix, first, part[done : done + count]
            at, done = at + count, done + count
