"""Storing a step's keys and values in pages [num_pages, page_size, num_kv_heads, head_dim], for backends without a kernel of their own.

Owns the choice between our Triton kernel and plain torch. Knows nothing of steps.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class KvWrite(Protocol):
    def __call__(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, scales: tuple[float, float]
    ) -> None:
        """Stores [T, num_kv_heads, head_dim] keys and values at `slots` [T] int32; -1 is skipped. Float8 caches hold value / scale,
        saturated. Nothing depends on what the tensors hold, so it may be captured in a graph."""


def kv_write_for(device: torch.device) -> KvWrite:
    """The Triton kernel on CUDA where triton is installed, else plain torch."""
    if device.type != "cuda":
        return kv_write_torch
    try:
        from aengine.kernels.triton.attention import PagedCache, write
    except ImportError:
        return kv_write_torch

    def kv_write_triton(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, scales: tuple[float, float]
    ) -> None:
        write(key, value, PagedCache(key_cache, value_cache, *scales), slots)

    return kv_write_triton


def kv_write_torch(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, scales: tuple[float, float]) -> None:
    """Satisfies `KvWrite`, except that what is to be skipped goes to slot 0: it belongs to the reserved page 0, whose contents only padding
    rows read. Which tokens are skipped is known on the device alone, and a graph cannot leave some out."""
    where = slots.clamp(min=0).long()
    for new, cache, scale in ((key, key_cache, scales[0]), (value, value_cache, scales[1])):
        flat = cache.view(-1, *cache.shape[2:])
        if cache.dtype == new.dtype:
            flat.index_copy_(0, where, new)
        else:  # torch copies float8 by index as bytes only
            limit = torch.finfo(cache.dtype).max  # some versions of torch make NaN of what is larger
            scaled = (new.float() / scale).clamp_(-limit, limit).to(cache.dtype)
            flat.view(torch.uint8).index_copy_(0, where, scaled.view(torch.uint8))
