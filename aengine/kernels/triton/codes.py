"""`Codes`: quantised matrices in GPU memory, and the product with them. Codes become numbers as a program reads them.

What a group adds to a product is summed up in float32 before it is multiplied with the group's scale. Codes are exact in every dtype of
activations; the numbers of a table are rounded to it. Nothing here waits for the device, and launches depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.quantized import QuantizedRows, common_zero_point, equal, exact_dtype

INTEGERS, FLOATS, TABLE = range(3)
_PADDED = 128  # the number of columns is a multiple of it
_HALF = 16  # columns between the two of a byte of 4-bit codes
_FEW_ROWS = 16
_STEPS = {True: 128, False: 64}  # columns that a program reads at a time: with few rows, and with many
_PROGRAMS, _SPLITS = 512, 8  # of a product with few rows: as many as a GPU runs at once, and the most that share a block of its results
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True, slots=True)
class Codes:
    """Matrices [out_features, in_features] of one shape: a linear layer, or those of all experts."""

    words: Tensor
    """[matrices, in_features / 2, out_features] uint8 of 4-bit codes: of each 32 columns, byte i has column i in its low bits and column
    16 + i in its high ones. Of 8 bits: [matrices, out_features, in_features] uint8 or int8. in_features is `padded_features` in both."""
    scales: Tensor  # [matrices, groups, out_features], in the smallest dtype that has them exactly
    offsets: Tensor | None  # as scales
    order: Tensor | None  # [matrices, in_features] int32, the column of the activations that each column is multiplied with
    table: Tensor | None  # [2 ** bits] float32
    out_features: int
    in_features: int
    bits: int
    kind: int  # INTEGERS: value = (code - zero) * scale; FLOATS: float8_e4m3fn or E2M1; TABLE
    group_size: int  # 0: one scale per row
    zero: int = 0

    def __len__(self) -> int:
        return len(self.words)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.words, self.scales, self.offsets, self.order) if tensor is not None)

    @property
    def padded_features(self) -> int:
        return -(-self.in_features // _PADDED) * _PADDED

    @classmethod
    def of(cls, parts: Sequence[QuantizedRows], matrices: int, device: torch.device) -> Codes | None:
        """The rows of `parts`, those of one matrix after another. None: there is no kernel for them, or they differ in format."""
        form = _form(parts)
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

        def tensor(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((matrices, *shape), dtype=dtype, device=device)

        words = tensor(form.words.dtype, *((padded // 2, rows) if form.bits == 4 else (rows, padded)))
        scales = tensor(form.scales.dtype, groups, rows)
        offsets = None if form.offsets is None else tensor(form.scales.dtype, groups, rows)
        for matrix, first, part in placed:
            here = slice(first, first + len(part))
            codes = part.codes.view(torch.uint8).to(device)
            if form.bits == 4:
                halves = torch.nn.functional.pad(codes, (0, padded - columns)).view(len(part), -1, 2, _HALF)
                words[matrix, :, here] = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).t()
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
        table = None if form.table is None else form.table.float().to(device)
        return replace(form, words=words, scales=scales, offsets=offsets, order=order, table=table, out_features=rows, in_features=columns)


def _form(parts: Sequence[QuantizedRows]) -> Codes | None:
    """What all parts have in common, with empty tensors of the dtypes; None: they differ, or no kernel reads them."""
    first = parts[0]
    columns, whole = first.shape[1], first.scales.shape[1] == 1
    group_size = 0 if whole else first.group_size
    for part in parts:
        same = (part.bits, part.shape[1], part.codes.dtype) == (first.bits, columns, first.codes.dtype) and equal(part.table, first.table)
        if not same or (part.scales.shape[1] == 1) != whole or not (whole or part.group_size == group_size):
            return None
    float8 = first.codes.dtype == torch.float8_e4m3fn
    if first.bits not in (4, 8) or group_size % (2 * _HALF if first.bits == 4 else 16) or (first.bits == 4 and float8):
        return None
    table, kind = first.table, FLOATS if float8 else INTEGERS if first.table is None else TABLE
    if table is not None and first.bits == 4 and equal(table, torch.cat((_E2M1, -_E2M1))):
        table, kind = None, FLOATS
    numbers = [part.scales for part in parts]
    zero = common_zero_point(parts) if kind == INTEGERS else 0 if all(part.offsets is None for part in parts) else None
    smallest = -128 if first.codes.dtype == torch.int8 else 0
    with_offsets = zero is None or not smallest <= zero < smallest + 256  # so that code - zero is exact in bfloat16
    if with_offsets:
        numbers += [part.offsets for part in parts if part.offsets is not None]
    dtype = exact_dtype(numbers)
    return Codes(
        words=torch.empty(0, dtype=torch.int8 if first.codes.dtype == torch.int8 else torch.uint8),
        scales=torch.empty(0, dtype=dtype),
        offsets=torch.empty(0) if with_offsets else None,
        order=None,
        table=table,
        out_features=0,
        in_features=0,
        bits=first.bits,
        kind=kind,
        group_size=group_size,
        zero=0 if with_offsets else zero or 0,
    )


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


def code_linear(x: Tensor, matrix: Codes, bias: Tensor | None, dtype: torch.dtype, x_scales: Tensor | None = None) -> Tensor:
    """x [T, in_features] times the one matrix, plus a bias [out_features]: [T, out_features] of `dtype`.

    x may be float8_e4m3fn with `x_scales` [T, 1] float32, if the codes are float8 too. Its last dimension is contiguous.
    """
    rows, columns = len(x), matrix.out_features
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    if not rows:
        return out
    few = rows <= _FEW_ROWS
    block_m, block_n = (_FEW_ROWS, 64) if few else (64, 128)
    padded, step = matrix.padded_features, _STEPS[few]
    blocks = triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n)
    wanted = min(_SPLITS, max(1, (_PROGRAMS if few else _PROGRAMS // 2) // blocks))
    depth = triton.cdiv(padded // step, wanted) * step  # of a split
    splits = triton.cdiv(padded, depth)
    sums = torch.empty((splits, rows, columns) if splits > 1 else 1, dtype=torch.float32, device=x.device)
    _linear_codes[(triton.cdiv(columns, block_n), triton.cdiv(rows, block_m), splits)](
        *(x, x_scales, x.stride(0), matrix.words, matrix.scales, matrix.offsets, matrix.order, matrix.table),
        *(bias, out, sums, rows, columns, matrix.in_features, padded, depth),
        **code_options(matrix, few),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4 if few else 8,
        num_stages=3,
    )
    if splits > 1:
        _add_splits[(rows, triton.cdiv(columns, 1024))](sums, bias, out, rows, columns, splits, BLOCK=1024, num_warps=4)
    return out


def code_options(matrix: Codes, few: bool) -> dict[str, int]:
    """The constants of `code_sums` for a matrix and `few` rows or many."""
    step, group_size = _STEPS[few], matrix.group_size
    return {
        "KIND": matrix.kind,
        "BITS": matrix.bits,
        "GROUP": matrix.group_size,
        "ZERO": matrix.zero,
        "BLOCK_K": min(step, group_size & -group_size) if group_size else step,  # within a group, a power of two
        "STEP": step,
        "HALF": _HALF,
    }


@triton.jit(do_not_specialize=["rows"])
def _linear_codes(
    x,
    x_scales,
    x_stride,
    words,
    scales,
    offsets,
    order,
    table,
    bias,
    out,
    sums,
    rows,
    columns,
    depth,
    padded,
    split_depth,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (blocks of columns, blocks of rows, splits of the depth). Several splits store `sums` [splits, rows, columns]; their number is
    no constant, so that few variants do for all numbers of rows."""
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    present, inside = row < rows, column < columns
    begin = tl.program_id(2) * split_depth
    end = tl.minimum(begin + split_depth, padded)
    total = code_sums(
        *(x, row * x_stride, present, words, scales, offsets, order, table, columns, depth, padded, column, inside, begin, end),
        *(KIND, BITS, GROUP, ZERO, BLOCK_K, STEP, HALF, BLOCK_M, BLOCK_N),
    )
    if x_scales is not None:
        total *= tl.load(x_scales + row, mask=present, other=0.0)[:, None]
    at = row[:, None] * columns + column[None, :]
    mask = present[:, None] & inside[None, :]
    if tl.num_programs(2) > 1:
        tl.store(sums + tl.program_id(2).to(tl.int64) * rows * columns + at, total, mask=mask)
    else:
        if bias is not None:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "splits"])
def _add_splits(sums, bias, out, rows, columns, splits, BLOCK: tl.constexpr):
    """Grid (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(sums + (split * rows + row) * columns + column, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def code_sums(
    x,
    x_rows,
    present,
    words,
    scales,
    offsets,
    order,
    table,
    columns,
    depth,
    padded,
    column,
    inside,
    begin,
    end,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows of x, which begin at `x_rows` [BLOCK_M], times the rows `column` [BLOCK_N] of a matrix, over its columns from `begin` to `end`:
    [BLOCK_M, BLOCK_N] float32."""
    in_bytes: tl.constexpr = BLOCK_K if BITS == 8 else BLOCK_K // 2
    byte = tl.arange(0, in_bytes)
    if BITS == 8:
        first = byte
        words_at = words + column.to(tl.int64)[None, :] * padded + byte[:, None]
    else:
        first = byte // HALF * (2 * HALF) + byte % HALF
        words_at = words + byte.to(tl.int64)[:, None] * columns + column[None, :]
    factor: tl.constexpr = 1.0 if KIND != 1 or x.dtype.element_ty == tl.float8e4nv else 256.0 if BITS == 8 else 16384.0
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_sums = tl.zeros([BLOCK_M], tl.float32)
    for step in range(begin, end, STEP):
        for block in tl.static_range(STEP // BLOCK_K):
            at = step + block * BLOCK_K
            taken = at.to(tl.int64) if BITS == 8 else at.to(tl.int64) // 2 * columns
            read = tl.load(words_at + taken, mask=inside[None, :], other=0)
            sums = total if GROUP == 0 else tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            of_rows = x_sums if GROUP == 0 else tl.zeros([BLOCK_M], tl.float32)
            for half in tl.static_range(8 // BITS):
                rows = _columns_of(x, x_rows, present, order, at + first + half * HALF, depth)
                codes = read if BITS == 8 else (read >> (4 * half)) & 15
                sums = tl.dot(rows, _numbers(codes, table, rows.dtype, KIND, BITS, ZERO), sums, input_precision="ieee")
                if offsets is not None:
                    of_rows += tl.sum(rows.to(tl.float32), 1)
            if GROUP == 0:
                total = sums
                x_sums = of_rows
            else:
                total += _scaled(sums, of_rows, scales, offsets, at // GROUP * columns + column, inside, factor)
    if GROUP == 0:
        total = _scaled(total, x_sums, scales, offsets, column, inside, factor)
    return total


@triton.jit
def _columns_of(x, x_rows, present, order, column, depth):
    """[rows, columns] of the activations."""
    within = column < depth
    if order is not None:
        column = tl.load(order + column, mask=within, other=0)
    return tl.load(x + x_rows[:, None] + column[None, :], mask=present[:, None] & within[None, :], other=0.0)


@triton.jit
def _numbers(codes, table, dtype: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    """The numbers of codes. Bits of float8 and E2M1 are moved to where float16 has them, which divides by 2 ** 8 and 2 ** 14."""
    if dtype == tl.float8e4nv:
        numbers = codes.to(tl.float8e4nv, bitcast=True)
    elif KIND == 2:
        numbers = tl.load(table + codes.to(tl.int32)).to(dtype)
    elif KIND == 1:
        wide = codes.to(tl.uint16)
        moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7) if BITS == 8 else ((wide & 8) << 12) | ((wide & 7) << 9)
        numbers = moved.to(tl.float16, bitcast=True).to(dtype)
    else:
        numbers = (codes.to(tl.int32) - ZERO).to(tl.float32).to(dtype)
    return numbers


@triton.jit
def _scaled(sums, of_rows, scales, offsets, at, inside, factor: tl.constexpr):
    """Sums of a group times its scales, plus the sums of the activations times its offsets."""
    scaled = sums * (tl.load(scales + at, mask=inside, other=0.0).to(tl.float32) * factor)[None, :]
    if offsets is not None:
        scaled += of_rows[:, None] * tl.load(offsets + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return scaled
