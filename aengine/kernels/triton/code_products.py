"""Products with `Codes`, which become numbers as a program reads them, and are never stored as wider numbers.

Codes are the left factor of a product, and activations the right one: so a tile of 64 rows of codes is a whole tile of Hopper's tensor
cores however few tokens there are, and float8 codes are multiplied where they were loaded to. What a group adds to a product is summed up
in float32 before it is multiplied with the group's scale. Codes are exact in every dtype of activations; the numbers of a table are
rounded to it. Nothing here waits for the device, and launches depend on shapes alone.

Also products and sums in an order that does not depend on how many rows there are, in place of torch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.triton.codes import HALF, SHARED_BLOCKS, Codes, e2m1_numbers

FEW_ROWS = 64
"""Rows of a product that is as fast as memory gives it the matrix."""
FEW_COLUMNS = 64  # of a program with few rows
_SPLITS = 8  # the most programs that share a block of results
_STEP = 128  # columns that a program with few rows reads at a time, and one with many half of it
_AHEAD_BYTES = 49152  # that a program with few rows loads ahead


def code_linear(
    x: Tensor, matrix: Codes, bias: Tensor | None, dtype: torch.dtype, x_scales: Tensor | None = None, invariant: bool = False
) -> Tensor:
    """x [T, in_features] times the one matrix, plus a bias [out_features]: [T, out_features] of `dtype`.

    x may be float8_e4m3fn with `x_scales` [T, 1] float32, if the codes are float8 too. Its last dimension is contiguous. `invariant`: the
    order of sums does not depend on T.
    """
    rows, columns = len(x), matrix.out_features
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    if not rows:
        return out
    few, padded = rows <= FEW_ROWS or invariant, matrix.padded_features
    block_m, block_n = (FEW_ROWS if invariant else few_block(rows), FEW_COLUMNS) if few else (64, 128)
    options = code_options(matrix, few, x.dtype)
    words = matrix.words.view(x.dtype) if x.dtype is torch.float8_e4m3fn else matrix.words
    splits, depth = (1, padded) if invariant else shared_depth(rows, columns, padded)
    gathers_many = few and block_m == FEW_ROWS and matrix.order is not None  # whose addresses four warps have no registers for
    sums = torch.empty((splits, rows, columns) if splits > 1 else 1, dtype=torch.float32, device=x.device)
    _linear_codes[(triton.cdiv(columns, block_n), triton.cdiv(rows, block_m), splits)](
        *(x, x_scales, x.stride(0), words, matrix.scales, matrix.offsets, matrix.order, matrix.table),
        *(bias, out, sums, matrix.arrivals, rows, columns, matrix.in_features, padded, depth),
        **options,
        SPLITS=_SPLITS,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4 if few and not gathers_many else 8,
        num_stages=few_stages(matrix.format.bits, options["BLOCK_K"], block_m, x.itemsize) if few else 3,
    )
    return out


def few_block(rows: int) -> int:
    """Rows of the block of a program, of up to FEW_ROWS."""
    return max(16, int(triton.next_power_of_2(rows)))


def few_stages(bits: int, block_k: int, block_m: int, itemsize: int) -> int:
    """How many blocks of `block_k` columns a program with few rows loads ahead, and one more. `itemsize`: of activations."""
    of_block = block_k * (FEW_COLUMNS * bits // 8 + block_m * itemsize)
    return max(3, min(6, 1 + _AHEAD_BYTES // of_block))


def shared_depth(rows: int, columns: int, padded: int) -> tuple[int, int]:
    """Among how many programs the depth of a block of results is shared, and how many of the padded columns each of them multiplies."""
    few = rows <= FEW_ROWS
    blocks = triton.cdiv(rows, few_block(rows) if few else 64) * triton.cdiv(columns, FEW_COLUMNS if few else 128)
    wanted = min(_SPLITS, max(1, SHARED_BLOCKS // blocks))
    depth = triton.cdiv(padded // _STEP, wanted) * _STEP
    return triton.cdiv(padded, depth), depth


def code_options(matrix: Codes, few: bool, dtype: torch.dtype) -> dict[str, int]:
    """The constants of `code_sums` for a matrix and `few` rows of `dtype`, or many."""
    form = matrix.format
    most = _STEP if few else _STEP // 2
    if dtype is torch.float32:  # no tensor core multiplies it: each column takes registers
        most = 2 * HALF if form.bits == 4 else HALF
    block = min(most, form.group_size & -form.group_size) if form.group_size else most  # within a group, a power of two
    return {
        "KIND": form.kind,
        "BITS": form.bits,
        "GROUP": form.group_size,
        "ZERO": form.zero,
        "SIGNED": int(form.signed),
        "BLOCK_K": block,
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
    arrivals,
    rows,
    columns,
    depth,
    padded,
    split_depth,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    SIGNED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (blocks of columns, blocks of rows, splits of the depth). There are SPLITS at most; their number is no constant, so that few
    variants do for all numbers of rows. Several store `sums` [splits, rows, columns], and the last to arrive adds them in their order."""
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    present, inside = row < rows, column < columns
    begin = tl.program_id(2) * split_depth
    end = tl.minimum(begin + split_depth, padded)
    total = code_sums(
        *(x, row * x_stride, present, words, scales, offsets, order, table, columns, depth, padded, column, inside, begin, end),
        *(KIND, BITS, GROUP, ZERO, SIGNED, BLOCK_K, HALF, BLOCK_M, BLOCK_N),
    )
    if x_scales is not None:
        total *= tl.load(x_scales + row, mask=present, other=0.0)[:, None]
    at = row[:, None] * columns + column[None, :]
    mask = present[:, None] & inside[None, :]
    splits = tl.num_programs(2)
    is_last = splits == 1
    if splits > 1:
        tl.store(sums + tl.program_id(2).to(tl.int64) * rows * columns + at, total, mask=mask)
        tl.debug_barrier()  # all threads of the program have stored
        block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        is_last = tl.atomic_add(arrivals + block, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(arrivals + block, 0)
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for split in tl.static_range(SPLITS):
                is_share = mask & (tl.full([1, 1], split, tl.int32) < splits)
                total += tl.load(sums + split * rows.to(tl.int64) * columns + at, mask=is_share, other=0.0)
    if is_last:
        if bias is not None:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


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
    SIGNED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows of x, which begin at `x_rows` [BLOCK_M], times the rows `column` [BLOCK_N] of a matrix, over its columns from `begin` to `end`:
    [BLOCK_M, BLOCK_N] float32."""
    per_word: tl.constexpr = codes_per_word(words.dtype.element_ty, BITS)
    word = tl.arange(0, BLOCK_K // per_word)
    byte = tl.arange(0, BLOCK_K * BITS // 8)
    first = (byte if BITS == 8 else byte // HALF * (2 * HALF) + byte % HALF)[:, None]
    words_at = words + (column.to(tl.int64) * (padded // per_word))[:, None] + word[None, :]
    x_rows, present, inside = x_rows[None, :], present[None, :], inside[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_sums = tl.zeros([1, BLOCK_M], tl.float32)
    unit: tl.constexpr = _unit(x.dtype.element_ty, KIND)
    for at in range(begin, end, BLOCK_K):
        read = tl.load(words_at + at // per_word, mask=inside, other=0.0)
        sums = total if GROUP == 0 else tl.zeros_like(total)
        of_rows = x_sums if GROUP == 0 else tl.zeros_like(x_sums)
        for half in tl.static_range(8 // BITS):
            rows = _columns_of(x, x_rows, present, order, at + first + half * HALF, depth)
            numbers = _numbers(read, 4 * half, table, rows.dtype, KIND, BITS, ZERO, SIGNED)
            # Tensor cores add up products of float8 with few bits: what they have is added to a float32 after every block.
            sums = tl.dot(numbers, rows, sums, input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
            if offsets is not None:
                of_rows += tl.sum(rows.to(tl.float32), 0, keep_dims=True)
        if GROUP == 0:
            total = sums
            x_sums = of_rows
        else:
            total += _scaled(sums, of_rows, scales, offsets, at // GROUP * columns + column[:, None], inside, unit)
    if GROUP == 0:
        total = _scaled(total, x_sums, scales, offsets, column[:, None], inside, unit)
    return tl.trans(total)


@triton.jit
def _columns_of(x, x_rows, present, order, column, depth):
    """Columns of the activations, [columns, rows]."""
    within = column < depth
    if order is not None:
        column = tl.load(order + column, mask=within, other=0)
    return tl.load(x + x_rows + column, mask=present & within, other=0.0)


@triton.constexpr_function
def codes_per_word(dtype, bits):
    return dtype.primitive_bitwidth // bits


@triton.constexpr_function
def _unit(dtype, kind):
    """What 1 is as `_numbers` makes it of integers: two factors of powers of 2 that each dtype has."""
    return 1.0 if kind != 0 or dtype == tl.float32 else 2.0**-6 if dtype == tl.bfloat16 else 2.0**-9


@triton.jit
def _numbers(
    codes, shift: tl.constexpr, table, dtype: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, SIGNED: tl.constexpr
):
    """The numbers of words of codes, of those from bit `shift` on where there are two in a byte. Integers are in `_unit`.

    The bits of an integer below 2 ** 8 stand for that many of the smallest number in bfloat16, and below 2 ** 10 in float16; so two
    instructions make two numbers, wherever in the byte they are. Bits of float8 are moved to where a dtype has them; exponents are smaller
    than meant by the difference of the biases.
    """
    if dtype == tl.float8e4nv:
        numbers = codes
    elif KIND == 2:
        numbers = tl.load(table + ((codes >> shift) & 15).to(tl.int32)).to(dtype)
    elif KIND == 1 and BITS == 4:
        numbers = e2m1_numbers(codes, shift == 4, dtype)
    elif KIND == 1:
        wide: tl.constexpr = tl.int32 if dtype == tl.float32 else tl.int16
        bits: tl.constexpr = 32 if dtype == tl.float32 else 16
        exponent: tl.constexpr = 5 if dtype == tl.float16 else 8
        bias: tl.constexpr = 15 if dtype == tl.float16 else 127
        low: tl.constexpr = bits - exponent - 4  # where the lowest bit goes; beside the sign, the others
        kept: tl.constexpr = (127 << low) - (1 << (bits - 1))
        moved = codes.to(tl.int8, bitcast=True).to(wide) << low
        numbers = ((moved & kept).to(wide).to(dtype, bitcast=True) * 2.0 ** (bias - 7)).to(dtype)
    elif dtype == tl.float32:
        numbers = ((codes >> shift) & 15 if BITS == 4 else codes).to(tl.int32) - ZERO
        numbers = numbers.to(tl.float32)
    else:
        mask: tl.constexpr = 255 if BITS == 8 else 15 << shift
        zero: tl.constexpr = ZERO + 128 if SIGNED else ZERO
        if SIGNED:
            codes = codes.to(tl.uint8, bitcast=True) ^ 128
        smallest = (codes.to(tl.uint16) & mask).to(dtype, bitcast=True)
        unit: tl.constexpr = _unit(dtype, KIND)
        scale: tl.constexpr = 2.0 ** (127 - shift) if dtype == tl.bfloat16 else 2.0 ** (15 - shift)
        numbers = (smallest * scale - zero * unit).to(dtype)
    return numbers


@triton.jit
def _scaled(sums, of_rows, scales, offsets, at, inside, unit: tl.constexpr):
    """Sums of a group times its scales, plus the sums of the activations times its offsets."""
    scaled = sums * (tl.load(scales + at, mask=inside, other=0.0).to(tl.float32) * (1.0 / unit))
    if offsets is not None:
        scaled += of_rows * tl.load(offsets + at, mask=inside, other=0.0).to(tl.float32)
    return scaled


_ROWS, _DEPTH_BYTES = 64, 128  # of a block of a product of numbers
_LEAST_SPLIT = 512  # numbers of the depth that a program adds up at least
_ADDED = 1024  # columns of a program that adds up splits, and numbers that one which adds up a row takes at once


def product(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """x [batch, M, K] times matrix [batch, K, N], plus a bias that can be expanded to it, to `out` [batch, M, N], whose last dimension is
    contiguous; returns it. The sums of a row are in an order that follows from K and N alone: the depth is divided into splits, each is
    added up by itself, and then these are. With few rows a program has one split, with many it has all."""
    batch, rows, depth = x.shape
    columns = matrix.shape[2]
    if not out.numel():
        return out
    assert out.stride(2) == 1
    blocks = triton.cdiv(columns, FEW_COLUMNS)
    splits = max(1, min(_SPLITS, SHARED_BLOCKS // blocks, depth // _LEAST_SPLIT))
    split_depth = triton.cdiv(triton.cdiv(depth, splits), _LEAST_SPLIT // 4) * (_LEAST_SPLIT // 4)
    splits = triton.cdiv(depth, split_depth)
    of_rows = triton.cdiv(rows, _ROWS)
    programs = splits if batch * of_rows * blocks < SHARED_BLOCKS else 1
    to = out if programs == 1 else torch.empty((programs, batch, rows, columns), dtype=torch.float32, device=x.device)
    added = None if bias is None else bias.expand(batch, rows, columns)
    bias_strides = (0, 0, 0) if added is None else added.stride()
    _product[(blocks, of_rows, batch * programs)](
        *(x, matrix, added if programs == 1 else None, to, rows, columns, depth, split_depth, splits // programs, batch),
        *(*x.stride(), *matrix.stride(), *bias_strides, to.stride(-3), to.stride(-2)),
        BLOCK_M=_ROWS,
        BLOCK_N=FEW_COLUMNS,
        BLOCK_K=_DEPTH_BYTES // x.element_size(),
        num_warps=4,
        num_stages=4,
    )
    if programs > 1:
        _add_splits[(batch * rows, triton.cdiv(columns, _ADDED))](
            *(to, added, out, rows, columns, programs, batch * rows * columns),
            *(*bias_strides, out.stride(0), out.stride(1)),
            BLOCK=_ADDED,
            num_warps=4,
        )
    return out


def row_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of the rows of x [rows, columns], whose last dimension is contiguous: [rows] of `dtype`, in which they are added up, each in
    an order that follows from its length alone."""
    out = torch.empty(len(x), dtype=dtype, device=x.device)
    if len(x):
        _sum_row[(len(x),)](x, out, x.stride(0), x.shape[1], RUNNING=False, BLOCK=_ADDED, num_warps=4)
    return out


def running_row_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums up to each number of a row of x [rows, columns], as `row_sums`: [rows, columns] of `dtype`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel():
        _sum_row[(len(x),)](x, out, x.stride(0), x.shape[1], RUNNING=True, BLOCK=_ADDED, num_warps=4)
    return out


@triton.jit(do_not_specialize=["rows", "splits", "batch"])
def _product(
    x,
    matrix,
    bias,
    out,
    rows,
    columns,
    depth,
    split_depth,
    splits,
    batch,
    x_batch,
    x_row,
    x_column,
    matrix_batch,
    matrix_row,
    matrix_column,
    bias_batch,
    bias_row,
    bias_column,
    out_batch,
    out_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks of columns, blocks of rows, programs * batch): each program adds up `splits` of the splits of the depth."""
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    program, of_batch = tl.program_id(2) // batch, (tl.program_id(2) % batch).to(tl.int64)
    present, inside = (row < rows)[:, None], (column < columns)[None, :]
    index = tl.arange(0, BLOCK_K)
    x += of_batch * x_batch + row[:, None] * x_row
    matrix += of_batch * matrix_batch + column[None, :] * matrix_column
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for split in range(program * splits, (program + 1) * splits):
        end = tl.minimum((split + 1) * split_depth, depth)
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for at in range(split * split_depth, end, BLOCK_K):
            k = (at + index).to(tl.int64)
            left = tl.load(x + k[None, :] * x_column, mask=present & (k < end)[None, :], other=0.0)
            right = tl.load(matrix + k[:, None] * matrix_row, mask=inside & (k < end)[:, None], other=0.0)
            sums = tl.dot(left, right, sums, input_precision="ieee")
        total += sums
    mask = present & inside
    if bias is not None:
        total += tl.load(bias + of_batch * bias_batch + row[:, None] * bias_row + column[None, :] * bias_column, mask=mask, other=0.0)
    at_program = tl.program_id(2).to(tl.int64) * out_batch
    tl.store(out + at_program + row[:, None] * out_row + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "splits", "size"])
def _add_splits(sums, bias, out, rows, columns, splits, size, bias_batch, bias_row, bias_column, out_batch, out_row, BLOCK: tl.constexpr):
    """Grid (batch * rows, blocks of columns): the sums of all splits [splits, batch, rows, columns], which are `size` numbers apart."""
    of_batch, row = (tl.program_id(0) // rows).to(tl.int64), (tl.program_id(0) % rows).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    sums += tl.program_id(0).to(tl.int64) * columns + column
    for _ in range(splits):
        total += tl.load(sums, mask=inside, other=0.0)
        sums += size
    if bias is not None:
        total += tl.load(bias + of_batch * bias_batch + row * bias_row + column.to(tl.int64) * bias_column, mask=inside, other=0.0)
    tl.store(out + of_batch * out_batch + row * out_row + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_row(x, out, stride, columns, RUNNING: tl.constexpr, BLOCK: tl.constexpr):
    """RUNNING: `out` gets the sums up to each number, else that of all."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], out.dtype.element_ty)
    before = tl.zeros([1], out.dtype.element_ty)
    x += row * stride
    for at in range(0, columns, BLOCK):
        column = at + tl.arange(0, BLOCK)
        numbers = tl.load(x + column, mask=column < columns, other=0.0).to(total.dtype)
        if RUNNING:
            tl.store(out + row * columns + column, before + tl.cumsum(numbers, 0), mask=column < columns)
            before += tl.sum(numbers, 0)
        else:
            total += numbers
    if not RUNNING:
        tl.store(out + row, tl.sum(total, 0))
