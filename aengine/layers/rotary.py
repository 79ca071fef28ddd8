"""Rotary position embedding and its scalings (RoPE, Su et al. 2021).

Owns the frequencies, the cos/sin cache and the rotation. Does not read model configs: `models/rope_config.py` makes a `RopeSpec` of one.
The formulas of the scalings are those of `transformers.modeling_rope_utils`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): interpolation blended by wavelength; `attention_factor` multiplies cos and sin."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions become angles, in all layers."""

    head_dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """[head_dim / 2] float32 radians per position."""
    inverse = 1.0 / (spec.theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim))
    scaling = spec.scaling
    if scaling is None:
        return inverse
    if isinstance(scaling, LinearScaling):
        return inverse / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(inverse, scaling)
    return _yarn(inverse, spec, scaling)


def cos_sin_cache(spec: RopeSpec, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions, head_dim] float32: the cosines, then the sines, of every position's angles."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(spec)[None, :]
    factor = spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling) else 1.0
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [T, heads, head_dim] by [T, 1, head_dim / 2] float32 cos and sin, halves paired (the "neox" form)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _llama3(inverse: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / inverse
    length = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inverse / scaling.factor + smooth * inverse


def _yarn(inverse: Tensor, spec: RopeSpec, scaling: YarnScaling) -> Tensor:
    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return spec.head_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = ((torch.arange(spec.head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return inverse / scaling.factor * ramp + inverse * (1 - ramp)
