"""`TritonOps`, and the kernels of norms and of the gated activation, with the results of `aengine.layers.ops.TorchOps`.

Arithmetic is float32; intermediate results that torch rounds to the dtype of the activations are rounded here, too. Activations are
[T, ...] with contiguous last dimensions and any token strides. T may be 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.paged_cache import KvTarget
from aengine.kernels.params import Activation, ExpertMlp, ExpertRouting, Rotation, SharedOutput
from aengine.kernels.quantized import LARGEST
from aengine.kernels.quantizing import Float8Rows
from aengine.kernels.triton import rotary
from aengine.kernels.triton.experts import Grouping, grouped_linear, route, weighted_sums

_ACTIVATIONS_AT_ONCE = 1024


class TritonOps:
    """A `LayerOps` of `aengine.layers.ops`. Sums and rotated heads overwrite the arguments, which must not overlap."""

    name = "triton"

    def __init__(self, invariant: bool = False) -> None:
        """`invariant`: no order of sums depends on the number of tokens."""
        self._invariant = invariant

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

    def gated_float8(self, gate_up: Tensor, activation: Activation) -> Float8Rows:
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        rows = _empty_float8(tokens, size, gate_up.device)
        if tokens:
            block, num_warps = _row_block(size)
            strided = (gate_up, gate_up.stride(0), rows.codes, rows.scales)
            _gated[(tokens, 1)](*strided, size, ACTIVATION=activation.value, LARGEST=LARGEST, BLOCK=block, num_warps=num_warps)
        return rows

    def rotate(self, query: Tensor, key: Tensor, rotation: Rotation, positions: Tensor) -> tuple[Tensor, Tensor]:
        rotary.rotate(query, key, None, rotation, positions, None)
        return query, key

    def rotate_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, positions: Tensor, target: KvTarget
    ) -> Tensor:
        rotary.rotate(query, key, value, rotation, positions, target)
        return query

    def rotate_latent(
        self, query: Tensor, out: Tensor, key: Tensor, rotation: Rotation, positions: Tensor, target: KvTarget | None
    ) -> None:
        rotary.rotate_latent(query, out, key, rotation, positions, target)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        if tokens:
            grid = (tokens, triton.cdiv(size, _ACTIVATIONS_AT_ONCE))
            strided = (gate_up, gate_up.stride(0), out, None)
            options = {"LARGEST": LARGEST, "BLOCK": _ACTIVATIONS_AT_ONCE, "num_warps": 4}
            _gated[grid](*strided, size, ACTIVATION=activation.value, **options)
        return out

    def route(self, logits: Tensor, bias: Tensor | None, correction: Tensor | None, routing: ExpertRouting) -> tuple[Tensor, Tensor]:
        return route(logits, bias, correction, routing)

    def experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, mlp: ExpertMlp, dtype: torch.dtype, shared: SharedOutput | None = None
    ) -> Tensor:
        grouping = Grouping.of(chosen, len(mlp.up.weight), self._invariant)
        inner = mlp.activate(grouped_linear(x, mlp.up, grouping, chosen.shape[1]))
        return weighted_sums(grouped_linear(inner, mlp.down, grouping, 1), weights, dtype, shared)


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


@triton.jit
def _gated(gate_up, stride, out, scales, size, ACTIVATION: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """`out` is float8 where there are `scales`; then a program has a whole row."""
    dtype: tl.constexpr = gate_up.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + size + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "clipped_swiglu":
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL), -7.0, propagate_nan=tl.PropagateNan.ALL)
        up = (up + 1.0).to(dtype).to(tl.float32)
        sharper = (gate * 1.702).to(dtype).to(tl.float32)
        activated = gate * (1.0 / (1.0 + tl.exp(-sharper))).to(dtype).to(tl.float32)
    else:
        activated = _activated(gate, ACTIVATION)
    product = (activated.to(dtype).to(tl.float32) * up).to(dtype)
    if scales is not None:
        _store_float8(product.to(tl.float32), out + token * size + at, scales + token, inside, LARGEST)
    else:
        tl.store(out + token * size + at, product, mask=inside)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """Of float32, by the value of an `Activation`."""
    if ACTIVATION == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(y)) = 1 / (1 + exp(-2 * y))
        result = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu_squared")
        result = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACTIVATION == "relu_squared":
            result = result * result
    return result
