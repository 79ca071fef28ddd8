"""Writes keys and values to the pages of a layer. Knows nothing of steps or of how they are read.

Slots are slices of one uploaded tensor, so their alignment changes from step to step: kernels must not be specialized on it. Addresses are
computed in int64: a pool may have more than 2^31 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.paged_cache import KvTarget


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
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=0 if cache.latent else value.shape[2],
        HEADS=triton.next_power_of_2(num_kv_heads),
        DIM=triton.next_power_of_2(max(head_dim, value.shape[2])),
    )


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
