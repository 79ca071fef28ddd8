"""Random steps over scattered pages, with what each row has in them, for the tests of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import cpu_ops
import numpy as np
import torch
from torch import Tensor

from aengine.attention import StepLayout, build_layout
from aengine.kernels.cpu.library import Workspace
from aengine.kernels.cpu.pool import KvPool


@dataclass
class Case:
    """Rows whose keys and values lie in layer 1 of a pool of two layers; everywhere else the pool is NaN."""

    pool: KvPool
    layout: StepLayout  # of the rows' last `lengths` tokens
    query: Tensor  # [T, heads, head_dim]
    keys: list[Tensor]  # per row [s, kv heads, head_dim]
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
    seed: int = 0,
) -> Case:
    """`rows` are pairs of tokens before the step and tokens in it; decodes (one token) come first."""
    rows = sorted(rows, key=lambda row: row[1] != 1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    starts = np.array([start for start, _ in rows], dtype=np.int32)
    lengths = np.array([length for _, length in rows], dtype=np.int32)
    per_row = max((-(-(start + length) // page_size) for start, length in rows), default=1)
    num_pages = 1 + len(rows) * per_row
    table = (1 + rng.permutation(num_pages - 1)).reshape(-1, per_row).astype(np.int32)
    widths = {"key_dim": head_dim, "value_dim": head_dim}
    pool = KvPool(num_layers=2, num_pages=num_pages, page_size=page_size, num_kv_heads=kv_heads, **widths, dtype=dtype)
    poison(workspace, pool, heads)
    indices = np.arange(len(rows), dtype=np.int32)
    everything = build_layout(indices, 0, starts * 0, starts + lengths, table, page_size)
    total = everything.num_tokens
    keys, values = (torch.randn(total, kv_heads, head_dim).to(dtype) for _ in range(2))
    write(workspace, pool, everything, heads, keys, values)
    layout = build_layout(indices, int((lengths == 1).sum()), starts, lengths, table, page_size)
    query = torch.randn(layout.num_tokens, heads, head_dim).to(dtype)
    sizes = (starts + lengths).tolist()
    return Case(pool, layout, query, list(torch.split(keys, sizes)), list(torch.split(values, sizes)), lengths.tolist())


def write(workspace: Workspace, pool: KvPool, layout: StepLayout, heads: int, keys: Tensor, values: Tensor) -> None:
    """Stores keys and values in layer 1, unrotated."""
    head_dim = keys.shape[2]
    no_rotation = torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), dim=1)
    table = no_rotation.expand(int(layout.positions.max(initial=0)) + 1, head_dim)
    queries = torch.zeros(len(keys), heads, head_dim, dtype=keys.dtype)
    qkv = torch.cat((queries, keys, values), dim=1).flatten(1)
    cpu_ops.rotate_and_write(workspace, qkv, table, pool, 1, layout)


def poison(workspace: Workspace, pool: KvPool, heads: int) -> None:
    """Fills all pages but page 0 with NaN."""
    size, count = pool.c.page_size, pool.num_pages - 1
    if not count:
        return
    one = np.ones(1, dtype=np.int32)
    layout = build_layout(one * 0, 0, one * 0, one * (count * size), np.arange(1, count + 1, dtype=np.int32)[None], size)
    bad = torch.full((layout.num_tokens, pool.c.kv_heads, pool.c.key_dim), torch.nan, dtype=torch.bfloat16)
    write(workspace, pool, layout, heads, *(bad.to(torch.float32 if pool.c.element else torch.bfloat16),) * 2)
