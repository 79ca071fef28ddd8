"""The device code of attention of decode rows, by items of work (`aengine.attention.decode_work.DecodeWork`): what each item gets of its
keys, and the sum of what a row got of its items. Knows nothing of steps, layers or torch.

Caches, pages and units are those of `attention_kernels`. Queries, partial results and results of decode rows have less than 2^31 numbers,
so their addresses are computed in int32. What is launched depends on the numbers of items and rows alone. Arrays of work are slices of one
uploaded tensor, so kernels must not be specialized on their alignment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aengine.kernels.triton.attention_kernels import attend_keys, load_rest, load_slopes, with_sink


@triton.jit
def _attend_item(
    query,
    key_cache,
    value_cache,
    pages,
    begin,
    end,
    first,
    count,
    split,
    rows,
    num_rows,
    partial,
    partial_lse,
    sinks,
    slopes,
    out,
    query_token_stride,
    query_head_stride,
    scale,
    value_scale,
    kv_head,
    part,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,
    LATENT: tl.constexpr,
    REST: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The `part`-th BLOCK_M of the item's count * GROUP pairs of row and head of one KV head."""
    flat = part * BLOCK_M + tl.arange(0, BLOCK_M)
    there = flat < count * GROUP
    dim = tl.arange(0, DIM)
    mask = there[:, None] & (dim < VALUE_DIM)[None, :]
    row = tl.load(rows + first + flat // GROUP, mask=there, other=0)
    head = kv_head * GROUP + flat % GROUP
    q_at = query + (row * query_token_stride + head * query_head_stride)[:, None]
    q = tl.load(q_at + REST + dim[None, :], mask=mask, other=0.0)
    q_rest = load_rest(q_at, there, q, REST, REST_DIM)

    # An item has no key that one of its rows does not see: neither later ones nor those behind a window.
    position = tl.zeros([BLOCK_M], tl.int32) + (end - 1)
    if SLOPES:  # what counts is how far each row's query is from a key
        position = tl.load(rows + 3 * num_rows + row, mask=there, other=1) - 1
    slope = load_slopes(slopes, head, there, SLOPES)
    acc, total, top = attend_keys(
        q, q_rest, slope, position, position, end, key_cache, value_cache, pages, kv_head, begin, begin, end, scale,
        0, False, SOFT_CAP, SLOPES, PAGE_SIZE, PAGE_STRIDE, KV_HEADS, KEY_STRIDE, VALUE_DIM, DIM, LATENT, REST, REST_DIM, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    row = tl.load(rows + first + flat // GROUP, mask=there, other=0, volatile=True)  # again, for it would take registers until here
    place = tl.load(rows + num_rows + row, mask=there, other=-1)
    kept = there & (place >= 0)
    partial_at = (place + split) * (KV_HEADS * GROUP) + head
    dims = (dim < VALUE_DIM)[None, :]
    tl.store(partial + partial_at[:, None] * VALUE_DIM + dim[None, :], acc / total[:, None], mask=kept[:, None] & dims)
    tl.store(partial_lse + partial_at, top + tl.log2(total), mask=kept)
    if SINKS:
        fade, total = with_sink(total, top, tl.load(sinks + head, mask=there, other=0.0))
        acc = acc * fade[:, None]
    alone = there & (place < 0)
    out_at = row * (KV_HEADS * GROUP) + head
    result = acc * (value_scale / total)[:, None]
    tl.store(out + out_at[:, None] * VALUE_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=alone[:, None] & dims)


@triton.jit(do_not_specialize=["kv_indices", "items", "rows", "num_rows"])
def decode_kernel(
    query,
    key_cache,
    value_cache,
    kv_indices,
    items,
    rows,
    num_rows,
    partial,
    partial_lse,
    sinks,
    slopes,
    out,
    query_token_stride,
    query_head_stride,
    scale,
    value_scale,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,
    LATENT: tl.constexpr,
    REST: tl.constexpr,
    REST_DIM: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
):
    """Grid (items * KV heads * parts), all of an item behind each other: a part of the pairs of row and head of an item, FEW of them, or
    MANY where the item has more pairs than that; then there is one part.

    Writes rows that have one item to `out` [rows, KV_HEADS * GROUP, VALUE_DIM]. Of the others writes `partial` [places, KV_HEADS * GROUP,
    VALUE_DIM] float32, and the log2-sum-exp2 of scores `partial_lse` [places, KV_HEADS * GROUP].
    """
    parts = tl.cdiv(GROUP, FEW)
    item = items + tl.program_id(0) // (KV_HEADS * parts) * ITEM_FIELDS
    count = tl.load(item + 4)
    if count == 0:
        return
    pages = kv_indices + tl.load(item)
    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    first = tl.load(item + 3)
    split = tl.load(item + 5)
    kv_head = tl.program_id(0) // parts % KV_HEADS
    part = tl.program_id(0) % parts
    if MANY == FEW or count * GROUP <= FEW:  # where they are equal no other branch is compiled
        _attend_item(
            query, key_cache, value_cache, pages, begin, end, first, count, split, rows, num_rows, partial, partial_lse, sinks, slopes,
            out, query_token_stride, query_head_stride, scale, value_scale, kv_head, part, SOFT_CAP, SINKS, SLOPES, PAGE_SIZE,
            PAGE_STRIDE, KV_HEADS, KEY_STRIDE, GROUP, VALUE_DIM, DIM, LATENT, REST, REST_DIM, FEW, BLOCK_N,
        )  # fmt: skip
    else:
        _attend_item(
            query, key_cache, value_cache, pages, begin, end, first, count, split, rows, num_rows, partial, partial_lse, sinks, slopes,
            out, query_token_stride, query_head_stride, scale, value_scale, kv_head, part, SOFT_CAP, SINKS, SLOPES, PAGE_SIZE,
            PAGE_STRIDE, KV_HEADS, KEY_STRIDE, GROUP, VALUE_DIM, DIM, LATENT, REST, REST_DIM, MANY, BLOCK_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "num_rows"])
def combine_kernel(
    partial,
    partial_lse,
    sinks,
    out,
    rows,
    num_rows,
    value_scale,
    SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows * heads): merges the partial results of a row that has several into `out` [rows, NUM_HEADS, VALUE_DIM], BLOCK at a
    time."""
    head = tl.program_id(0) % NUM_HEADS
    row = tl.program_id(0) // NUM_HEADS
    place = tl.load(rows + num_rows + row)
    if place < 0:
        return
    count = tl.load(rows + 2 * num_rows + row)
    dim = tl.arange(0, DIM)
    within = dim < VALUE_DIM
    acc = tl.zeros([DIM], tl.float32)
    total = 0.0
    top = -float("inf")
    for begin in range(0, count, BLOCK):
        split = begin + tl.arange(0, BLOCK)
        at = (place + split) * NUM_HEADS + head
        lse = tl.load(partial_lse + at, mask=split < count, other=-float("inf"))
        results = tl.load(partial + at[:, None] * VALUE_DIM + dim[None, :], mask=(split < count)[:, None] & within[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top)
        fade = tl.exp2(top - new_top)
        acc = acc * fade + tl.sum(results * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        top = new_top
    if SINKS:
        fade, total = with_sink(total, top, tl.load(sinks + head))
        acc = acc * fade
    result = acc * (value_scale / total)
    out_at = (row * NUM_HEADS + head) * VALUE_DIM
    tl.store(out + out_at + dim, result.to(out.dtype.element_ty), mask=within)
