"""Attention of decode rows on the device: the launches of `decode_kernels`. Knows tensors and shapes; nothing of steps, layers or pools.

Nothing here waits for the device, and a launch depends on shapes and strides alone, so it can be captured in a graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from aengine.kernels.paged_cache import PagedCache, Scoring
from aengine.kernels.triton.attention import Blocks, width
from aengine.kernels.triton.decode_kernels import combine_kernel, decode_kernel

_COMBINED_NUMBERS = 8192
"""Of partial results that a program holds at a time: 64 in each of its threads."""


class Work(NamedTuple):
    """The work of n decode rows; as `DecodeWork`, on the device."""

    items: Tensor  # [items, fields] int32
    rows: Tensor  # [fields, n] int32
    num_partials: int  # for which there must be room; 0: each row has one item


def decode_block(group: int, blocks: Blocks) -> int:
    """The most query heads of a KV head, of `group`, that a program computes for a lone row."""
    return min(max(blocks.least_queries, int(triton.next_power_of_2(group))), blocks.queries)


def attend_decodes(
    query: Tensor,
    out: Tensor,
    cache: PagedCache,
    kv_indices: Tensor,
    work: Work,
    scoring: Scoring,
    sinks: Tensor | None,
    slopes: Tensor | None,
    blocks: Blocks,
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
    decode_kernel[(num_kv_heads * triton.cdiv(group, few), len(work.items))](
        *(query, cache.keys, cache.values, kv_indices, work.items, work.rows, num_rows),
        *(partial, partial_lse, query if sinks is None else sinks, query if slopes is None else slopes, out),
        *(query.stride(0), query.stride(1), scoring.scale * cache.key_scale, cache.value_scale),
        SOFT_CAP=scoring.soft_cap,
        SLOPES=slopes is not None,
        PAGE_SIZE=page_size,
        KV_HEADS=num_kv_heads,
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
    combine_kernel[(num_heads, num_rows)](
        *(partial, partial_lse, query if sinks is None else sinks, out, work.rows, num_rows, cache.value_scale),
        NUM_HEADS=num_heads,
        BLOCK=_COMBINED_NUMBERS // width(value_dim),
        **shared,
        num_warps=4,
    )
