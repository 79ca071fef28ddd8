"""Which tokens the queries of latent attention see, where an index chooses them (DeepSeek-V3.2, 2025): exactly those that plain torch
chooses, the highest scores, and the earlier token where scores are equal.

Caches and lists of pages are as in `attention_kernels.py`; a token's key begins with that of the index. A token has a position and the
place in `pages` where those of its row begin, both on the device. A query that sees no more than TOP_K tokens sees all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.paged_cache import PagedCache
from aengine.kernels.triton.attention import page_stride, width

_KEYS, _SCANNED = 128, 4096  # that a program scores, and that one looks at at once
_MOST_SCORES = 64 << 20  # that there is room for: those of other tokens are computed behind these


def choose(query: Tensor, weights: Tensor, cache: PagedCache, pages: Tensor, tokens: Tensor, top_k: int, longest: int) -> Tensor:
    """Where the tokens are that each query sees [T, top_k] int32, ascending in position, as slots of pages that are `page_stride` apart;
    those behind the last one are anything.

    `query` [T, index heads, numbers] with `weights` [T, index heads] float32 for the scores of heads; `tokens` [2, T] int32: positions, and
    where in `pages` those of the row begin. No position is `longest` or more.
    """
    count, heads, dim = query.shape
    keys, places = cache.keys, {"PAGE_SIZE": cache.keys.shape[1], "PAGE_STRIDE": page_stride(cache), "TOP_K": top_k}
    slots = torch.empty(count, top_k, dtype=torch.int32, device=query.device)
    assert query.stride(2) == 1
    assert weights.stride(1) == 1
    assert tokens.is_contiguous()
    at_once = max(1, min(count, _MOST_SCORES // max(longest, 1)))
    scores = torch.empty(at_once, longest, dtype=torch.float32, device=query.device)
    for first in range(0, count, at_once):
        number = min(at_once, count - first)
        given = tokens, count, first, longest
        score_kernel[(number, triton.cdiv(longest, _KEYS))](
            *(query, weights, keys, pages, scores, *given, query.stride(0), query.stride(1), weights.stride(0)),
            **places,
            HEADS=heads,
            DIM=dim,
            WIDTH=keys.shape[3],
            BH=width(heads),
            BD=width(dim),
            BN=_KEYS,
            num_warps=4,
        )
        choose_kernel[(number,)](scores, slots, pages, *given, **places, BLOCK=_SCANNED, num_warps=16)
    return slots


@triton.jit(do_not_specialize=["count", "first", "longest"])
def score_kernel(
    query, weights, keys, pages, scores, tokens, count, first, longest, query_stride, head_stride, weight_stride,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, TOP_K: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The scores of some tokens for a query, up to a factor that all have."""
    row, begin = tl.program_id(0), tl.program_id(1) * BN
    token = (first + row).to(tl.int64)
    position = tl.load(tokens + token)
    if (position >= TOP_K) & (begin <= position):
        head, dim, source = tl.arange(0, BH), tl.arange(0, BD), begin + tl.arange(0, BN)
        seen = tl.minimum(source, position)
        page = tl.load(pages + tl.load(tokens + count + token) + seen // PAGE_SIZE).to(tl.int64)
        at = (page * PAGE_STRIDE + seen % PAGE_SIZE) * WIDTH
        is_head, is_dim = head < HEADS, (dim < DIM)[None, :]
        q = tl.load(query + token * query_stride + head[:, None] * head_stride + dim[None, :], is_head[:, None] & is_dim, 0.0)
        k = tl.load(keys + at[:, None] + dim[None, :], is_dim, 0.0)
        k = k if k.dtype == q.dtype else k.to(tl.float32).to(q.dtype)
        of_heads = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0)
        score = tl.sum(of_heads * tl.load(weights + token * weight_stride + head, is_head, 0.0)[:, None], 0)
        tl.store(scores + row.to(tl.int64) * longest + source, score, source <= position)


@triton.jit
def _ordered(scores, source, end):
    """Scores as integers that are in the same order."""
    score = tl.load(scores + source, source < end, 0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)  # 0.0 is no more than -0.0
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit(do_not_specialize=["count", "first", "longest"])
def choose_kernel(
    scores, slots, pages, tokens, count, first, longest,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The slots of the tokens that a query sees. The lowest score of these is found 8 bits at a time, from the highest bits on."""
    row = tl.program_id(0)
    token = (first + row).to(tl.int64)
    end, index = tl.load(tokens + token) + 1, tl.arange(0, BLOCK)
    pages += tl.load(tokens + count + token)
    scores += row.to(tl.int64) * longest
    lowest = tl.zeros([1], tl.uint32)
    wanted = tl.zeros([1], tl.int32) + TOP_K  # of those that have the bits of `lowest`
    if end > TOP_K:
        digit = tl.arange(0, 256)
        for round in tl.static_range(4):
            counts = tl.zeros([256], tl.int32)
            for begin in range(0, end, BLOCK):
                source = begin + index
                bits = _ordered(scores, source, end)
                live = source < end
                if round > 0:
                    live = live & (bits >> (32 - 8 * round) == lowest >> (32 - 8 * round))
                counts += tl.histogram(((bits >> (24 - 8 * round)) & 255).to(tl.int32), 256, mask=live)
            higher = tl.sum(counts) - tl.cumsum(counts)
            found = tl.sum(tl.where(higher >= wanted, 1, 0))
            wanted -= tl.sum(tl.where(digit == found, higher, 0))
            lowest |= found.to(tl.uint32) << (24 - 8 * round)
    taken, equals = 0, 0
    for begin in range(0, end, BLOCK):
        source = begin + index
        seen = source < end
        if end > TOP_K:
            bits = _ordered(scores, source, end)
            is_equal = (seen & (bits == lowest)).to(tl.int32)
            seen = seen & ((bits > lowest) | ((is_equal > 0) & (equals + tl.cumsum(is_equal) <= wanted)))
            equals += tl.sum(is_equal)
        chosen = seen.to(tl.int32)
        page = tl.load(pages + source // PAGE_SIZE, seen, 0)
        to = slots + token * TOP_K + taken + tl.cumsum(chosen) - 1
        tl.store(to, page * PAGE_STRIDE + source % PAGE_SIZE, seen)
        taken += tl.sum(chosen)
