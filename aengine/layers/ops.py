"""What a decoder layer computes between its matrix products: `LayerOps`, which has three implementations.

`TorchOps` runs everywhere and is the reference. Knows nothing of models, attention or batches.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.layers.rotary import apply_rotary


class LayerOps(Protocol):
    """Activations are [T, ...], on one device and of one dtype, as the weights; statistics and angles are float32.

    A weight of a norm may be float32 where activations are narrower (Gemma's 1 + w): then the product with it is all that is rounded.
    An argument that is "overwritten" may be used as the memory of a result. Results are valid until the step ends.
    """

    @property
    def name(self) -> str: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[T, size] -> [T, size]: x / sqrt(mean(x^2) + eps), rounded to the dtype as the models' own implementations do, times
        `weight` [size]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum of both [T, size], rounded to the dtype, is the new residual: returns (its `rms_norm`, the sum). Both are overwritten."""

    def rotate(
        self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Rotary embedding of [T, heads, head_dim] queries and keys, whose heads are normalised first where there is a weight [head_dim].

        `cos_sin` is [num_positions, rotary_dim] float32, cosines then sines; `positions` [T] int32; halves of the first rotary_dim
        dimensions are paired ("neox"). Last dimensions are contiguous, token strides any. Query and key are overwritten.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * size] -> [T, size]: silu of the first half times the second."""


class TorchOps:
    """`LayerOps` in plain torch."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def rotate(
        self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if query_norm is not None:
            query = self.rms_norm(query, query_norm, eps)
        if key_norm is not None:
            key = self.rms_norm(key, key_norm, eps)
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def run_once(ops: LayerOps, dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    """Runs each operation on activations of `dtype` and heads of `head_dim`, so that it is compiled or loaded. Passes errors on."""

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    weight = ones(head_dim)
    ops.rms_norm(ones(1, head_dim), weight, 1e-6)
    ops.add_rms_norm(ones(1, head_dim), ones(1, head_dim), weight, 1e-6)
    ops.silu_mul(ones(1, 2 * head_dim))
    cos_sin = torch.ones(1, head_dim, device=device)
    positions = torch.zeros(1, dtype=torch.int32, device=device)
    ops.rotate(ones(1, 2, head_dim), ones(1, 1, head_dim), cos_sin, positions, weight, weight, 1e-6)
