"""Products with `Codes`, which become numbers as a program reads them, and are never stored as wider numbers.

What a group adds to a product is summed up in float32 before it is multiplied with the group's scale. Codes are exact in every dtype of
activations; the numbers of a table are rounded to it. Nothing here waits for the device, and launches depend on shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.triton.codes import HALF, Codes

_FEW_ROWS = 16
_FEW_STEP, _STEP = 128, 64  # columns that a program reads at a time: with few rows, and with many
_PROGRAMS, _SPLITS = 512, 8  # of a product with few rows: as many as a GPU runs at once, and the most that share a block of its results


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
    padded, step = matrix.padded_features, _FEW_STEP if few else _STEP
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
    step, group_size = _FEW_STEP if few else _STEP, matrix.format.group_size
    return {
        "KIND": matrix.format.kind,
        "BITS": matrix.format.bits,
        "GROUP": group_size,
        "ZERO": matrix.format.zero,
        "BLOCK_K": min(step, group_size & -group_size) if group_size else step,  # within a group, a power of two
        "STEP": step,
        "HALF": HALF,
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
