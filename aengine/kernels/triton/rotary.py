"""Rotary embedding of queries and keys with the norms before it, and with the write of keys and values after it, in one launch.

Arithmetic is float32; what torch rounds to the dtype of the activations between the steps is rounded here, too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.paged_cache import KvTarget
from aengine.kernels.params import Rotation
from aengine.kernels.triton.attention import limit_of, page_stride, stored, strided_slot

_HEADS_AT_ONCE = 8


def rotate(query: Tensor, key: Tensor, value: Tensor | None, rotation: Rotation, positions: Tensor, target: KvTarget | None) -> None:
    """Rotates queries and keys in place as `LayerOps.rotate` says. With a `value` and a `target` it writes the keys and values to the
    target as `LayerOps.rotate_and_write` says, and leaves `key` as it is.

    The launch depends on shapes and strides alone, so it can be captured in a graph."""
    tokens, query_heads, head_dim = query.shape
    key_heads, cos_sin, size = key.shape[1], rotation.cos_sin, rotation.cos_sin.shape[1]
    if not tokens:
        return
    cache, slots = (None, None) if target is None else target
    value_dim = 0 if value is None else value.shape[2]
    query_blocks = triton.cdiv(query_heads, _HEADS_AT_ONCE)
    _rotate[(tokens, query_blocks + triton.cdiv(key_heads, _HEADS_AT_ONCE))](
        *(query, query.stride(0), query.stride(1), query_heads, rotation.query_norm),
        *(key, key.stride(0), key.stride(1), key_heads, rotation.key_norm),
        *((None, 0, 0) if value is None else (value, value.stride(0), value.stride(1))),
        *((None, None, 1.0, 1.0) if cache is None else (cache.keys, cache.values, cache.key_scale, cache.value_scale)),
        *(slots, cos_sin, cos_sin.stride(0), positions, rotation.eps, query_blocks),
        LIMIT=0.0 if cache is None else limit_of(cache.keys.dtype),
        PAGE_SIZE=1 if cache is None else cache.keys.shape[1],
        PAGE_STRIDE=1 if cache is None else page_stride(cache),
        HALF=size // 2,
        BLOCK=triton.next_power_of_2(size // 2),
        REST=head_dim - size,
        REST_BLOCK=triton.next_power_of_2(max(1, head_dim - size)),
        VALUE_DIM=value_dim,
        VALUE_BLOCK=triton.next_power_of_2(max(1, value_dim)),
        HEADS=_HEADS_AT_ONCE,
        num_warps=4,
    )


def rotate_latent(query: Tensor, out: Tensor, key: Tensor, rotation: Rotation, positions: Tensor, target: KvTarget | None) -> None:
    """Rotates queries into `out` and latent keys as `LayerOps.rotate_latent` says. The launch depends on shapes and strides alone, so it
    can be captured in a graph."""
    tokens, query_heads, size = query.shape
    latent = key.shape[2] - size
    if not tokens:
        return
    cache, slots = (None, None) if target is None else target
    assert cache is None or cache.latent
    query_blocks = triton.cdiv(query_heads, _HEADS_AT_ONCE)
    _rotate_latent[(tokens, query_blocks + 1)](
        *(query, query.stride(0), query.stride(1), query_heads, out, out.stride(0), out.stride(1), key, key.stride(0), rotation.key_norm),
        *((key, key.stride(0), 1.0) if cache is None else (cache.keys, key.shape[2], cache.key_scale)),
        *(slots, rotation.cos_sin, rotation.cos_sin.stride(0), positions, rotation.eps, query_blocks),
        LIMIT=0.0 if cache is None else limit_of(cache.keys.dtype),
        HALF=size // 2,
        BLOCK=triton.next_power_of_2(size // 2),
        LATENT=latent,
        LATENT_BLOCK=triton.next_power_of_2(latent),
        HEADS=_HEADS_AT_ONCE,
        num_warps=4,
        enable_fp_fusion=False,  # a square fused into the sum over threads would give each thread a sum of its own
    )


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])  # slices of one upload begin anywhere
def _rotate(
    query,
    query_stride,
    query_head_stride,
    query_heads,
    query_norm,
    key,
    key_stride,
    key_head_stride,
    key_heads,
    key_norm,
    value,
    value_stride,
    value_head_stride,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    slots,
    cos_sin,
    cos_sin_stride,
    positions,
    eps,
    query_blocks,
    LIMIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid (tokens, blocks of query heads, then of key heads)."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos, sin = _angles_at(tl.load(positions + token).to(tl.int64), cos_sin, cos_sin_stride, HALF, BLOCK)
    if block < query_blocks:
        heads = query + token * query_stride
        head, present = _block_of(block, query_heads, HEADS)
        stride = query_head_stride
        _rotate_heads(heads, stride, heads, stride, head, present, query_norm, cos, sin, eps, 1.0, 0.0, HALF, BLOCK, REST, REST_BLOCK)
    else:
        heads = key + token * key_stride
        stride = key_head_stride
        if slots is None:
            head, present = _block_of(block - query_blocks, key_heads, HEADS)
            _rotate_heads(heads, stride, heads, stride, head, present, key_norm, cos, sin, eps, 1.0, 0.0, HALF, BLOCK, REST, REST_BLOCK)
        else:
            slot = tl.load(slots + token).to(tl.int64)
            head, present = _block_of(block - query_blocks, tl.where(slot < 0, 0, key_heads), HEADS)
            slot = strided_slot(slot, PAGE_SIZE, PAGE_STRIDE)
            dim = tl.arange(0, VALUE_BLOCK)
            in_value = present[:, None] & (dim < VALUE_DIM)[None, :]
            values = tl.load(value + token * value_stride + head[:, None] * value_head_stride + dim[None, :], mask=in_value, other=0.0)
            width: tl.constexpr = 2 * HALF + REST
            out = key_cache + slot * key_heads * width
            _rotate_heads(
                heads, stride, out, width, head, present, key_norm, cos, sin, eps, key_scale, LIMIT, HALF, BLOCK, REST, REST_BLOCK
            )
            value_at = value_cache + (slot * key_heads + head[:, None]) * VALUE_DIM + dim[None, :]
            tl.store(value_at, stored(values, value_scale, value_cache.dtype.element_ty, LIMIT), mask=in_value)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rotate_latent(
    query,
    query_stride,
    query_head_stride,
    query_heads,
    out,
    out_stride,
    out_head_stride,
    key,
    key_stride,
    norm,
    keys,
    keys_stride,
    key_scale,
    slots,
    cos_sin,
    cos_sin_stride,
    positions,
    eps,
    query_blocks,
    LIMIT: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid (tokens, blocks of query heads, then the key). A key goes to `keys` at its slot; without `slots` that of its token."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos, sin = _angles_at(tl.load(positions + token).to(tl.int64), cos_sin, cos_sin_stride, HALF, BLOCK)
    if block < query_blocks:
        heads = query + token * query_stride
        rotated = out + token * out_stride
        head, present = _block_of(block, query_heads, HEADS)
        _rotate_heads(heads, query_head_stride, rotated, out_head_stride, head, present, None, cos, sin, eps, 1.0, 0.0, HALF, BLOCK, 0, 1)
    else:
        slot = token
        if slots is not None:
            slot = tl.load(slots + token).to(tl.int64)
        source = key + token * key_stride
        target = keys + slot * keys_stride
        lone, written = _block_of(0, tl.where(slot < 0, 0, 1), 1)
        _rotate_heads(source, 0, target, 0, lone, written, None, cos, sin, eps, key_scale, LIMIT, HALF, BLOCK, 0, 1)
        dtype: tl.constexpr = key.dtype.element_ty
        at = tl.arange(0, LATENT_BLOCK)
        inside = at < tl.where(slot < 0, 0, LATENT)
        latent = tl.load(source + 2 * HALF + at, mask=inside, other=0.0).to(tl.float32)
        normed = latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / LATENT + eps)
        weighted = _weighted(normed, norm + at, inside, dtype).to(dtype)
        tl.store(target + 2 * HALF + at, stored(weighted, key_scale, keys.dtype.element_ty, LIMIT), mask=inside)


@triton.jit
def _angles_at(position, cos_sin, cos_sin_stride, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """The cosines and the sines of a position, [BLOCK] each, of which HALF are."""
    at = tl.arange(0, BLOCK)
    angles = cos_sin + position * cos_sin_stride + at
    return tl.load(angles, mask=at < HALF, other=0.0), tl.load(angles + HALF, mask=at < HALF, other=0.0)


@triton.jit
def _block_of(block, num_heads, HEADS: tl.constexpr):
    """The heads of a block, and which of them there are."""
    head = block * HEADS + tl.arange(0, HEADS)
    return head, head < num_heads


@triton.jit
def _rotate_heads(
    heads,
    head_stride,
    out,
    out_stride,
    head,
    present,
    norm,
    cos,
    sin,
    eps,
    scale,
    LIMIT: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """The `present` ones of heads `head` [HEADS] of one token, to `out`, which may be `heads`. The norm sees whole heads, of which the last
    REST numbers are not rotated. `scale` and LIMIT are those of `stored`."""
    dtype: tl.constexpr = heads.dtype.element_ty
    out_dtype: tl.constexpr = out.dtype.element_ty
    at = tl.arange(0, BLOCK)
    inside = present[:, None] & (at < HALF)[None, :]
    source = heads + head[:, None] * head_stride
    first = tl.load(source + at[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + at[None, :], mask=inside, other=0.0).to(tl.float32)
    if REST > 0:
        rest_at = 2 * HALF + tl.arange(0, REST_BLOCK)
        in_rest = present[:, None] & (rest_at < 2 * HALF + REST)[None, :]
        rest = tl.load(source + rest_at[None, :], mask=in_rest, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
        first = _weighted(first * factor, norm + at, at < HALF, dtype)
        second = _weighted(second * factor, norm + HALF + at, at < HALF, dtype)
        if REST > 0:
            rest = _weighted(rest * factor, norm + rest_at, rest_at < 2 * HALF + REST, dtype)
    turned_first = (first * cos[None, :] - second * sin[None, :]).to(dtype)
    turned_second = (second * cos[None, :] + first * sin[None, :]).to(dtype)
    target = out + head[:, None] * out_stride
    tl.store(target + at[None, :], stored(turned_first, scale, out_dtype, LIMIT), mask=inside)
    tl.store(target + HALF + at[None, :], stored(turned_second, scale, out_dtype, LIMIT), mask=inside)
    if REST > 0:
        tl.store(target + rest_at[None, :], stored(rest.to(dtype), scale, out_dtype, LIMIT), mask=in_rest)


@triton.jit
def _weighted(normed, weight_at, inside, dtype: tl.constexpr):
    """[HEADS, BLOCK] or [BLOCK] float32, rounded to the dtype of a weight [BLOCK], times it, rounded to `dtype`; returns float32."""
    weight = tl.load(weight_at, mask=inside, other=0.0)
    return (normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)
