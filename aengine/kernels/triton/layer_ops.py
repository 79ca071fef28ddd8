"""Norms, rotary embedding, the gated activation and the experts of decoder layers, with the results of `aengine.layers.ops.TorchOps`.

Arithmetic is float32; intermediate results that torch rounds to the dtype of the activations are rounded here, too. Activations are
[T, ...] with contiguous last dimensions and any token strides. T may be 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.float8 import LARGEST, Float8Rows
from aengine.kernels.triton.experts import Grouping, grouped_linear, weighted_sums

if TYPE_CHECKING:
    from aengine.layers.ops import ExpertLinear

_HEADS_AT_ONCE = 8
_ACTIVATIONS_AT_ONCE = 1024


class TritonOps:
    """A `LayerOps` of `aengine.layers.ops`. Sums and rotated heads overwrite the arguments, which must not overlap."""

    name = "triton"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _write_norm(x, None, weight, eps, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        _write_norm(x, residual, weight, eps, out=x)
        return x, residual

    def float8(self, x: Tensor) -> Float8Rows:
        rows = _empty_float8(len(x), x.shape[1], x.device)
        if len(x):
            block, num_warps = _row_block(x.shape[1])
            _quantize[(len(x),)](x, x.stride(0), rows.codes, rows.scales, x.shape[1], LARGEST=LARGEST, BLOCK=block, num_warps=num_warps)
        return rows

    def rms_norm_float8(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Float8Rows:
        rows = _empty_float8(len(x), x.shape[1], x.device)
        _write_norm(x, residual, weight, eps, rows.codes, rows.scales)
        return rows

    def silu_mul_float8(self, gate_up: Tensor) -> Float8Rows:
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        rows = _empty_float8(tokens, size, gate_up.device)
        if tokens:
            block, num_warps = _row_block(size)
            strided = (gate_up, gate_up.stride(0), rows.codes, rows.scales)
            _silu_mul[(tokens, 1)](*strided, size, LARGEST=LARGEST, BLOCK=block, num_warps=num_warps)
        return rows

    def rotate(
        self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        tokens, query_heads, head_dim = query.shape
        key_heads, size = key.shape[1], cos_sin.shape[1]
        if not tokens:
            return query, key
        if size < head_dim:  # the kernel norms what it rotates alone
            if query_norm is not None:
                query = self.rms_norm(query.reshape(-1, head_dim), query_norm, eps).view(query.shape)
            if key_norm is not None:
                key = self.rms_norm(key.reshape(-1, head_dim), key_norm, eps).view(key.shape)
            query_norm = key_norm = None
        query_blocks = triton.cdiv(query_heads, _HEADS_AT_ONCE)
        _rotate[(tokens, query_blocks + triton.cdiv(key_heads, _HEADS_AT_ONCE))](
            *(query, query.stride(0), query.stride(1), query_heads, query_norm),
            *(key, key.stride(0), key.stride(1), key_heads, key_norm),
            *(cos_sin, cos_sin.stride(0), positions, eps, query_blocks),
            HALF=size // 2,
            BLOCK=triton.next_power_of_2(size // 2),
            HEADS=_HEADS_AT_ONCE,
            num_warps=4,
        )
        return query, key

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        if tokens:
            grid = (tokens, triton.cdiv(size, _ACTIVATIONS_AT_ONCE))
            strided = (gate_up, gate_up.stride(0), out, None)
            _silu_mul[grid](*strided, size, LARGEST=LARGEST, BLOCK=_ACTIVATIONS_AT_ONCE, num_warps=4)
        return out

    def experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, up: ExpertLinear, down: ExpertLinear, activate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        grouping = Grouping.of(chosen, len(up.weight))
        inner = activate(grouped_linear(x, up.weight, up.bias, grouping, chosen.shape[1]))
        outputs = grouped_linear(inner, down.weight, down.bias, grouping, 1)
        return weighted_sums(outputs, weights)


def _write_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None = None) -> None:
    """`scales` [T, 1] float32: `out` is float8."""
    tokens, size = x.shape
    if tokens:
        residual_stride = 0 if residual is None else residual.stride(0)
        strided = (x, x.stride(0), residual, residual_stride, weight, out, out.stride(0), scales)
        block, num_warps = _row_block(size)
        _rms_norm[(tokens,)](*strided, eps, size, LARGEST=LARGEST, BLOCK=block, num_warps=num_warps)


def _row_block(size: int) -> tuple[int, int]:
    """Elements and warps of a program that has a whole row: about 16 elements per thread."""
    block = triton.next_power_of_2(size)
    return block, max(1, min(16, block // 512))


def _empty_float8(tokens: int, size: int, device: torch.device) -> Float8Rows:
    codes = torch.empty((tokens, size), dtype=torch.float8_e4m3fn, device=device)
    return Float8Rows(codes, torch.empty((tokens, 1), dtype=torch.float32, device=device))


@triton.jit
def _rms_norm(
    x, x_stride, residual, residual_stride, weight, out, out_stride, scales, eps, size, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    """The norm of `x`, or where there is a `residual`, of the sum of both, which becomes the residual. `out` may be `x`, or float8 with
    `scales`."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    wide = tl.load(x + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        residual_at = residual + token * residual_stride + at
        total = (tl.load(residual_at, mask=inside, other=0.0).to(tl.float32) + wide).to(residual.dtype.element_ty)
        tl.store(residual_at, total, mask=inside)
        wide = total.to(tl.float32)
    factor = tl.load(weight + at, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    normed = (wide * scale).to(factor.dtype).to(tl.float32)  # as is the product, where that is not wider than the result
    product = (normed * factor.to(tl.float32)).to(factor.dtype)
    if scales is not None:
        _store_float8(product.to(x.dtype.element_ty).to(tl.float32), out + token * out_stride + at, scales + token, inside, LARGEST)
    else:
        tl.store(out + token * out_stride + at, product, mask=inside)


@triton.jit
def _quantize(x, x_stride, out, scales, size, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    wide = tl.load(x + token * x_stride + at, mask=at < size, other=0.0).to(tl.float32)
    _store_float8(wide, out + token * size + at, scales + token, at < size, LARGEST)


@triton.jit
def _store_float8(row, out_at, scale_at, inside, LARGEST: tl.constexpr):
    """A row of float32, zeros where it is not `inside`, as `Float8Rows.of` quantises it."""
    largest = tl.max(tl.abs(row), axis=0)
    scale = tl.where(largest == 0.0, 1.0, tl.div_rn(largest, LARGEST))
    codes = tl.div_rn(row, scale + tl.zeros_like(row))  # `/` is not rounded correctly, which shows where float8 rounds
    tl.store(scale_at, scale)
    tl.store(out_at, codes.to(tl.float8e4nv), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # slices of one upload begin anywhere
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
    cos_sin,
    cos_sin_stride,
    positions,
    eps,
    query_blocks,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride + at
    cos = tl.load(angles, mask=at < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=at < HALF, other=0.0)
    if block < query_blocks:
        heads = query + token * query_stride
        _rotate_heads(heads, query_head_stride, block * HEADS, query_heads, query_norm, cos, sin, eps, HALF, BLOCK, HEADS)
    else:
        heads = key + token * key_stride
        _rotate_heads(heads, key_head_stride, (block - query_blocks) * HEADS, key_heads, key_norm, cos, sin, eps, HALF, BLOCK, HEADS)


@triton.jit
def _rotate_heads(
    heads, head_stride, first_head, num_heads, norm, cos, sin, eps, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr
):
    """Heads `first_head` .. of one token; the norm sees both halves."""
    dtype: tl.constexpr = heads.dtype.element_ty
    head = first_head + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)
    inside = (head < num_heads)[:, None] & (at < HALF)[None, :]
    first_at = heads + head[:, None] * head_stride + at[None, :]
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_at + HALF, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = _weighted(first * scale, norm + at, at < HALF, dtype)
        second = _weighted(second * scale, norm + HALF + at, at < HALF, dtype)
    turned_first = first * cos[None, :] - second * sin[None, :]
    turned_second = second * cos[None, :] + first * sin[None, :]
    tl.store(first_at, turned_first.to(dtype), mask=inside)
    tl.store(first_at + HALF, turned_second.to(dtype), mask=inside)


@triton.jit
def _weighted(normed, weight_at, inside, dtype: tl.constexpr):
    """[HEADS, BLOCK] float32, rounded to the dtype of a weight [BLOCK], times it, rounded to `dtype`; returns float32."""
    weight = tl.load(weight_at, mask=inside, other=0.0)
    return (normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _silu_mul(gate_up, stride, out, scales, size, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """`out` is float8 where there are `scales`; then a program has a whole row."""
    dtype: tl.constexpr = gate_up.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + size + at, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    product = (activated * up).to(dtype)
    if scales is not None:
        _store_float8(product.to(tl.float32), out + token * size + at, scales + token, inside, LARGEST)
    else:
        tl.store(out + token * size + at, product, mask=inside)
