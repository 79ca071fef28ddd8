"""The choice of experts for each token, in one launch: the scores of a router, the best of them, and the weights of those.

Linear layers of many experts at once: each row is multiplied with the matrices of the experts that it goes to, in one launch.

Choices, pairs of a token and one of its experts, are sorted by expert on the device; a block of them reads one expert's matrix. Nothing
here waits for the device, and launches depend on shapes alone, so all of it can be captured in a graph."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.kernels.params import ExpertLinear, ExpertRouting, RouterScoring, SharedOutput
from aengine.kernels.triton.code_products import code_options, code_sums, codes_per_word, few_stages
from aengine.kernels.triton.codes import Codes


def route(logits: Tensor, bias: Tensor | None, correction: Tensor | None, routing: ExpertRouting) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token as `route` of `kernels/params.py` does, in one launch. Of equal scores, of experts and of
    groups, the first are chosen."""
    tokens, num_experts = logits.shape
    chosen = torch.empty((tokens, routing.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        # A program has its experts in rows, one for each group; the choice needs no groups where all of them are chosen from.
        groups = 1 if routing.top_groups == routing.num_groups else routing.num_groups
        rows, columns = triton.next_power_of_2(groups), triton.next_power_of_2(num_experts // groups)
        _route[(tokens,)](
            *(logits.contiguous(), bias, correction, chosen, weights, routing.scaling),
            GROUPS=groups,
            OF_GROUP=num_experts // groups,
            TOP_GROUPS=routing.top_groups,
            GROUP_TOP=routing.group_top,
            ROWS=rows,
            COLUMNS=columns,
            TOP_K=routing.top_k,
            SLOTS=triton.next_power_of_2(routing.top_k),
            SOFTMAX=routing.scoring is RouterScoring.SOFTMAX,
            NORMALIZE=routing.normalize,
            num_warps=max(1, min(4, rows * columns // 128)),
        )
    return chosen, weights


@triton.jit
def _route(
    logits,
    bias,
    correction,
    chosen,
    weights,
    scaling,
    GROUPS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, ROWS * COLUMNS)
    expert = place // COLUMNS * OF_GROUP + place % COLUMNS
    inside = (place // COLUMNS < GROUPS) & (place % COLUMNS < OF_GROUP)
    scores = tl.load(logits + token * GROUPS * OF_GROUP + expert, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        scores += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    if SOFTMAX:
        scores = tl.where(inside, scores, -float("inf"))
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    ranked = scores
    if correction is not None:
        ranked += tl.load(correction + expert, mask=inside, other=0.0).to(tl.float32)
    ranked = tl.where(inside & (ranked == ranked), ranked, -float("inf"))  # where none is a number, the first expert is the best
    if GROUPS > 1:
        by_group = tl.reshape(ranked, [ROWS, COLUMNS])
        kept = _best_groups(by_group, TOP_GROUPS, GROUP_TOP, ROWS, COLUMNS)
        ranked = tl.reshape(tl.where(kept[:, None], by_group, -float("inf")), [ROWS * COLUMNS])
    slot = tl.arange(0, SLOTS)
    experts = tl.zeros([SLOTS], tl.int64)
    of_slots = tl.zeros([SLOTS], tl.float32)
    for k in range(TOP_K):
        best = tl.argmax(ranked, 0)
        of_slots = tl.where(slot == k, tl.sum(tl.where(place == best, scores, 0.0), 0), of_slots)
        experts = tl.where(slot == k, (best // COLUMNS * OF_GROUP + best % COLUMNS).to(tl.int64), experts)
        ranked = tl.where(place == best, -float("inf"), ranked)
    if NORMALIZE:
        of_slots = of_slots / (tl.sum(of_slots, 0) + 1e-20)
    tl.store(chosen + token * TOP_K + slot, experts, mask=slot < TOP_K)
    tl.store(weights + token * TOP_K + slot, of_slots * scaling, mask=slot < TOP_K)


@triton.jit
def _best_groups(by_group, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS] bool: the TOP_GROUPS rows with the largest sums of their GROUP_TOP largest numbers, of equal ones the first."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS], tl.float32)
    for _ in range(GROUP_TOP):
        sums += tl.max(by_group, 1)
        by_group = tl.where(column[None, :] == tl.argmax(by_group, 1)[:, None], -float("inf"), by_group)
    kept = row < 0
    for _ in range(TOP_GROUPS):
        best = tl.argmax(sums, 0)
        kept = kept | (row == best)
        sums = tl.where(row == best, -float("inf"), sums)
    return kept


_FEW, _MANY = 16, 64  # choices of a block
_FEW_COLUMNS, _COLUMNS = 64, 128  # of a block: with few choices, and with many
_SORTED, _READ = 32, 256  # choices that a program sorts at a time, and that it compares them with
_PARTS = 16  # of all choices, whose counts a program adds up at a time
_SUMMED = 1024  # columns of a program that adds up choices
_FEW_DEPTH_BYTES, _DEPTH_BYTES = 256, 128


@dataclass(frozen=True, slots=True)
class Grouping:
    """Choices sorted by expert, and cut into blocks of one expert each. All int32."""

    order: Tensor  # [choices], numbers of choices
    experts: Tensor  # [blocks], -1: the block is empty
    firsts: Tensor  # [blocks], places in `order`
    ends: Tensor  # [blocks], the place behind the last of the block's expert
    block: int  # choices of a block, at most

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int, invariant: bool = False) -> Grouping:
        """Sorts the chosen experts [T, top_k] int64, or the slots [T] int32 of tokens, on the device. The number `num_experts` stands for
        none: such choices come last, in no block. `invariant`: blocks are as large with one token as with many."""
        choices = chosen.numel()
        block = _FEW if not invariant and choices < _MANY // 2 * num_experts else _MANY
        num_blocks = min(choices, choices // block + num_experts)
        order, blocks = (torch.empty(shape, dtype=torch.int32, device=chosen.device) for shape in ((choices,), (3, num_blocks)))
        if choices:
            chosen, parts, bins = chosen.contiguous(), triton.cdiv(choices, _READ), triton.next_power_of_2(num_experts + 1)
            counts = None
            if parts > 1:
                counts = torch.empty((parts, bins), dtype=torch.int32, device=chosen.device)
                _count_choices[(parts,)](chosen, counts, choices, EXPERTS=num_experts, BINS=bins, READ=_READ, num_warps=4)
            _group_choices[(1 + parts,)](
                *(chosen, counts, order, blocks, choices, num_blocks, parts),
                EXPERTS=num_experts,
                BINS=bins,
                BLOCK=block,
                SORTED=_SORTED,
                READ=_READ,
                PARTS=_PARTS,
                num_warps=8,
            )
        experts, firsts, ends = blocks
        return cls(order, experts, firsts, ends, block)


def grouped_linear(x: Tensor, linear: ExpertLinear, grouping: Grouping, share: int) -> Tensor:
    """Row i // `share` of x [rows, in_features] times the matrix [out_features, in_features] of choice i's expert, plus its bias:
    [choices, out_features]. The weight is contiguous, as are the rows of x."""
    weight = linear.weight
    tensors: tuple[Tensor | None, ...]
    few = grouping.block == _FEW
    narrow = few or x.dtype is torch.float32  # no tensor core multiplies it: wide blocks take more registers than there are
    if isinstance(weight, Codes):
        columns, depth, options = weight.out_features, weight.in_features, code_options(weight, few, x.dtype)
        stages = few_stages(weight.format.bits, options["BLOCK_K"], grouping.block, x.itemsize) if few else 3
        tensors, padded = (weight.words, weight.scales, weight.offsets, weight.order, weight.table), weight.padded_features
    else:
        _, columns, depth = weight.shape
        options = dict.fromkeys(("KIND", "BITS", "GROUP", "ZERO", "SIGNED", "HALF"), 0)
        options["BLOCK_K"], stages = (_FEW_DEPTH_BYTES if few else _DEPTH_BYTES) // x.element_size(), 4 if few else 3
        tensors, padded = (weight, None, None, None, None), depth
        assert weight.is_contiguous()
    choices, block = len(grouping.order), _FEW_COLUMNS if narrow else _COLUMNS
    out = torch.empty((choices, columns), dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1
    if choices:
        _grouped_linear[(len(grouping.experts), triton.cdiv(columns, block))](
            *(x, *tensors, linear.bias, out, grouping.order, grouping.experts, grouping.firsts, grouping.ends),
            *(x.stride(0), columns, depth, padded, share),
            **options,
            BLOCK_M=grouping.block,
            BLOCK_N=block,
            num_warps=4 if narrow else 8,
            num_stages=stages,
        )
    return out


def weighted_sums(outputs: Tensor, weights: Tensor, dtype: torch.dtype, shared: SharedOutput | None) -> Tensor:
    """The outputs of choices [T * top_k, size], added for each token with their weights [T, top_k] float32, in their order, and then what
    is shared: sums of float32, [T, size] in `dtype`. What is added is contiguous."""
    tokens, top_k = weights.shape
    size = outputs.shape[1]
    out = torch.empty((tokens, size), dtype=dtype, device=outputs.device)
    beside, gate = (None, None) if shared is None else (shared.output, shared.gate)
    assert beside is None or beside.is_contiguous()
    if tokens:
        _add_choices[(tokens, triton.cdiv(size, _SUMMED))](
            outputs, weights.contiguous(), beside, gate, out, size, TOP_K=top_k, BLOCK=_SUMMED, num_warps=4
        )
    return out


@triton.jit(do_not_specialize=["choices"])
def _count_choices(chosen, counts, choices, EXPERTS: tl.constexpr, BINS: tl.constexpr, READ: tl.constexpr):
    """Grid (parts of READ choices): how many choices of a part each expert has, [parts, BINS]."""
    found = _count(chosen, choices, tl.program_id(0), EXPERTS, BINS, READ)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit
def _count(chosen, choices, part, EXPERTS: tl.constexpr, BINS: tl.constexpr, READ: tl.constexpr):
    at = part * READ + tl.arange(0, READ)
    return tl.histogram(tl.load(chosen + at, mask=at < choices, other=EXPERTS).to(tl.int32), BINS)


@triton.jit
def _sum_counts(counts, begin, end, BINS: tl.constexpr, PARTS: tl.constexpr):
    """Of the parts from `begin` to `end`: [BINS]."""
    total = tl.zeros([BINS], tl.int32)
    for first in range(begin, end, PARTS):
        part = first + tl.arange(0, PARTS)
        found = tl.load(counts + part[:, None] * BINS + tl.arange(0, BINS)[None, :], mask=(part < end)[:, None], other=0)
        total += tl.sum(found, 0)
    return total


@triton.jit(do_not_specialize=["choices", "num_blocks", "parts"])
def _group_choices(
    chosen,
    counts,
    order,
    blocks,
    choices,
    num_blocks,
    parts,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    SORTED: tl.constexpr,
    READ: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid (1 + parts of READ choices): the first program cuts experts into blocks, the others find the places of the choices of a part:
    behind those of earlier experts, those of the same expert in earlier parts, and those before it in its own. `counts` of
    `_count_choices`; None: there is one part."""
    expert = tl.arange(0, BINS)
    part = tl.maximum(tl.program_id(0) - 1, 0)
    if counts is None:
        before = tl.zeros([BINS], tl.int32)
        total = _count(chosen, choices, 0, EXPERTS, BINS, READ)
    else:
        before = _sum_counts(counts, 0, part, BINS, PARTS)
        total = before + _sum_counts(counts, part, parts, BINS, PARTS)
    if tl.program_id(0) == 0:
        total = tl.where(expert < EXPERTS, total, 0)
        ends = tl.cumsum(total, 0)
        num = tl.cdiv(total, BLOCK)
        block_ends = tl.cumsum(num, 0)
        first, first_block = ends - total, block_ends - num
        for number in range(0, tl.max(num, 0)):
            at = first_block + number
            mine = number < num
            tl.store(blocks + at, expert, mask=mine)
            tl.store(blocks + num_blocks + at, first + number * BLOCK, mask=mine)
            tl.store(blocks + 2 * num_blocks + at, ends, mask=mine)
        for begin in range(tl.sum(num, 0), num_blocks, BINS):
            tl.store(blocks + begin + expert, -1, mask=begin + expert < num_blocks)
    else:
        firsts = tl.cumsum(total, 0) - total + before
        at = part * READ + tl.arange(0, READ)
        other = tl.load(chosen + at, mask=at < choices, other=EXPERTS).to(tl.int32)
        for begin in range(0, tl.minimum(choices - part * READ, READ), SORTED):
            number = part * READ + begin + tl.arange(0, SORTED)
            mine = tl.load(chosen + number, mask=number < choices, other=EXPERTS).to(tl.int32)
            is_before = (other[None, :] == mine[:, None]) & (at[None, :] < number[:, None])
            place = tl.sum(is_before.to(tl.int32), 1)
            place += tl.sum(tl.where(expert[None, :] == mine[:, None], firsts[None, :], 0), 1)
            tl.store(order + place, number, mask=number < choices)


@triton.jit
def _add_choices(outputs, weights, shared, gate, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(TOP_K):
        row = tl.load(outputs + (token * TOP_K + k) * size + column, mask=inside, other=0.0)
        total += row.to(tl.float32) * tl.load(weights + token * TOP_K + k)
    if shared is not None:
        beside = tl.load(shared + token * size + column, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            beside *= 1.0 / (1.0 + tl.exp(-tl.load(gate + token).to(tl.float32)))
        total += beside
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["experts", "firsts", "ends", "share"])  # rows of one tensor begin anywhere
def _grouped_linear(
    x,
    weight,
    scales,
    offsets,
    column_order,
    table,
    bias,
    out,
    order,
    experts,
    firsts,
    ends,
    x_stride,
    columns,
    depth,
    padded,
    share,
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
    """Grid (blocks of choices, blocks of columns). BITS 0: the matrices are numbers [columns, depth], else `Codes`."""
    expert = tl.load(experts + tl.program_id(0))
    if expert < 0:
        return
    place = tl.load(firsts + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    present = place < tl.load(ends + tl.program_id(0))
    choice = tl.load(order + place, mask=present, other=0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < columns
    matrix = expert.to(tl.int64)
    x_rows = choice // share * x_stride
    if BITS > 0:
        at = matrix * columns * (tl.cdiv(padded, GROUP) if GROUP > 0 else 1)
        total = code_sums(
            *(x, x_rows, present, weight + matrix * columns * (padded // codes_per_word(weight.dtype.element_ty, BITS)), scales + at),
            *(None if offsets is None else offsets + at, None if column_order is None else column_order + matrix * depth, table),
            *(columns, depth, padded, column, inside, 0, padded),
            *(KIND, BITS, GROUP, ZERO, SIGNED, BLOCK_K, HALF, BLOCK_M, BLOCK_N),
        )
    else:
        at = tl.arange(0, BLOCK_K)
        x_at = x + x_rows[None, :] + at[:, None]
        weight_at = weight + (matrix * columns + column)[:, None] * depth + at[None, :]
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # weights are the left factor, as codes are
        for begin in range(0, depth, BLOCK_K):
            within = begin + at < depth
            rows = tl.load(x_at + begin, mask=present[None, :] & within[:, None], other=0.0)
            block = tl.load(weight_at + begin, mask=within[None, :] & inside[:, None], other=0.0)
            total = tl.dot(block, rows, total, input_precision="ieee")
        total = tl.trans(total)
    if bias is not None:
        total += tl.load(bias + matrix * columns + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + choice[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=present[:, None] & inside[None, :])
