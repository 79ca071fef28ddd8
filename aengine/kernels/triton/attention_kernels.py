"""The device code of paged attention. Knows nothing of steps, layers or torch.

Caches are [num_pages, PAGE_SIZE, KV_HEADS, width], contiguous but for the pages, which are PAGE_STRIDE tokens apart, and keys, which may be
parts of what is stored and are KEY_STRIDE numbers apart. Values have VALUE_DIM numbers; queries and keys have REST more, which come first:
a latent cache (DeepSeek-V2, arXiv 2405.04434) is multiplied in two parts, because blocks are powers of 2. Row r has the pages
`kv_indices[kv_indptr[r]:kv_indptr[r+1]]`, the last of which holds `last_page_len[r]` tokens; all index arrays are int32. Lengths are read
on the device, so a launch depends only on the number of rows. Addresses are computed in int64: a pool may have more than 2^31 elements.
Nothing is read at or beyond a row's length, where a page may hold anything.

Scores are kept in units of log2(e), so that every exponential is an exp2. The recurrence over blocks of keys is that of FlashAttention
(Dao et al. 2022, arXiv 2205.14135), the split over keys that of Flash-Decoding.

Index arrays are slices of one uploaded tensor, so their alignment changes from step to step: kernels must not be specialized on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _seq_len(kv_indptr, last_page_len, row, PAGE_SIZE: tl.constexpr):
    """Returns the index of the row's first page in kv_indices, and its number of tokens."""
    first = tl.load(kv_indptr + row)
    pages = tl.load(kv_indptr + row + 1) - first
    return first, (pages - 1) * PAGE_SIZE + tl.load(last_page_len + row)


@triton.jit
def load_rest(at, present, query, REST: tl.constexpr, REST_DIM: tl.constexpr):
    """The first REST numbers of the queries at `at` [BLOCK_M, 1]; where there are none, `query`, which is not used then."""
    if REST == 0:
        loaded = query
    else:
        rest = tl.arange(0, REST_DIM)
        loaded = tl.load(at + rest[None, :], mask=present[:, None] & (rest < REST)[None, :], other=0.0)
    return loaded


@triton.jit
def load_slopes(slopes, head, present, SLOPES: tl.constexpr):
    """Those of the heads [BLOCK_M]; where there are none, `head`, which is not used then."""
    return tl.load(slopes + head, mask=present, other=0.0) if SLOPES else head


@triton.jit
def _pages_of(pages, source, PAGE_SIZE: tl.constexpr):
    return tl.load(pages + source.to(tl.uint32) // PAGE_SIZE)


@triton.jit
def _loaded(at, within, dtype: tl.constexpr):
    """Numbers of the cache in the `dtype` of queries, 0 where they are not `within` a head."""
    loaded = tl.load(at, mask=within, other=0.0)
    return loaded if loaded.dtype == dtype else loaded.to(tl.float32).to(dtype)


@triton.jit
def attend_keys(
    query,
    query_rest,
    slope,
    position,
    last,
    seen,
    key_cache,
    value_cache,
    pages,
    kv_head,
    lowest,
    begin,
    end,
    scale,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SLOPES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,
    LATENT: tl.constexpr,
    REST: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention of queries at `position` [BLOCK_M] of a row over the keys `begin` to `end` in its `pages`, up to `last` [BLOCK_M]. What is
    before the key `lowest` is not read. `query` [BLOCK_M, DIM] are their last VALUE_DIM numbers, `query_rest` [BLOCK_M, REST_DIM] those
    before, if there are any. LATENT: values are the last numbers of keys. All queries attend to the first `seen` keys of the row, or those
    of them in their windows. SLOPES: scores lose `slope` [BLOCK_M] for each position between key and query.

    Returns the weighted sum of values [BLOCK_M, DIM], the sum of weights, and the largest score [BLOCK_M], by which weights are divided.
    """
    # A latent block is a factor of both products. Where it is the left one of the second, tensor cores of Hopper read it from shared memory
    # as it was loaded, so it can be loaded ahead; as the right one it would be stored once more.
    turned: tl.constexpr = LATENT and query.dtype != tl.float32
    acc = tl.zeros([DIM, BLOCK_M] if turned else [BLOCK_M, DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    dim = tl.arange(0, DIM)[None, :]
    rest = tl.arange(0, REST_DIM)[None, :]
    is_scaled: tl.constexpr = SLOPES or SOFT_CAP > 0
    unit = _LOG2E if is_scaled else scale * _LOG2E
    # Pages are read a block before the keys: loads that depend on loads of the same block would not be ahead of the products.
    page = _pages_of(pages, tl.maximum(tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1), lowest), PAGE_SIZE)
    for block in range(begin, end, BLOCK_N):
        source = block + tl.arange(0, BLOCK_N)
        slot = page.to(tl.int64) * PAGE_STRIDE + tl.maximum(tl.minimum(source, end - 1), lowest).to(tl.uint32) % PAGE_SIZE
        page = _pages_of(pages, tl.minimum(source + BLOCK_N, end - 1), PAGE_SIZE)
        at = (slot * KV_HEADS + kv_head)[:, None]
        key_at = key_cache + at * KEY_STRIDE
        key = _loaded(key_at + REST + dim, dim < VALUE_DIM, query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if REST > 0:
            key_rest = _loaded(key_at + rest, rest < REST, query.dtype)
            scores = tl.dot(query_rest, tl.trans(key_rest), scores, input_precision="ieee")
        if SOFT_CAP > 0:
            # tanh(x) = 1 - 2 / (1 + e^2x), which ends at 1 and -1 where the exponential overflows or vanishes
            scores = SOFT_CAP - 2.0 * SOFT_CAP / (1.0 + tl.exp2(scores * (scale * (2.0 * _LOG2E / SOFT_CAP))))
        if SLOPES:
            if SOFT_CAP == 0:
                scores = scores * scale
            scores = scores + slope[:, None] * (source[None, :] - position[:, None]).to(tl.float32)
        if WINDOW > 0 or block + BLOCK_N > seen:
            visible = (source[None, :] < end) & (source[None, :] <= last[:, None])
            if WINDOW > 0:
                first = position - position % WINDOW if CHUNKED else position - WINDOW + 1
                visible = visible & (source[None, :] >= first[:, None])
            scores = tl.where(visible, scores, -float("inf"))

        new_top = tl.maximum(top, tl.max(scores, 1) * unit)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf for a query that attends to no key so far: -inf - -inf would be NaN
        weights = tl.exp2(scores * unit - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        top = new_top
        weights = weights.to(query.dtype)
        if turned:
            acc = tl.dot(tl.trans(key), tl.trans(weights), acc * fade[None, :], input_precision="ieee")
        else:
            value = key if LATENT else _loaded(value_cache + at * VALUE_DIM + dim, dim < VALUE_DIM, query.dtype)
            acc = tl.dot(weights, value, acc * fade[:, None], input_precision="ieee")
    return tl.trans(acc) if turned else acc, total, top


@triton.jit
def with_sink(total, top, sink):
    """Returns what the sum of values is multiplied with when a sink joins the scores, and the new sum of weights. `sink` is the score as it
    is stored, `top` the largest other one in units of log2(e)."""
    sink = sink.to(tl.float32) * _LOG2E
    new_top = tl.maximum(top, sink)
    fade = tl.exp2(top - new_top)
    return fade, total * fade + tl.exp2(sink - new_top)


@triton.jit(do_not_specialize=["qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "tile_rows", "tile_begins", "seen"])
def prefill_kernel(
    query,
    key_cache,
    value_cache,
    sinks,
    slopes,
    out,
    qo_indptr,
    kv_indptr,
    kv_indices,
    last_page_len,
    tile_rows,
    tile_begins,
    seen,
    query_token_stride,
    query_head_stride,
    scale,
    value_scale,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    SEEN: tl.constexpr,
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
    """Grid (tiles, KV heads). SEEN: query t sees the first `seen[t]` keys of its row.

    A row's queries and the GROUP heads of each are one sequence of length * GROUP, query by query; a tile is
    BLOCK_M of it, from `tile_begins` on, so that no group size leaves a tile half empty. Writes `out` [T, KV_HEADS * GROUP,
    VALUE_DIM]."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(tile_rows + tile)
    tile_begin = tl.load(tile_begins + tile)
    first_query = tl.load(qo_indptr + row)
    length = tl.load(qo_indptr + row + 1) - first_query
    first_page, seq_len = _seq_len(kv_indptr, last_page_len, row, PAGE_SIZE)
    start = seq_len - length

    flat = tile_begin + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM)
    mask = (flat < length * GROUP)[:, None] & (dim < VALUE_DIM)[None, :]
    local = tl.minimum(flat // GROUP, length - 1)  # beyond the end: the last query again, which is not stored
    head = kv_head * GROUP + flat % GROUP
    token = (first_query + local).to(tl.int64)
    q_at = query + (token * query_token_stride + head * query_head_stride)[:, None]
    q = tl.load(q_at + REST + dim[None, :], mask=mask, other=0.0)
    q_rest = load_rest(q_at, flat < length * GROUP, q, REST, REST_DIM)

    high = start + tl.minimum((tile_begin + BLOCK_M - 1) // GROUP, length - 1) + 1
    low = 0
    if WINDOW > 0:
        low = start + tile_begin // GROUP
        low = low - low % WINDOW if CHUNKED else tl.maximum(low - WINDOW + 1, 0)
    position = start + local
    last = position
    if SEEN:
        last = tl.load(seen + first_query + local) - 1
        high = tl.max(last) + 1
    pages = kv_indices + first_page
    # Blocks of keys begin at multiples of their length, so that sums of a query do not depend on the others of its tile.
    slope = load_slopes(slopes, head, flat < length * GROUP, SLOPES)
    acc, total, top = attend_keys(
        q, q_rest, slope, position, last, start + tile_begin // GROUP + 1, key_cache, value_cache, pages, kv_head, low,
        low // BLOCK_N * BLOCK_N, high, scale,
        WINDOW, CHUNKED, SOFT_CAP, SLOPES, PAGE_SIZE, PAGE_STRIDE, KV_HEADS, KEY_STRIDE, VALUE_DIM, DIM, LATENT, REST, REST_DIM, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
    if SINKS:
        fade, total = with_sink(total, top, tl.load(sinks + head))
        acc = acc * fade[:, None]
    result = acc * (value_scale / total)[:, None]
    out_at = (token * (KV_HEADS * GROUP) + head)[:, None] * VALUE_DIM + dim[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "slots", "qo_indptr", "kv_indptr", "kv_indices", "last_page_len"])
def convolve_kernel(
    inputs,
    weight,
    bias,
    out,
    key_cache,
    value_cache,
    slots,
    qo_indptr,
    kv_indptr,
    kv_indices,
    last_page_len,
    num_rows,
    token_stride,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, b): the causal convolution of token t in a block of the channels FIRST .. whose inputs are in one place of pages, keys
    before values. Inputs of the step come from `inputs` [T, CHANNELS], so no program waits for what another one stores."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = FIRST + column
    present = (column < KEY_WIDTH + VALUE_WIDTH) & (channel < CHANNELS)
    is_key = column < KEY_WIDTH
    row, behind = token * 0, token * 0 + num_rows  # the row of the token is in row .. behind - 1
    while behind - row > 1:
        middle = (row + behind) // 2
        below = tl.load(qo_indptr + middle) <= token
        row = tl.where(below, middle, row)
        behind = tl.where(below, behind, middle)
    first_token = tl.load(qo_indptr + row)
    first_page, length = _seq_len(kv_indptr, last_page_len, row, PAGE_SIZE)
    position = length - (tl.load(qo_indptr + row + 1) - token)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        source, earlier = column * 0 + token - back, column * 0 + position - back
        in_step = present & (source >= first_token)
        is_stored = present & (earlier >= 0) & (source < first_token)
        given = tl.load(inputs + source.to(tl.int64) * token_stride + channel, mask=in_step, other=0.0).to(tl.float32)
        stored_at = tl.maximum(position - back, 0)  # of an input that there is; the others are masked
        slot = tl.load(kv_indices + first_page + stored_at // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + stored_at % PAGE_SIZE
        key = tl.load(key_cache + slot * KEY_WIDTH + column, mask=is_stored & is_key, other=0.0).to(tl.float32)
        value_at = value_cache + slot * VALUE_WIDTH + column - KEY_WIDTH
        value = tl.load(value_at, mask=is_stored & (column >= KEY_WIDTH), other=0.0).to(tl.float32)
        total += (given + key + value) * tl.load(weight + channel * TAPS + tap, mask=present, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=present, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * CHANNELS + channel, total, mask=present)
    own = tl.load(inputs + token.to(tl.int64) * token_stride + channel, mask=present, other=0.0)
    slot = column * 0 + tl.load(slots + token).to(tl.int64)
    tl.store(key_cache + slot * KEY_WIDTH + column, own, mask=present & is_key & (slot >= 0))
    tl.store(value_cache + slot * VALUE_WIDTH + column - KEY_WIDTH, own, mask=present & (column >= KEY_WIDTH) & (slot >= 0))
