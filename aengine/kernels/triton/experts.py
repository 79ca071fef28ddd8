"""Linear layers of many experts at once: each row is multiplied with the matrices of the experts that it goes to, in one launch.

Choices, pairs of a token and one of its experts, are sorted by expert on the device; a block of them reads one expert's matrix. Nothing
here waits for the device, and launches depend on shapes alone, so all of it can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEW, _MANY = 16, 64  # choices of a block
_COLUMNS = 64
_DEPTH_BYTES = 128


@dataclass(frozen=True, slots=True)
class Grouping:
    """Choices sorted by expert, and cut into blocks of one expert each. Those with the expert -1 are empty."""

    order: Tensor  # [choices] int32, numbers of choices
    ends: Tensor  # [num_experts] int32, places in `order`
    experts: Tensor  # [blocks] int32
    firsts: Tensor  # [blocks] int32, places in `order`
    block: int  # choices of a block, at most

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> Grouping:
        """Of the chosen experts [T, top_k] int64."""
        flat = chosen.flatten()
        block = _FEW if len(flat) < _MANY // 2 * num_experts else _MANY
        counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
        ends, blocks = counts.cumsum(0), (counts + block - 1) // block
        block_ends = blocks.cumsum(0)
        numbers = torch.arange(min(len(flat), len(flat) // block + num_experts), device=flat.device)
        experts = torch.searchsorted(block_ends, numbers, right=True)
        inside = experts.clamp(max=num_experts - 1)
        firsts = (ends - counts)[inside] + (numbers - (block_ends - blocks)[inside]) * block
        present = torch.where(experts < num_experts, experts, -1)
        order = flat.argsort(stable=True)
        return cls(order.int(), ends.int(), present.int(), firsts.int(), block)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, grouping: Grouping, share: int) -> Tensor:
    """Row i // `share` of x [rows, in_features] times the matrix [out_features, in_features] of choice i's expert, plus its bias:
    [choices, out_features]. `weight` is contiguous, as are the rows of x."""
    _, columns, depth = weight.shape
    choices = len(grouping.order)
    out = torch.empty((choices, columns), dtype=x.dtype, device=x.device)
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    if choices:
        block_depth = _DEPTH_BYTES // x.element_size()
        _grouped_linear[(len(grouping.experts), triton.cdiv(columns, _COLUMNS))](
            *(x, weight, bias, out, grouping.order, grouping.ends, grouping.experts, grouping.firsts),
            *(x.stride(0), columns, depth, share),
            BLOCK_M=grouping.block,
            BLOCK_N=_COLUMNS,
            BLOCK_K=block_depth,
            num_warps=4,
            num_stages=3,
        )
    return out


@triton.jit(do_not_specialize=["share"])
def _grouped_linear(
    x,
    weight,
    bias,
    out,
    order,
    ends,
    experts,
    firsts,
    x_stride,
    columns,
    depth,
    share,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks of choices, blocks of columns)."""
    expert = tl.load(experts + tl.program_id(0))
    if expert < 0:
        return
    place = tl.load(firsts + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    present = place < tl.load(ends + expert)
    choice = tl.load(order + place, mask=present, other=0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < columns
    at = tl.arange(0, BLOCK_K)
    x_at = x + (choice // share)[:, None] * x_stride + at[None, :]
    weight_at = weight + (expert.to(tl.int64) * columns + column)[None, :] * depth + at[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, depth, BLOCK_K):
        within = begin + at < depth
        rows = tl.load(x_at + begin, mask=present[:, None] & within[None, :], other=0.0)
        matrix = tl.load(weight_at + begin, mask=within[:, None] & inside[None, :], other=0.0)
        total = tl.dot(rows, matrix, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + expert.to(tl.int64) * columns + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + choice[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=present[:, None] & inside[None, :])
