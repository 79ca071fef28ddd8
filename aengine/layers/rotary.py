"""Rotary position embedding and its scalings (RoPE, Su et al. 2021).

Owns the frequencies, the cos/sin cache and the rotation. Does not read model configs: `models/config/rope.py` makes a `RopeSpec` of one.
Frequencies are [rotary_dim / 2] float32 radians per position. The formulas of the scalings are those of `transformers.modeling_rope_utils`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions become angles. The first rotary_dim dimensions of a head are rotated."""

    frequencies: tuple[float, ...]  # rotary_dim / 2
    attention_factor: float = 1.0  # multiplies cos and sin
    axes: tuple[int, ...] = ()  # of tokens with three positions, which of these each frequency takes (M-RoPE, 2024); empty: there are none

    @classmethod
    def of(cls, frequencies: Tensor, attention_factor: float = 1.0) -> RopeSpec:
        return cls(tuple(frequencies.tolist()), attention_factor)


def unscaled(head_dim: int, theta: float) -> Tensor:
    """The frequencies of a rope without scaling. Linear scaling (Chen et al. 2023) divides them by its factor."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta ** exponents.double()).float()  # what is rounded from float64 has the same bits on every machine


def dynamic(rotary_dim: int, theta: float, factor: float, growth: float) -> Tensor:
    """NTK-aware scaling (bloc97 and emozilla, 2023) for sequences `growth` times as long as the original context."""
    return unscaled(rotary_dim, theta * (factor * growth - (factor - 1)) ** (rotary_dim / (rotary_dim - 2)))


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + ahead) / length)) where others are rotated (Ministral 3, 2025;
    Llama 4, where `ahead` is 1)."""

    beta: float
    length: int  # positions
    ahead: int = 0


def query_scales(scale: QueryScale, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions] float32."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    return (1 + scale.beta * torch.log1p(torch.floor((positions + scale.ahead) / scale.length).double()).float()).to(device)


def cos_sin_cache(spec: RopeSpec, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions, rotary_dim] float32: the cosines, then the sines, of every position's angles."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    return _cos_sin(spec, positions[:, None]).to(device)


def mixed_cos_sin(spec: RopeSpec, positions: Tensor) -> Tensor:
    """[n, rotary_dim] float32, as of `cos_sin_cache`, of tokens that have three `positions` each, [3, n]."""
    return _cos_sin(spec, positions.float()[list(spec.axes)].t() if spec.axes else positions[0].float()[:, None])


def _cos_sin(spec: RopeSpec, positions: Tensor) -> Tensor:
    """`positions`: one of each token [n, 1], or one for each frequency [n, rotary_dim / 2]."""
    angles = positions * torch.tensor(spec.frequencies, dtype=torch.float32)[None, :]
    angles = angles.double()  # as in `unscaled`
    return torch.cat((angles.cos().float(), angles.sin().float()), dim=-1) * spec.attention_factor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first 2 * r dimensions of [T, heads, head_dim] by [T, 1, r] float32 cos and sin, halves paired (the "neox" form)."""
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((apply_rotary(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def llama3(frequencies: Tensor, factor: float, low: float, high: float, original_context: int) -> Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between: from `low` to `high` rotations over the original
    context."""
    wavelength = 2 * math.pi / frequencies
    smooth = ((original_context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def yarn(frequencies: Tensor, theta: float, factor: float, fast: float, slow: float, original_context: int, *, truncate: bool) -> Tensor:
    """YaRN (Peng et al. 2023): interpolation blended by wavelength, from `fast` to `slow` rotations over the original context, at whole
    dimensions if `truncate`."""
    pairs = len(frequencies)

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        return pairs * math.log(original_context / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / factor * ramp + frequencies * (1 - ramp)
