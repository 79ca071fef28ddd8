"""Storing a step's keys and values in pages [num_pages, page_size, num_kv_heads, head_dim], for backends without a kernel of their own.

Owns the choice between our Triton kernel and plain torch. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aengine.kernels.paged_cache import PagedCache, as_bytes, stored

KvWrite = Callable[[Tensor, Tensor, PagedCache, Tensor], None]
"""(key, value, cache, slots): stores [T, num_kv_heads, head_dim] keys and values at `slots` [T] int32; -1 is skipped. What is launched does
not depend on what the tensors hold, so it may be captured in a graph."""


def kv_write_for(device: torch.device) -> KvWrite:
    """The Triton kernel on CUDA where triton is installed, else plain torch."""
    if device.type != "cuda":
        return kv_write_torch
    try:
        from aengine.kernels.triton.attention import write
    except ImportError:
        return kv_write_torch
    return write


def kv_write_torch(key: Tensor, value: Tensor, cache: PagedCache, slots: Tensor) -> None:
    """A `KvWrite`, except that tokens without a slot are written to slot 0: it is on the reserved page 0, whose contents only padding rows
    read. Only the device knows which tokens these are, and a graph cannot leave out some."""
    where = slots.clamp(min=0).long()
    for new, pages, scale in ((key, cache.keys, cache.key_scale), (value, cache.values, cache.value_scale)):
        as_bytes(pages).view(-1, *pages.shape[2:]).index_copy_(0, where, stored(new, pages.dtype, scale))
