"""Low-rank matrices of adapters on CUDA: the tokens of a slot are multiplied with its matrices, those of all slots in one launch.

Tokens are sorted by slot as choices are by expert. Nothing here waits for the device, and launches depend on shapes alone. The order of all
sums follows from the shapes of a parameter, not from the other tokens of a step.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.params import AdapterMatrices, TokenSlots
from aengine.kernels.triton.experts import Grouping

_DEPTH_BYTES = 128  # of activations that a program reads of a token at a time
_SPLIT, _SPLITS = 1024, 8  # input features that a program adds up at least, and the most programs that share a sum
_COLUMNS, _RANKS = 64, 64


class TritonAdapterOps:
    """The `AdapterOps` of `aengine.layers.adapters` in Triton kernels, for CUDA."""

    def __init__(self, invariant: bool = False) -> None:
        """`invariant`: as of `Grouping.of`."""
        self._invariant = invariant

    def grouped(self, slots: Tensor, num_slots: int) -> TokenSlots:
        """Sorts the tokens by slot. Those without an adapter come last, in no block."""
        return Grouping.of(slots, num_slots, self._invariant)

    def shrink(self, x: Tensor, matrices: AdapterMatrices, tokens: TokenSlots) -> Tensor:
        assert isinstance(tokens, Grouping)
        _, low_rank, parts, depth = matrices.a.shape
        step = _DEPTH_BYTES // x.element_size()
        wanted = min(_SPLITS, max(1, depth // _SPLIT))
        split_depth = triton.cdiv(triton.cdiv(depth, wanted), step) * step
        splits, columns = triton.cdiv(depth, split_depth), low_rank * parts
        inner = torch.empty((splits, len(x), columns), dtype=torch.float32, device=x.device)
        assert x.stride(1) == 1
        if len(x):
            _shrink[(len(tokens.experts), triton.cdiv(columns, _COLUMNS), splits)](
                *(x, matrices.a, matrices.ranks, inner, tokens.order, tokens.experts, tokens.firsts, tokens.ends),
                *(x.stride(0), len(x), columns, depth, split_depth),
                PARTS=parts,
                BLOCK_K=step,
                BLOCK_M=tokens.block,
                BLOCK_N=_COLUMNS,
                num_warps=4,
                num_stages=3,
            )
        return inner

    def expand(self, out: Tensor, inner: Tensor, matrices: AdapterMatrices, tokens: TokenSlots) -> None:
        assert isinstance(tokens, Grouping)
        _, low_rank, columns = matrices.b.shape
        bounds = matrices.bounds
        widest = max(stop - first for first, stop in pairwise(bounds))
        assert out.stride(1) == 1
        if len(out):
            _expand[(len(tokens.experts), triton.cdiv(widest, _COLUMNS), len(bounds) - 1)](
                *(inner, matrices.b, matrices.ranks, matrices.device_bounds, out),
                *(tokens.order, tokens.experts, tokens.firsts, tokens.ends, out.stride(0), len(out), columns, low_rank),
                SPLITS=len(inner),
                PARTS=len(bounds) - 1,
                BLOCK_R=min(_RANKS, max(16, triton.next_power_of_2(low_rank))),
                BLOCK_M=tokens.block,
                BLOCK_N=_COLUMNS,
                num_warps=max(4, tokens.block // 8),
            )


@triton.jit(do_not_specialize=["slots", "firsts", "ends", "tokens"])  # rows of one tensor begin anywhere
def _shrink(
    x,
    a,
    ranks,
    inner,
    order,
    slots,
    firsts,
    ends,
    x_stride,
    tokens,
    columns,
    depth,
    split_depth,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (blocks of tokens, blocks of ranks, splits of the depth)."""
    slot = tl.load(slots + tl.program_id(0))
    if slot < 0:
        return
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    counting = tl.load(ranks + slot) * PARTS
    if tl.program_id(1) * BLOCK_N >= counting:
        return
    place = tl.load(firsts + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    present = place < tl.load(ends + tl.program_id(0))
    token = tl.load(order + place, mask=present, other=0).to(tl.int64)
    inside = column < counting
    begin = tl.program_id(2) * split_depth
    at = tl.arange(0, BLOCK_K)
    x_at = x + (token * x_stride)[:, None] + at[None, :]
    a_at = a + (slot.to(tl.int64) * columns + column)[None, :] * depth + at[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(begin, tl.minimum(begin + split_depth, depth), BLOCK_K):
        within = first + at < depth
        rows = tl.load(x_at + first, mask=present[:, None] & within[None, :], other=0.0)
        block = tl.load(a_at + first, mask=within[:, None] & inside[None, :], other=0.0)
        total = tl.dot(rows, block, total, input_precision="ieee")
    out_at = inner + (tl.program_id(2).to(tl.int64) * tokens + token)[:, None] * columns + column[None, :]
    tl.store(out_at, total, mask=present[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["slots", "firsts", "ends", "tokens"])
def _expand(
    inner,
    b,
    ranks,
    bounds,
    out,
    order,
    slots,
    firsts,
    ends,
    out_stride,
    tokens,
    columns,
    low_rank,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (blocks of tokens, blocks of columns of a part, parts)."""
    slot = tl.load(slots + tl.program_id(0))
    if slot < 0:
        return
    part = tl.program_id(2)
    end = tl.load(bounds + part + 1)
    first_column = tl.load(bounds + part) + tl.program_id(1) * BLOCK_N
    counting = tl.load(ranks + slot)
    if (first_column >= end) | (counting == 0):
        return
    place = tl.load(firsts + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    present = place < tl.load(ends + tl.program_id(0))
    token = tl.load(order + place, mask=present, other=0).to(tl.int64)
    column = first_column + tl.arange(0, BLOCK_N)
    inside = column < end
    out_at = out + (token * out_stride)[:, None] + column[None, :]
    mask = present[:, None] & inside[None, :]
    total = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    for first in range(0, counting, BLOCK_R):
        rank = first + tl.arange(0, BLOCK_R)
        within = rank < counting
        rows = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in range(SPLITS):
            at = inner + (split * tokens.to(tl.int64) + token)[:, None] * (low_rank * PARTS) + (rank * PARTS + part)[None, :]
            rows += tl.load(at, mask=present[:, None] & within[None, :], other=0.0)
        b_at = b + (slot.to(tl.int64) * low_rank + rank)[:, None] * columns + column[None, :]
        block = tl.load(b_at, mask=within[:, None] & inside[None, :], other=0.0)
        total = tl.dot(rows.to(block.dtype), block, total, input_precision="ieee")
    tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)
