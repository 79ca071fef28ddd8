"""Attention of decode rows on the device: the launches of `decode_kernels`. Knows tensors and shapes; nothing of steps, layers or pools.

Nothing here waits for the device, and a launch depends on shapes and strides alone, so it can be captured in a graph.

Writes keys and values to the pages of a layer. Knows nothing of steps or of how they are read.

Slots are slices of one uploaded tensor, so their alignment changes from step to step: kernels must not be specialized on it. Addresses are
computed in int64: a pool may have more than 2^31 elements.

Paged attention on the device: the launches of `attention_kernels`, with the sizes of their blocks.

Caches are [num_pages, page_size, num_kv_heads, width], contiguous. Knows tensors and shapes; nothing of steps, layers or pools.
Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from aengine.api.dataclass import dataclass
from aengine.kernels.paged_cache import KvTarget, PagedCache, Scoring
from aengine.kernels.triton.attention_kernels import convolve_kernel, prefill_kernel
from aengine.kernels.triton.decode_kernels import combine_kernel, decode_kernel

_COMBINED_NUMBERS = 8192
"""Of partial results that a program holds at a time: 64 in each of its threads."""


class DeviceDecodeWork(NamedTuple):
    """The work of n decode rows; as `DecodeWork`, on the device."""

    items: Tensor  # [items, fields] int32
    rows: Tensor  # [fields, n] int32
    num_partials: int  # for which there must be room; 0: each row has one item


def decode_block(group: int, blocks: BlockSizes) -> int:
    """The most query heads of a KV head, of `group`, that a program computes for a lone row."""
    return min(max(blocks.least_queries, int(triton.next_power_of_2(group))), blocks.queries)


def attend_decodes(
    query: Tensor,
    out: Tensor,
    cache: PagedCache,
    kv_indices: Tensor,
    work: DeviceDecodeWork,
    scoring: Scoring,
    sinks: Tensor | None,
    slopes: Tensor | None,
    blocks: BlockSizes,
) -> None:
    """Attention of the first n of [T, num_heads, head_dim] queries, where query i is the last of row i, to `out` [T, num_heads, value_dim]
    (contiguous). `kv_indices` int32 are the pages of all rows.

    An item of several rows has at most `blocks.queries` pairs of a row and a head of one KV head. `sinks` and `slopes` [num_heads]: those
    of a layer that has them; slopes are float32.
    """
    num_heads, value_dim = out.shape[1:]
    num_kv_heads, page_size = cache.keys.shape[2], cache.keys.shape[1]
    num_rows = work.rows.shape[1]
    group = num_heads // num_kv_heads
    few = decode_block(group, blocks)
    assert query.stride(2) == 1
    assert out.is_contiguous()
    assert work.items.is_contiguous()
    assert work.rows.is_contiguous()
    # At least one, because where a tensor is empty its address is 0, for which a kernel would be compiled once more.
    partial = torch.empty((max(work.num_partials, 1), num_heads, value_dim), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(partial.shape[:2], dtype=torch.float32, device=query.device)
    shared = {"SINKS": sinks is not None, "VALUE_DIM": value_dim, "DIM": width(value_dim)}
    decode_kernel[(num_kv_heads * triton.cdiv(group, few) * len(work.items),)](
        *(query, cache.keys, cache.values, kv_indices, work.items, work.rows, num_rows),
        *(partial, partial_lse, query if sinks is None else sinks, query if slopes is None else slopes, out),
        *(query.stride(0), query.stride(1), scoring.scale * cache.key_scale, cache.value_scale),
        SOFT_CAP=scoring.soft_cap,
        SLOPES=slopes is not None,
        PAGE_SIZE=page_size,
        PAGE_STRIDE=page_stride(cache),
        KV_HEADS=num_kv_heads,
        KEY_STRIDE=cache.keys.stride(2),
        GROUP=group,
        LATENT=cache.latent,
        REST=query.shape[2] - value_dim,
        REST_DIM=width(query.shape[2] - value_dim),
        FEW=few,
        MANY=max(few, blocks.queries),
        BLOCK_N=blocks.keys,
        ITEM_FIELDS=work.items.shape[1],
        **shared,
        num_warps=4,
        num_stages=blocks.stages,
    )
    if not work.num_partials:
        return
    combine_kernel[(num_heads * num_rows,)](
        *(partial, partial_lse, query if sinks is None else sinks, out, work.rows, num_rows, cache.value_scale),
        NUM_HEADS=num_heads,
        BLOCK=_COMBINED_NUMBERS // width(value_dim),
        **shared,
        num_warps=4,
    )


def write(key: Tensor, value: Tensor, target: KvTarget) -> None:
    """Stores [T, num_kv_heads, width] keys and values, whose last dimension is contiguous. A float8 cache gets number / scale, saturated.

    The launch depends on shapes and strides alone, so it can be captured in a graph.
    """
    tokens, num_kv_heads, head_dim = key.shape
    if not tokens:
        return
    cache, slots = target
    assert key.stride(2) == 1
    assert value.stride(2) == 1
    assert len(slots) >= tokens
    write_kernel[(tokens,)](
        *(key, value, cache.keys, cache.values, slots),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        *(cache.key_scale, cache.value_scale),
        LIMIT=limit_of(cache.keys.dtype),
        PAGE_SIZE=cache.keys.shape[1],
        PAGE_STRIDE=page_stride(cache),
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=0 if cache.latent else value.shape[2],
        HEADS=triton.next_power_of_2(num_kv_heads),
        DIM=triton.next_power_of_2(max(head_dim, value.shape[2])),
    )


def page_stride(cache: PagedCache) -> int:
    """From page to page of a layer, in tokens: those of a page, or more where layers share a place of a page."""
    of_keys, of_values = (divmod(pages.stride(0), pages.stride(1)) for pages in (cache.keys, cache.values))
    assert of_keys == of_values
    assert not of_keys[1]
    return of_keys[0]


@triton.jit
def strided_slot(slot, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr):
    """Where a token is in a layer's pages, which are PAGE_STRIDE tokens apart."""
    if PAGE_STRIDE != PAGE_SIZE:
        slot = slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE
    return slot


def limit_of(dtype: torch.dtype) -> float:
    """LIMIT of `stored`: the largest number of a float8 cache; 0 for others."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0


@triton.jit(do_not_specialize=["slots"])
def write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_scale,
    value_scale,
    LIMIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Grid (tokens): stores keys and values (none if VALUE_DIM is 0) at a slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    slot = strided_slot(slot, PAGE_SIZE, PAGE_STRIDE)
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    in_key = (head < KV_HEADS) & (dim < HEAD_DIM)
    in_value = (head < KV_HEADS) & (dim < VALUE_DIM)
    at = slot * KV_HEADS + head
    new_key = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=in_key, other=0.0)
    new_value = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=in_value, other=0.0)
    tl.store(key_cache + at * HEAD_DIM + dim, stored(new_key, key_scale, key_cache.dtype.element_ty, LIMIT), mask=in_key)
    tl.store(value_cache + at * VALUE_DIM + dim, stored(new_value, value_scale, value_cache.dtype.element_ty, LIMIT), mask=in_value)


@triton.jit
def stored(x, scale, dtype: tl.constexpr, LIMIT: tl.constexpr):
    """`x` as a cache of `dtype` holds it. Comparisons instead of a clamp, so that NaN stays NaN."""
    if LIMIT > 0:
        wide = tl.div_rn(x.to(tl.float32), scale)  # `/` is not rounded correctly, which shows where float8 rounds
        wide = tl.where(wide > LIMIT, LIMIT, wide)
        wide = tl.where(wide < -LIMIT, -LIMIT, wide)
        return wide.to(dtype)
    elif x.dtype == dtype:
        return x
    else:
        return x.to(tl.float32).to(dtype)


MAX_HEAD_DIM = 256
"""With larger heads three blocks of keys and values do not fit into the shared memory of every device."""
MAX_WIDTH, MAX_REST = 512, 64
"""The widest values, and the most numbers that a key has more."""
MIN_DOT = 16  # rows and columns of the smallest product of matrices
_BLOCK_BYTES = 16384  # of queries, keys or values in a program
_LEAST_AHEAD = 16384  # bytes of keys and values that a program loads at once; with fewer it loads further ahead


class PageLists(NamedTuple):
    """The pages of rows, as in `AttentionMetadata`; int32, on the device."""

    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """How the work is divided among programs. All but `split_keys` are constants of the compiled kernels."""

    keys: int  # that a program reads at a time
    queries: int  # the most pairs of query and head of one KV head in a program of decode rows
    split_keys: int  # the fewest keys of a part of a decode row, or of a prefix of several
    least_queries: int = MIN_DOT  # room for pairs in a program of decode rows, at least
    stages: int = 3  # how many blocks of keys and values are loaded ahead, and one more
    prompt_queries: int = MIN_DOT  # pairs in a program of prompts
    prompt_keys: int = MIN_DOT  # as `keys`, of a program of prompts
    prompt_stages: int = 3  # as `stages`

    @classmethod
    def of(cls, head_dim: int, value_dim: int, latent: bool, dtype: torch.dtype, cache_dtype: torch.dtype, hopper: bool) -> BlockSizes:
        """The blocks for queries of `head_dim` and `dtype`. On Hopper (`is_hopper`) a program may have 227 KB of shared memory, and there
        are products of 64 rows that read it directly; elsewhere it has 99 KB."""
        row_bytes = width(value_dim if latent else head_dim) * dtype.itemsize
        queries = min(64, max(MIN_DOT, _BLOCK_BYTES // row_bytes))
        keys = min(64, max(MIN_DOT, _BLOCK_BYTES * (2 if latent and hopper else 1) // row_bytes))  # a latent block is keys and values
        narrow = hopper and dtype.itemsize == 2
        wide = narrow and not latent
        # Products of 64 rows on Hopper need each number of a float8 cache converted once, which is less work than products of 16 rows.
        least = queries if wide and queries == 64 and cache_dtype.itemsize == 1 else MIN_DOT
        stages = 3 if value_dim <= MAX_HEAD_DIM or (dtype.itemsize == 2 and (latent or hopper)) else 2
        if keys * (width(head_dim) + width(value_dim)) * cache_dtype.itemsize < _LEAST_AHEAD:
            stages += 1
        found = cls(keys, queries, 256, least, stages, 128 if wide else queries, keys, stages)
        if wide and value_dim > MAX_HEAD_DIM:
            return replace(found, prompt_queries=64, prompt_keys=32, prompt_stages=2)
        if narrow and latent and cache_dtype.itemsize == 2:  # measured on an H200: 2.2 times as fast as programs of 16 pairs and 32 keys
            found = replace(found, prompt_queries=64, prompt_keys=64, prompt_stages=2)
        return found


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fits(head_dim: int, value_dim: int) -> bool:
    """Whether there are kernels for keys and values of these widths."""
    return value_dim <= MAX_WIDTH and 0 <= head_dim - value_dim <= MAX_REST


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on tensors of this device: CUDA, or the CPU if Triton interprets them."""
    return device.type == "cuda" or (device.type == "cpu" and isinstance(prefill_kernel, InterpretedFunction))


def prefill_tiles(
    lengths: NDArray[np.int32], seq_lens: NDArray[np.int32], first_row: int, group: int, blocks: BlockSizes
) -> NDArray[np.int32]:
    """The tiles of the rows from `first_row` on, which have `lengths` queries and `seq_lens` keys: [2, tiles], the row of a tile, and its
    first pair of query and head of the row's length * group pairs. Those with most keys come first, so that none runs alone at the end."""
    counts = -(-lengths * group // blocks.prompt_queries)
    index = np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.repeat(np.arange(len(lengths)), counts)
    begins = index * blocks.prompt_queries
    ends = np.minimum((begins + blocks.prompt_queries - 1) // group + 1, lengths[rows])
    order = np.argsort(lengths[rows] - ends - seq_lens[rows], kind="stable")
    return np.stack((first_row + rows[order], begins[order])).astype(np.int32)


def attend_prefills(
    query: Tensor,
    out: Tensor,
    cache: PagedCache,
    lists: PageLists,
    qo_indptr: Tensor,
    tiles: Tensor,
    scoring: Scoring,
    sinks: Tensor | None,
    slopes: Tensor | None,
    blocks: BlockSizes,
    seen: Tensor | None = None,
) -> None:
    """Attention of the queries of the rows in `tiles` (`prefill_tiles`, on the device), which are the last of their rows, to `out`
    (contiguous).

    `query` is [T, num_heads, head_dim]; row r has queries `qo_indptr[r]:qo_indptr[r+1]`. `sinks` and `slopes` as of `attend_decodes`.
    `seen` [T] int32: how many keys of its row each query sees; None: those up to its own.
    """
    num_heads, value_dim = out.shape[1:]
    num_kv_heads, page_size = cache.keys.shape[2], cache.keys.shape[1]
    assert query.stride(2) == 1
    assert out.is_contiguous()
    assert tiles.is_contiguous()
    prefill_kernel[(tiles.shape[1], num_kv_heads)](  # in this order: only the first dimension can have more than 65,535
        *(query, cache.keys, cache.values, query if sinks is None else sinks, query if slopes is None else slopes, out),
        *(qo_indptr, *lists, tiles[0], tiles[1], qo_indptr if seen is None else seen),
        *(query.stride(0), query.stride(1), scoring.scale * cache.key_scale, cache.value_scale),
        WINDOW=scoring.window or 0,
        CHUNKED=scoring.chunked,
        SOFT_CAP=scoring.soft_cap,
        SINKS=sinks is not None,
        SLOPES=slopes is not None,
        SEEN=seen is not None,
        PAGE_SIZE=page_size,
        PAGE_STRIDE=page_stride(cache),
        KV_HEADS=num_kv_heads,
        KEY_STRIDE=cache.keys.stride(2),
        GROUP=num_heads // num_kv_heads,
        VALUE_DIM=value_dim,
        DIM=width(value_dim),
        LATENT=cache.latent,
        REST=query.shape[2] - value_dim,
        REST_DIM=width(query.shape[2] - value_dim),
        BLOCK_M=blocks.prompt_queries,
        BLOCK_N=blocks.prompt_keys,
        num_warps=8 if blocks.prompt_queries * max(1, width(value_dim) // MAX_HEAD_DIM) > 64 else 4,
        num_stages=blocks.prompt_stages,
    )


def width(head_dim: int) -> int:
    """The width of a head, or of a part of it, in a matrix product."""
    return max(MIN_DOT, int(triton.next_power_of_2(head_dim)))


def convolve(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    first: int,
    target: KvTarget,
    lists: PageLists,
    qo_indptr: Tensor,
) -> int:
    """The causal depthwise convolution with `weight` [channels, taps] of [T, channels] inputs, to `out`, in the channels from `first` on
    for which the target has room: their inputs are stored there, and those before the step read. Returns the first channel behind these.
    """
    tokens, channels = inputs.shape
    cache = target.cache
    key_width, value_width = (pages.shape[2] * pages.shape[3] for pages in (cache.keys, cache.values))
    value_width = 0 if cache.latent else value_width  # they have no room of their own
    behind = min(channels, first + key_width + value_width)
    if not tokens:
        return behind
    assert inputs.stride(1) == 1
    assert out.is_contiguous()
    assert weight.is_contiguous()
    block = 256
    convolve_kernel[(tokens, triton.cdiv(behind - first, block))](
        *(inputs, weight, weight if bias is None else bias, out, cache.keys, cache.values, target.slots, qo_indptr, *lists),
        *(len(lists.last_page_len), inputs.stride(0)),
        FIRST=first,
        CHANNELS=channels,
        TAPS=weight.shape[1],
        KEY_WIDTH=key_width,
        VALUE_WIDTH=value_width,
        PAGE_SIZE=cache.keys.shape[1],
        BIAS=bias is not None,
        BLOCK=block,
        num_warps=4,
    )
    return behind
