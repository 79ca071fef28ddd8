"""Paged attention on the device: the launches of `attention_kernels`, with the sizes of their blocks.

Caches are [num_pages, page_size, num_kv_heads, width], contiguous. Knows tensors and shapes; nothing of steps, layers or pools.
Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from aengine.kernels.paged_cache import PagedCache, Scoring
from aengine.kernels.triton.attention_kernels import prefill_kernel

MAX_HEAD_DIM = 256
"""With larger heads two blocks of keys and values do not fit into the shared memory of every device."""
MAX_LATENT, MAX_REST = 512, 64
"""The same for the values of a latent cache, and for what its keys have more."""
MIN_DOT = 16  # rows and columns of the smallest product of matrices
_BLOCK_BYTES = 16384  # of queries, keys or values in a program
_LEAST_AHEAD = 16384  # bytes of keys and values that a program loads at once; with fewer it loads further ahead


class PageLists(NamedTuple):
    """The pages of rows, as in `AttentionMetadata`; int32, on the device."""

    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the work is divided among programs. All but `split_keys` are constants of the compiled kernels."""

    keys: int  # that a program reads at a time
    queries: int  # the most pairs of query and head of one KV head in a program of decode rows
    split_keys: int  # the fewest keys of a part of a decode row, or of a prefix of several
    least_queries: int = MIN_DOT  # room for pairs in a program of decode rows, at least
    prompt_queries: int = MIN_DOT  # pairs in a program of prompts
    stages: int = 3  # how many blocks of keys and values are loaded ahead, and one more

    @classmethod
    def of(cls, head_dim: int, value_dim: int, latent: bool, dtype: torch.dtype, cache_dtype: torch.dtype, hopper: bool) -> Blocks:
        """The blocks for queries of `head_dim` and `dtype`. On Hopper (`is_hopper`) a program may have 227 KB of shared memory, and there
        are products of 64 rows that read it directly; elsewhere it has 99 KB."""
        row_bytes = width(value_dim if latent else head_dim) * dtype.itemsize
        queries = min(64, max(MIN_DOT, _BLOCK_BYTES // row_bytes))
        keys = min(64, max(MIN_DOT, _BLOCK_BYTES * (2 if latent and hopper else 1) // row_bytes))  # a latent block is keys and values
        wide = hopper and not latent and dtype.itemsize == 2
        # Products of 64 rows on Hopper need each number of a float8 cache converted once, which is less work than products of 16 rows.
        least = queries if wide and queries == 64 and cache_dtype.itemsize == 1 else MIN_DOT
        stages = 3 if value_dim <= MAX_HEAD_DIM or dtype.itemsize == 2 else 2
        if keys * (width(head_dim) + width(value_dim)) * cache_dtype.itemsize < _LEAST_AHEAD:
            stages += 1
        return cls(keys, queries, split_keys=256, least_queries=least, prompt_queries=128 if wide else queries, stages=stages)


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fits(head_dim: int, value_dim: int) -> bool:
    """Whether there are kernels for keys and values of these widths: equal ones, or those of a latent cache."""
    return value_dim == head_dim <= MAX_HEAD_DIM or (value_dim <= MAX_LATENT and 0 < head_dim - value_dim <= MAX_REST)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on tensors of this device: CUDA, or the CPU if Triton interprets them."""
    return device.type == "cuda" or (device.type == "cpu" and isinstance(prefill_kernel, InterpretedFunction))


def prefill_tiles(lengths: NDArray[np.int32], seq_lens: NDArray[np.int32], first_row: int, group: int, blocks: Blocks) -> NDArray[np.int32]:
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
    blocks: Blocks,
) -> None:
    """Attention of the queries of the rows in `tiles` (`prefill_tiles`, on the device), which are the last of their rows, to `out`
    (contiguous).

    `query` is [T, num_heads, head_dim]; row r has queries `qo_indptr[r]:qo_indptr[r+1]`. `sinks` and `slopes` as of `attend_decodes`.
    """
    num_heads, value_dim = out.shape[1:]
    num_kv_heads, page_size = cache.keys.shape[2], cache.keys.shape[1]
    assert query.stride(2) == 1
    assert out.is_contiguous()
    assert tiles.is_contiguous()
    prefill_kernel[(num_kv_heads, tiles.shape[1])](
        *(query, cache.keys, cache.values, query if sinks is None else sinks, query if slopes is None else slopes, out),
        *(qo_indptr, *lists, tiles[0], tiles[1]),
        *(query.stride(0), query.stride(1), scoring.scale * cache.key_scale, cache.value_scale),
        WINDOW=scoring.window or 0,
        SOFT_CAP=scoring.soft_cap,
        SINKS=sinks is not None,
        SLOPES=slopes is not None,
        PAGE_SIZE=page_size,
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        VALUE_DIM=value_dim,
        DIM=width(value_dim),
        LATENT=cache.latent,
        REST=query.shape[2] - value_dim,
        REST_DIM=width(query.shape[2] - value_dim),
        BLOCK_M=blocks.prompt_queries,
        BLOCK_N=blocks.keys,
        num_warps=8 if blocks.prompt_queries > 64 else 4,
        num_stages=blocks.stages,
    )


def width(head_dim: int) -> int:
    """The width of a head, or of a part of it, in a matrix product."""
    return max(MIN_DOT, int(triton.next_power_of_2(head_dim)))
