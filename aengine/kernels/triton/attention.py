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
_KEY_BLOCK_BYTES = 16384
_QUERY_BLOCK_BYTES = 16384


class PageLists(NamedTuple):
    """The pages of rows, as in `AttentionMetadata`; int32, on the device."""

    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the work is divided among programs. `keys` and `queries` are constants of the compiled kernels."""

    keys: int  # that a program reads at a time
    queries: int  # the most pairs of query and head of one KV head in a program
    split_keys: int  # the fewest keys of a part of a decode row, or of a prefix of several

    @classmethod
    def of(cls, head_dim: int, dtype: torch.dtype) -> Blocks:
        """The blocks for queries of `head_dim` and `dtype`."""
        row_bytes = width(head_dim) * dtype.itemsize
        keys = min(64, max(MIN_DOT, _KEY_BLOCK_BYTES // row_bytes))
        return cls(keys=keys, queries=min(64, max(MIN_DOT, _QUERY_BLOCK_BYTES // row_bytes)), split_keys=256)


def fits(head_dim: int, value_dim: int) -> bool:
    """Whether there are kernels for keys and values of these widths: equal ones, or those of a latent cache."""
    return value_dim == head_dim <= MAX_HEAD_DIM or (value_dim <= MAX_LATENT and 0 < head_dim - value_dim <= MAX_REST)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on tensors of this device: CUDA, or the CPU if Triton interprets them."""
    return device.type == "cuda" or (device.type == "cpu" and isinstance(prefill_kernel, InterpretedFunction))


def prefill_tiles(lengths: NDArray[np.int32], first_row: int, group: int, blocks: Blocks) -> NDArray[np.int32]:
    """The tiles of the rows from `first_row` on, which have `lengths` queries: [2, tiles], the row of a tile, and its first pair of query
    and head of the row's length * group pairs."""
    counts = -(-lengths * group // blocks.queries)
    index = np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.repeat(np.arange(first_row, first_row + len(lengths)), counts)
    return np.stack((rows, index * blocks.queries)).astype(np.int32)


def attend_prefills(
    query: Tensor,
    out: Tensor,
    cache: PagedCache,
    lists: PageLists,
    qo_indptr: Tensor,
    tiles: Tensor,
    scoring: Scoring,
    sinks: Tensor | None,
    blocks: Blocks,
) -> None:
    """Attention of the queries of the rows in `tiles` (`prefill_tiles`, on the device), which are the last of their rows, to `out`
    (contiguous).

    `query` is [T, num_heads, head_dim]; row r has queries `qo_indptr[r]:qo_indptr[r+1]`. `sinks` as of
    `attend_decodes`.
    """
    num_heads, value_dim = out.shape[1:]
    num_kv_heads, page_size = cache.keys.shape[2], cache.keys.shape[1]
    assert query.stride(2) == 1
    assert out.is_contiguous()
    prefill_kernel[(tiles.shape[1], num_kv_heads)](
        *(query, cache.keys, cache.values, query if sinks is None else sinks, out, qo_indptr, *lists, tiles[0], tiles[1]),
        *(query.stride(0), query.stride(1), scoring.scale * cache.key_scale, cache.value_scale),
        WINDOW=scoring.window or 0,
        SOFT_CAP=scoring.soft_cap,
        SINKS=sinks is not None,
        PAGE_SIZE=page_size,
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        VALUE_DIM=value_dim,
        DIM=width(value_dim),
        LATENT=cache.latent,
        REST=query.shape[2] - value_dim,
        REST_DIM=width(query.shape[2] - value_dim),
        BLOCK_M=blocks.queries,
        BLOCK_N=blocks.keys,
        num_warps=4,
        num_stages=num_stages(value_dim),
    )


def width(head_dim: int) -> int:
    """The width of a head, or of a part of it, in a matrix product."""
    return max(MIN_DOT, int(triton.next_power_of_2(head_dim)))


def num_stages(value_dim: int) -> int:
    """How many blocks of keys and values are loaded ahead, and one more."""
    return 3 if value_dim <= MAX_HEAD_DIM else 2
