"""From the blocks of a GGUF type to `QuantizedRows` with the same values.

Owns the layouts of blocks, as ggml's sources define them (ggml-common.h): a block is the values of 32 or 256 columns, with float16 scales.
Scales of the types with 256 columns are small integers times one float16, which kernels keep (`QuantizedRows.factors`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from aengine.api.errors import ModelLoadError
from aengine.kernels.arrays import Array
from aengine.kernels.quantized import QuantizedRows, Rows
from aengine.models.gguf.gguf_file import BLOCKS

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""The types that are numbers, and their dtypes."""
_NL4 = np.array([-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0], np.float32)
_FP4 = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0], np.float32)


_Multiples = tuple[Array, Array]  # factors [rows, blocks], and for each the integers [rows, blocks, groups] that it is multiplied with


def read_rows(kind: str, data: Array) -> Rows:
    """[rows, bytes] uint8 of a type -> rows with the values that ggml gives them; numbers are viewed, not copied.

    Types whose codes are places in a list of vectors (IQ1 to IQ3) are read by the gguf package, and ModelLoadError is raised if it is not
    installed.
    """
    if kind in DTYPES:
        return data.view(np.dtype(DTYPES[kind]))
    blocks = data.reshape(len(data), -1, BLOCKS[kind][1])
    if kind in _LISTS:
        return _of_list(kind, data, blocks)
    return _READERS[kind](blocks)


_KEPT_BITS = {
    **dict.fromkeys(("TQ1_0", "TQ2_0"), 2.1),
    "Q2_K": 3.2,
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_XS"), 4.4),
    **dict.fromkeys(("IQ1_M", "IQ2_XS", "IQ2_S", "Q3_K"), 4.7),
    "Q4_K": 4.8,
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K"), 7.0),
}
"""Bits of a weight in memory, with its share of the scales, of types that do not keep their size."""


def kept_bytes(kind: str, stored: int) -> int:
    """About how many bytes a tensor takes in memory that has so many in a file: other ones if it is of some types of blocks."""
    if kind not in _KEPT_BITS:
        return stored
    values, size = BLOCKS[kind]
    return int(stored * _KEPT_BITS[kind] * values / (8 * size))


def _half(blocks: Array, at: int) -> Array:
    """[rows, blocks] float32 of the float16 at a byte of each block."""
    return _words(blocks[..., at : at + 2], np.float16)[..., 0].astype(np.float32)


def _words(packed: Array, dtype: type) -> Array:
    return np.ascontiguousarray(packed).view(dtype)


def _split(packed: Array, size: int) -> Array:
    """[..., n] -> [..., n // size, size]."""
    return packed.reshape(*packed.shape[:-1], -1, size)


def _nibbles(packed: Array) -> Array:
    """[..., n] bytes -> [..., 2, n]: the low halves, then the high ones."""
    halves = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=halves[..., 0, :])
    np.right_shift(packed, 4, out=halves[..., 1, :])
    return halves


def _by_halves(packed: Array) -> Array:
    """[..., n] bytes -> [..., 2 * n]: the low half and the high one of each."""
    return _nibbles(packed).swapaxes(-1, -2).reshape(*packed.shape[:-1], -1)


def _fifth_bits(packed: Array) -> Array:
    """[rows, blocks, 4] bytes -> [rows, blocks, 32]: each bit as 16 or 0."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little") << 4


def _rows(codes: Array, scales: Array, group: int, bits: int, offsets: Array | None = None, table: Array | None = None) -> QuantizedRows:
    """Make quantised rows of tensors whose dimensions behind the first, such as blocks and what is in them, follow one another in a row."""
    count = len(codes)
    merged = None if offsets is None else offsets.reshape(count, -1)
    return QuantizedRows(codes.reshape(count, -1), scales.reshape(count, -1), group, bits, merged, table)


def _of_factors(codes: Array, scales: _Multiples, bits: int, minima: _Multiples | None = None, table: Array | None = None) -> QuantizedRows:
    """Make quantised rows of blocks of 256 columns with a factor each. `minima`: which are subtracted."""
    factors, multiples = scales
    rows = _rows(codes, factors[..., None] * multiples, 256 // multiples.shape[-1], bits, table=table)
    rows = replace(rows, factors=factors)
    if minima is None:
        return rows
    factors, multiples = -minima[0], minima[1]
    return replace(rows, offsets=(factors[..., None] * multiples).reshape(len(codes), -1), offset_factors=factors)


def _without_zero(rows: QuantizedRows, zero: int) -> QuantizedRows:
    """Codes that stand for themselves less `zero`."""
    factors = None if rows.factors is None else -float(zero) * rows.factors
    return replace(rows, offsets=-float(zero) * rows.scales, offset_factors=factors)


def _two_bits(packed: Array) -> Array:
    """[..., n] bytes -> [..., 4, n]: the lowest two bits of each, then the next ones."""
    return (packed[..., None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3


def _q8_0(blocks: Array) -> QuantizedRows:
    return _rows(blocks[..., 2:].view(np.int8), _half(blocks, 0), 32, 8)


def _q4_0(blocks: Array) -> QuantizedRows:
    return _without_zero(_rows(_nibbles(blocks[..., 2:]), _half(blocks, 0), 32, 4), 8)


def _q4_1(blocks: Array) -> QuantizedRows:
    return _rows(_nibbles(blocks[..., 4:]), _half(blocks, 0), 32, 4, _half(blocks, 2))


def _iq4_nl(blocks: Array) -> QuantizedRows:
    scales = _half(blocks, 0)
    return _rows(_nibbles(blocks[..., 2:]), scales, 32, 4, table=_NL4)


def _mxfp4(blocks: Array) -> QuantizedRows:
    """Exponents of 8 bits, of half the scale since the table has twice the numbers."""
    scales = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128)
    return _rows(_nibbles(blocks[..., 1:]), scales, 32, 4, table=_FP4)


def _q5_0(blocks: Array) -> QuantizedRows:
    codes = _nibbles(blocks[..., 6:]).reshape(*blocks.shape[:-1], 32) | _fifth_bits(blocks[..., 2:6])
    return _without_zero(_rows(codes, _half(blocks, 0), 32, 6), 16)


def _q5_1(blocks: Array) -> QuantizedRows:
    codes = _nibbles(blocks[..., 8:]).reshape(*blocks.shape[:-1], 32) | _fifth_bits(blocks[..., 4:8])
    return _rows(codes, _half(blocks, 0), 32, 6, _half(blocks, 2))


def _q2_k(blocks: Array) -> QuantizedRows:
    scales, minima = (_half(blocks, 80), blocks[..., :16] & 15), (_half(blocks, 82), blocks[..., :16] >> 4)
    return _of_factors(_two_bits(_split(blocks[..., 16:80], 32)), scales, 2, minima)


def _q3_k(blocks: Array) -> QuantizedRows:
    low = _two_bits(_split(blocks[..., 32:96], 32)).reshape(*blocks.shape[:-1], 8, 32)
    high = (blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    scales = _nibbles(blocks[..., 96:104]).reshape(*blocks.shape[:-1], 16)
    scales |= _two_bits(blocks[..., 104:108]).reshape(scales.shape) << 4
    return _without_zero(_of_factors(low | (high << 2), (_half(blocks, 108), _signed(scales)), 4), 4)


def _scales_and_minima(blocks: Array) -> tuple[_Multiples, _Multiples]:
    """Read those of a block of 256 columns: twice eight numbers of 6 bits in 12 bytes."""
    first, second, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate((first & 63, (mixed & 15) | ((first >> 2) & 48)), -1)
    minima = np.concatenate((second & 63, (mixed >> 4) | ((second >> 2) & 48)), -1)
    return (_half(blocks, 0), scales), (_half(blocks, 2), minima)


def _q4_k(blocks: Array) -> QuantizedRows:
    scales, minima = _scales_and_minima(blocks)
    return _of_factors(_nibbles(_split(blocks[..., 16:], 32)), scales, 4, minima)


def _q5_k(blocks: Array) -> QuantizedRows:
    scales, minima = _scales_and_minima(blocks)
    low = _nibbles(_split(blocks[..., 48:], 32)).reshape(*blocks.shape[:-1], 8, 32)
    high = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [.., 8, 32]
    return _of_factors(low | (high << 4), scales, 6, minima)


def _q6_k(blocks: Array) -> QuantizedRows:
    low = _nibbles(_split(blocks[..., :128], 64)).reshape(*blocks.shape[:-1], 256)
    codes = low | (_two_bits(_split(blocks[..., 128:192], 32)).reshape(low.shape) << 4)
    return _without_zero(_of_factors(codes, (_half(blocks, 208), blocks[..., 192:208].view(np.int8)), 6), 32)


def _iq4_xs(blocks: Array) -> QuantizedRows:
    low = _by_halves(blocks[..., 4:8])
    high = _two_bits(blocks[..., 2:4]).swapaxes(-1, -2).reshape(low.shape)
    scales = _half(blocks, 0), _signed(low | (high << 4))
    return _of_factors(_nibbles(_split(blocks[..., 8:], 16)), scales, 4, table=_NL4)


def _signed(six_bits: Array) -> Array:
    return six_bits.view(np.int8) - np.int8(32)


def _tq1_0(blocks: Array) -> QuantizedRows:
    """Five or four digits of base 3 in a byte, as a part of 256: 3 ** n times it has digit n above the byte."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = [blocks[..., None, first:end] * powers[:count] for first, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]
    digits = np.concatenate([part.reshape(*blocks.shape[:-1], -1) for part in parts], -1)
    codes = ((digits.astype(np.uint16) * 3) >> 8).astype(np.uint8)
    return _without_zero(_rows(codes, _half(blocks, 52), 256, 2), 1)


def _tq2_0(blocks: Array) -> QuantizedRows:
    return _without_zero(_rows(_two_bits(_split(blocks[..., :64], 32)), _half(blocks, 64), 256, 2), 1)


def _odd(halves: Array, divisor: float, numbers: Array) -> _Multiples:
    """The odd multiples, of numbers from 0 on, of the float16 numbers of blocks divided by a power of two."""
    return halves / np.float32(divisor), 2 * numbers + 1


def _iq1_m_scales(blocks: Array) -> _Multiples:
    words = _words(blocks[..., 48:56], np.uint16)
    bits = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    factors = np.bitwise_or.reduce(bits, -1).astype(np.uint16).view(np.float16).astype(np.float32)
    multiples = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7
    return _odd(factors, 8, multiples.reshape(*blocks.shape[:-1], 16))


_LISTS: dict[str, tuple[Callable[[Array], _Multiples], tuple[int, ...]]] = {
    "IQ1_S": (lambda blocks: _odd(_half(blocks, 0), 8, (_words(blocks[..., 34:50], np.uint16) >> 12) & 7), (1, 7, 9)),
    "IQ1_M": (_iq1_m_scales, (1, 7, 9)),
    "IQ2_XXS": (lambda blocks: _odd(_half(blocks, 0), 8, _words(blocks[..., 2:66], np.uint32)[..., 1::2] >> 28), (8, 25, 43)),
    "IQ2_XS": (lambda blocks: _odd(_half(blocks, 0), 8, _by_halves(blocks[..., 66:74])), (8, 25, 43)),
    "IQ2_S": (lambda blocks: _odd(_half(blocks, 0), 8, _by_halves(blocks[..., 74:82])), (8, 25, 43)),
    "IQ3_XXS": (lambda blocks: _odd(_half(blocks, 0), 4, _words(blocks[..., 66:98], np.uint32) >> 28), (4, 12, 20, 28, 36, 44, 52, 62)),
    "IQ3_S": (lambda blocks: _odd(_half(blocks, 0), 1, _by_halves(blocks[..., 106:110])), (1, 3, 5, 7, 9, 11, 13, 15)),
}
"""Types whose codes are places in a list of vectors: how their scales are read, and the magnitudes of the numbers of these vectors; of IQ1,
of eight times what its vectors and its shift add up to."""


def _of_list(kind: str, data: Array, blocks: Array) -> QuantizedRows:
    """The numbers of the vectors are few, so a code of 4 bits stands for one of them."""
    try:
        gguf: Any = import_module("gguf")
        quants: Any = import_module("gguf.quants")
    except ImportError as error:
        raise ModelLoadError(f"weights of the GGUF type {kind} need the gguf package: pip install gguf") from error
    numbers: Array = quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    read_scales, magnitudes = _LISTS[kind]
    factors, multiples = read_scales(blocks)
    scales = factors[..., None] * multiples
    known = np.array(sorted((*magnitudes, *(-one for one in magnitudes))), np.float32)
    of_groups = numbers.reshape(*scales.shape, -1)
    divided = np.divide(of_groups, scales[..., None], where=scales[..., None] != 0, out=np.zeros_like(of_groups))
    codes = np.searchsorted((known[1:] + known[:-1]) / 2, divided).astype(np.uint8)
    table = np.zeros(16, np.float32)
    table[: len(known)] = known
    return _of_factors(codes, (factors, multiples), 4, table=table)


_READERS = {
    **{"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
    **{"IQ4_NL": _iq4_nl, "MXFP4": _mxfp4, "IQ4_XS": _iq4_xs, "Q2_K": _q2_k, "Q3_K": _q3_k, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0},
}
