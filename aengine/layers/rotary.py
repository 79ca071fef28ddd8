"""Rotary position embedding and its scalings (RoPE, Su et al. 2021).

Owns the frequencies and the tables of cosines and sines. Does not read model configs: `models/config/rope.py` makes a `RopeSpec` of one.
Frequencies are [rotary_dim / 2] float32 radians per position. The formulas of the scalings are those of `transformers.modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions become angles. The first rotary_dim dimensions of a head are rotated."""

    frequencies: tuple[float, ...]  # rotary_dim / 2
    attention_factor: float = 1.0  # multiplies cos and sin
    axes: tuple[int, ...] = ()  # of tokens with three positions, which of these each frequency takes (M-RoPE, 2024); empty: there are none

    @classmethod
    def of(cls, frequencies: Floats, attention_factor: float = 1.0) -> RopeSpec:
        return cls(tuple(frequencies.tolist()), attention_factor)


def unscaled(head_dim: int, theta: float) -> Floats:
    """The frequencies of a rope without scaling. Linear scaling (Chen et al. 2023) divides them by its factor."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers: Floats = (theta ** exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1.0) / powers  # what is rounded from float64 has the same bits on every machine


def dynamic(rotary_dim: int, theta: float, factor: float, growth: float) -> Floats:
    """NTK-aware scaling (bloc97 and emozilla, 2023) for sequences `growth` times as long as the original context."""
    return unscaled(rotary_dim, theta * (factor * growth - (factor - 1)) ** (rotary_dim / (rotary_dim - 2)))


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + ahead) / length)) where others are rotated (Ministral 3, 2025;
    Llama 4, where `ahead` is 1)."""

    beta: float
    length: int  # positions
    ahead: int = 0


def query_scales(scale: QueryScale, num_positions: int) -> Floats:
    """[num_positions] float32."""
    positions = np.arange(num_positions, dtype=np.float32)
    logs: Floats = np.log1p(np.floor((positions + scale.ahead) / scale.length).astype(np.float64)).astype(np.float32)
    return 1 + scale.beta * logs


def cos_sin_cache(spec: RopeSpec, num_positions: int, first: int = 0) -> Floats:
    """[num_positions, rotary_dim] float32: the cosines, then the sines, of the angles of positions from the `first` on."""
    return _cos_sin(spec, np.arange(first, first + num_positions, dtype=np.float32)[:, None])


def mixed_cos_sin(spec: RopeSpec, positions: NDArray[np.int32]) -> Floats:
    """[n, rotary_dim] float32, as of `cos_sin_cache`, of tokens that have three `positions` each, [3, n]."""
    numbers = positions.astype(np.float32)
    return _cos_sin(spec, numbers[list(spec.axes)].T if spec.axes else numbers[0][:, None])


def _cos_sin(spec: RopeSpec, positions: Floats) -> Floats:
    """`positions`: one of each token [n, 1], or one for each frequency [n, rotary_dim / 2]."""
    angles = (positions * np.array(spec.frequencies, np.float32)[None, :]).astype(np.float64)  # as in `unscaled`
    half = angles.shape[1]
    found = np.empty((len(angles), 2 * half), np.float32)
    found[:, :half], found[:, half:] = np.cos(angles), np.sin(angles)
    return found if spec.attention_factor == 1.0 else found * np.float32(spec.attention_factor)


def llama3(frequencies: Floats, factor: float, low: float, high: float, original_context: int) -> Floats:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between: from `low` to `high` rotations over the original
    context."""
    wavelength = 1 / frequencies * (2 * math.pi)  # a reciprocal and a product, which are rounded as in Transformers
    smooth: Floats = np.clip((1 / wavelength * original_context - low) / (high - low), 0.0, 1.0)
    found: Floats = (1 - smooth) * frequencies / factor + smooth * frequencies
    return found


def yarn(frequencies: Floats, theta: float, factor: float, fast: float, slow: float, original_context: int, *, truncate: bool) -> Floats:
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
    ramp: Floats = np.clip((np.arange(pairs, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    found: Floats = frequencies / factor * ramp + frequencies * (1 - ramp)
    return found


_FIRST_ANGLES = 1024  # positions


class AngleTables:
    """The cosines and sines of positions, made as far as steps need them: those of a long context take longer than a start may."""

    def __init__(self, ropes: Iterable[RopeSpec], num_positions: int) -> None:
        self.tables = {rope: np.zeros((num_positions, 2 * len(rope.frequencies)), np.float32) for rope in ropes}  # touched where written
        self._made, self._end = 0, num_positions  # positions; rows from the end on are those of `mix_positions`

    def make(self, positions: NDArray[np.int32]) -> None:
        """Makes the rows of positions that a step has."""
        if not self.tables or not len(positions):
            return
        last = int(positions.max())
        if last >= self._end:  # as rows that are mixed are
            last = int(positions.max(where=positions < self._end, initial=-1))
        if last >= self._made:
            first, end = self._made, min(self._end, max(last + 1, 2 * self._made, _FIRST_ANGLES))
            for rope, table in self.tables.items():
                table[first:end] = cos_sin_cache(rope, end - first, first)
            self._made = end

    def mix_positions(self, first: int, positions: NDArray[np.int32]) -> None:
        """Rows `first` and following become those of [3, n] `positions`. No token has these numbers as its position."""
        self._end = min(self._end, first)
        for rope, table in self.tables.items():
            table[first : first + positions.shape[1]] = mixed_cos_sin(rope, positions)
