"""Random steps over scattered pages, with what each row has in them, for the tests of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import cpu_ops
import cpu_reference
import numpy as np
import torch
from torch import Tensor

from aengine.attention import StepLayout, build_layout
from aengine.kernels.arrays import INT4, INT8
from aengine.kernels.cpu.library import Workspace, stored_dim
from aengine.kernels.cpu.ops import KvPool

PAGES = {8: INT8, 4: INT4}
"""The dtypes of pages of integers, by bits."""


@dataclass
class Case:
    """Rows whose keys and values lie in layer 1 of a pool of two layers; everywhere else the pool is NaN."""

    pool: KvPool
    layout: StepLayout  # of the rows' last `lengths` tokens
    query: Tensor  # [T, heads, head_dim]
    keys: list[Tensor]  # per row [s, kv heads, head_dim], as stored: rounded in pages of integers
    values: list[Tensor]
    lengths: list[int]


def paged_case(
    workspace: Workspace,
    rows: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    value_dim: int | None = None,
    bits: int = 0,
    seed: int = 0,
) -> Case:
    """`rows` are pairs of tokens before the step and tokens in it; decodes (one token) come first.

    `bits`: of the integers of the pages, 8 or 4; 0: these are of `dtype`, as queries, keys and values are.
    """
    rows = sorted(rows, key=lambda row: row[1] != 1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    starts = np.array([start for start, _ in rows], dtype=np.int32)
    lengths = np.array([length for _, length in rows], dtype=np.int32)
    per_row = max((-(-(start + length) // page_size) for start, length in rows), default=1)
    num_pages = 1 + len(rows) * per_row
    table = (1 + rng.permutation(num_pages - 1)).reshape(1, -1, per_row).astype(np.int32)
    widths = {"key_dim": head_dim, "value_dim": head_dim if value_dim is None else value_dim}
    kv_dtype = PAGES[bits] if bits else dtype
    pool_size = {"layers_per_page": 2, "num_pages": num_pages, "page_size": page_size}
    pool = cpu_ops.pool_of_heads(kv_heads, *widths.values(), **pool_size, dtype=kv_dtype)
    poison(workspace, pool, heads, dtype)
    indices = np.arange(len(rows), dtype=np.int32)
    everything = build_layout(indices, 0, starts * 0, starts + lengths, table, page_size)
    total = everything.num_tokens
    keys, values = (torch.randn(total, kv_heads, width).to(dtype) for width in widths.values())
    write(workspace, pool, everything, heads, keys, values)
    if bits:
        keys, values = as_integers(keys, bits), as_integers(values, bits)
    layout = build_layout(indices, int((lengths == 1).sum()), starts, lengths, table, page_size)
    query = torch.randn(layout.num_tokens, heads, head_dim).to(dtype)
    sizes = (starts + lengths).tolist()
    return Case(pool, layout, query, list(torch.split(keys, sizes)), list(torch.split(values, sizes)), lengths.tolist())


def write(workspace: Workspace, pool: KvPool, layout: StepLayout, heads: int, keys: Tensor, values: Tensor) -> None:
    """Stores keys and values in layer 1, unrotated."""
    queries = torch.zeros(len(keys), heads * keys.shape[2], dtype=keys.dtype)
    cpu_ops.write(workspace, queries, keys, values, pool, 1, layout)


def as_integers(heads: Tensor, bits: int) -> Tensor:
    """What pages of so many bits hold of [..., width]: integers times a scale."""
    return torch.mul(*cpu_reference.quantized(heads, 2 ** (bits - 1) - 1))


def poison(workspace: Workspace, pool: KvPool, heads: int, dtype: torch.dtype) -> None:
    """Fills all pages but page 0 with NaN."""
    size, count = pool.c.page_size, pool.num_pages - 1
    if not count:
        return
    one = np.ones(1, dtype=np.int32)
    layout = build_layout(one * 0, 0, one * 0, one * (count * size), np.arange(1, count + 1, dtype=np.int32)[None, None], size)
    _, kv_heads, *widths = pool.parts[0][1]
    bad = (torch.full((layout.num_tokens, kv_heads, stored_dim(width)), torch.nan, dtype=dtype) for width in widths)
    write(workspace, pool, layout, heads, *bad)
