"""What kernels that sample share: the parameters of a row, the highest of scores, and the noise of `aengine.sampling.torch_draw` with the
same bits for the same (seed, position, stream, token id).

Integers are unsigned in the hashes, so that products wrap around and shifts bring in zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # odd fraction of 2^64
_GOLDEN_32 = tl.constexpr(0x9E3779B9)
_MIX_64_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_64_THEN = tl.constexpr(0x94D049BB133111EB)
_MIX_32_FIRST = tl.constexpr(0x7FEB352D)
_MIX_32_THEN = tl.constexpr(0x846CA68B)


# The int32 words of a row of `DrawParams.packed`, and at which of them its fields begin.
_WORDS = tl.constexpr(8)
_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _SEED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)


@triton.jit
def load_temperature(packed, row):
    """float32, from row `row` of `DrawParams.packed`; the same for the functions below."""
    return tl.load(packed + row * _WORDS + _TEMPERATURE).to(tl.float32, bitcast=True)


@triton.jit
def load_top_p(packed, row):
    return tl.load(packed + row * _WORDS + _TOP_P).to(tl.float32, bitcast=True)


@triton.jit
def load_min_p(packed, row):
    return tl.load(packed + row * _WORDS + _MIN_P).to(tl.float32, bitcast=True)


@triton.jit
def load_top_k(packed, row):
    """int32"""
    return tl.load(packed + row * _WORDS + _TOP_K)


@triton.jit
def load_row_key(packed, positions, row, stream: tl.constexpr):
    """`row_key` of the row's seed and position."""
    seed = packed + row * _WORDS + _SEED
    low = tl.load(seed).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seed + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return row_key((high << 32) | low, tl.load(positions + row), stream)


@triton.jit
def best_of(values, ids, limit):
    """The highest of the values and the lowest id that has it, below `limit` whatever the values are."""
    value = tl.max(values, axis=0)
    return value, tl.minimum(tl.min(tl.where(values == value, ids, limit - 1), axis=0), limit - 1)


@triton.jit
def row_key(seed, position, stream: tl.constexpr):
    """int64 or uint64 seed and integer position -> two uint32: `row_keys`."""
    golden = tl.full([], _GOLDEN, tl.uint64)
    counter = position.to(tl.uint64) + (stream << 40)
    key = _mix64(_mix64(seed.to(tl.uint64, bitcast=True) + golden) + counter * golden)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def uniform_bits(first, second, ids):
    """A row's key and int32 token ids -> int32 in 0 .. 2^31 - 1: `uniform_bits` of `token_hashes`."""
    bits = _mix32(ids.to(tl.uint32) * tl.full([], _GOLDEN_32, tl.uint32)) ^ first
    bits = bits * tl.full([], _MIX_32_FIRST, tl.uint32)
    bits = (bits ^ (bits >> 15)) + second
    return (_mix32(bits) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def log_exponential(bits):
    """float32 log E of `uniform_bits`, finite. E = -log(1 - u) keeps its relative precision for small u, by the series there."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (2.0**-31), 1.0 - 2.0**-24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    return tl.log(tl.where(u < 0.0625, series, -tl.log(1.0 - u)))  # the first term left out is u^7 / 8 of E


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * tl.full([], _MIX_64_FIRST, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], _MIX_64_THEN, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * tl.full([], _MIX_32_FIRST, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], _MIX_32_THEN, tl.uint32)
    return x ^ (x >> 16)
