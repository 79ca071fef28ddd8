"""FlashInfer's fa3 kernels for prompts: whether they can be had, and which steps they are for.

They use what compute capability 9.0 has for large products, but neither split a row's keys nor put the heads of a group into one tile.
Their modules take many minutes to build, so they are used where they are built already. Knows nothing of wrappers or plans.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aengine.attention.base import AttentionSpec, first_line

_CAPABILITY = 9  # major: the instructions exist on 9.x alone
_MOST_TILES = 4096  # of one head, above which all heads have one schedule
_INT_WORKSPACE = 8 << 20  # bytes that a wrapper has for its plan
_SLACK = 1 << 13


def missing_fa3(library: ModuleType, spec: AttentionSpec, device: Any) -> str | None:
    """Why there are no kernels for `spec` on a device of these properties, in one line; None if there are."""
    if device.major != _CAPABILITY:
        return f"they need compute capability {_CAPABILITY}.x"
    if spec.cache_dtype != spec.dtype:
        return f"they read no KV cache of {spec.cache_dtype}"
    try:
        for window, soft_cap in dict.fromkeys((scoring.window is not None, scoring.soft_cap > 0) for scoring in spec.scoring):
            module = library.jit.gen_batch_prefill_module(
                backend="fa3",
                dtype_q=spec.dtype,
                dtype_kv=spec.dtype,
                dtype_o=spec.dtype,
                dtype_idx=torch.int32,
                head_dim_qk=spec.head_dim,
                head_dim_vo=spec.head_dim,
                pos_encoding_mode=0,
                use_sliding_window=window,
                use_logits_soft_cap=soft_cap,
                use_fp16_qk_reduction=False,
            )
            if not module.is_compiled:
                return f"there is no built module {module.name}"
    except Exception as error:  # of a folder that cannot be written to, say
        return first_line(error)
    return None


def suits_fa3(queries: NDArray[np.int32], spec: AttentionSpec, device: Any) -> bool:
    """Whether rows of these numbers of queries are enough work without splits, in tiles that are at least half full."""
    tile = 192 if spec.head_dim == 64 else 128
    tokens, tiles = int(queries.sum()), int((-(-queries // tile)).sum())
    enough = tiles * spec.num_heads >= device.multi_processor_count
    return enough and 2 * tokens >= tile * tiles and _plan_bytes(tokens, len(queries), tile, spec.num_heads) <= _INT_WORKSPACE


def _plan_bytes(tokens: int, rows: int, tile: int, num_heads: int) -> int:
    """The most that `PrefillSM90Plan` (scheduler.cuh) reserves: seven int32 for each tile of each head, and some for multiprocessors."""
    tiles = -(-tokens // tile) + rows - 1
    return 7 * 4 * tiles * (1 if tiles > _MOST_TILES else num_heads) + _SLACK
