"""Numbers as GPUs have them: bits to values and values to bits, with the rounding that PTX names. Knows no instruction.

Values are arrays of float64, which holds all of float32, bfloat16, float16 and float8 exactly; results that an exact sum would need more
bits for are rounded to odd first, so that the second rounding gives what one rounding of the exact number gives (Boldo and Melquiond,
"Emulation of a FMA and correctly rounded sums").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]
Floats = NDArray[np.float64]

NAN = {"f32": 0x7FFFFFFF, "bf16": 0x7FFF, "f16": 0x7FFF}  # what arithmetic gives for NaN, whatever the operands' bits
_LEAST_NORMAL = 2.0**-126


def _float8_values(exponent_bits: int, mantissa_bits: int, bias: int) -> Floats:
    """Of the 128 codes without a sign, as if none were infinite or NaN."""
    codes = np.arange(128)
    exponents, mantissas = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    normal = (1 + mantissas / 2**mantissa_bits) * 2.0 ** (exponents - bias)
    return np.asarray(np.where(exponents == 0, mantissas / 2**mantissa_bits * 2.0 ** (1 - bias), normal), np.float64)


_FLOAT8 = {"e4m3": _float8_values(4, 3, 7), "e5m2": _float8_values(5, 2, 15)}
_LARGEST_FLOAT8 = {"e4m3": 0x7E, "e5m2": 0x7B}  # 448 and 57,344
FLOATS = ("f64", "f32", "bf16", "f16", "e4m3", "e5m2", "tf32")
WIDTHS = {"f64": 64, "f32": 32, "tf32": 32, "bf16": 16, "f16": 16, "e4m3": 8, "e5m2": 8}


def values(bits: Bits, kind: str) -> Floats:
    """The values of the low bits of each number."""
    if kind == "f64":
        return bits.view(np.float64)
    if kind in ("f32", "tf32"):
        return _wide(bits.astype(np.uint32).view(np.float32))
    if kind == "bf16":
        return _wide((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))
    if kind == "f16":
        return _wide(bits.astype(np.uint16).view(np.float16))
    codes = bits.astype(np.uint8)
    magnitudes = _FLOAT8[kind][codes & 127]
    if kind == "e4m3":
        magnitudes = np.where(codes & 127 == 127, np.nan, magnitudes)
    else:
        magnitudes = np.where(codes & 127 == 124, np.inf, np.where(codes & 127 > 124, np.nan, magnitudes))
    return np.where(codes & 128, -magnitudes, magnitudes)


def _wide(x: NDArray[np.float32] | NDArray[np.float16]) -> Floats:
    with np.errstate(invalid="ignore"):  # of signalling NaN
        return x.astype(np.float64)


def rounded(x: Floats, kind: str, towards_zero: bool = False) -> Bits:
    """The bits of the nearest number of `kind`, ties to even; or of the nearest that is not farther from zero. NaN is the canonical one.
    Float8 saturates: PTX has no conversion to it that does not."""
    if kind == "f64":
        return np.where(np.isnan(x), np.float64(np.nan), x).view(np.uint64)
    if kind in ("e4m3", "e5m2"):
        return _rounded_float8(x, kind)
    if kind == "tf32":  # ties away from zero, the only rounding that PTX has for it
        bits = rounded(x, "f32")
        return np.where(np.isfinite(x), (bits + np.uint64(0x1000)) & np.uint64(0xFFFFE000), bits)
    with np.errstate(all="ignore"):
        if kind == "bf16":
            bits = _rounded_bfloat16(x, towards_zero)
        else:
            near = x.astype(np.float16).view(np.uint16) if kind == "f16" else x.astype(np.float32).view(np.uint32)
            bits = near.astype(np.uint64)
            if towards_zero:
                bits = np.where(np.abs(values(bits, kind)) > np.abs(x), bits - np.uint64(1), bits)
    return np.where(np.isnan(x), np.uint64(NAN[kind]), bits)


def _rounded_bfloat16(x: Floats, towards_zero: bool) -> Bits:
    wide = _odd_float32(x).astype(np.uint64)
    half = np.where(towards_zero | np.isinf(x), 0, 0x7FFF + ((wide >> np.uint64(16)) & np.uint64(1)))
    return ((wide + half.astype(np.uint64)) >> np.uint64(16)) & np.uint64(0xFFFF)


def _odd_float32(x: Floats) -> NDArray[np.uint32]:
    """The bits of float32 that are cut off, with the last one set if anything was."""
    near = x.astype(np.float32)
    bits = near.view(np.uint32)
    far = np.abs(near.astype(np.float64)) > np.abs(x)
    bits = np.where(far, bits - np.uint32(1), bits)
    exact = bits.view(np.float32).astype(np.float64) == x
    return np.where(exact | np.isnan(x), bits, bits | np.uint32(1))


def _rounded_float8(x: Floats, kind: str) -> Bits:
    table, largest = _FLOAT8[kind], _LARGEST_FLOAT8[kind]
    middles = (table[:largest] + table[1 : largest + 1]) / 2
    magnitudes = np.abs(x)
    low, high = np.searchsorted(middles, magnitudes, "left"), np.searchsorted(middles, magnitudes, "right")
    codes = np.where(low == high, low, np.where(low & 1, high, low))  # a tie: the even one
    codes = np.where(np.isnan(x), 0x7F, codes | np.where(np.signbit(x), 0x80, 0))
    return codes.astype(np.uint64)


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded to odd in float64, of operands whose products are exact in float64: any but float64 themselves."""
    with np.errstate(all="ignore"):
        product = a * b
        total = product + c
        back = total - product
        error = (product - (total - back)) + (c - back)  # exact: Knuth's two-sum
        bits = total.view(np.int64)
        inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        step = np.where((error > 0) == (total > 0), 1, -1)
        return np.where(inexact, (bits + step).view(np.float64), total)


def flushed(x: Floats) -> Floats:
    """With float32's subnormal numbers as zeros of their sign."""
    return np.where(np.abs(x) < _LEAST_NORMAL, np.copysign(0.0, x), x)
