"""From the blocks of a GGUF type to `QuantizedRows` with the same values, or to numbers.

Owns the layouts of blocks, as ggml's sources define them (ggml-common.h): a block is the values of 32 or 256 columns, with float16 scales.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from aengine.api.errors import ModelLoadError
from aengine.kernels.quantized import QuantizedRows, Rows
from aengine.models.gguf.file import BLOCKS

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""The types that are numbers."""
_NL4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)
_FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)


def read_rows(kind: str, data: Tensor) -> Rows:
    """[rows, bytes] uint8 of a type -> rows with the values that ggml gives them; numbers are viewed, not copied.

    Types that need more than a scale and an offset per group of 16 or more columns become float32 by the gguf package. Raises
    ModelLoadError if it is not installed.
    """
    if kind in DTYPES:
        return data.view(DTYPES[kind])
    if kind not in _READERS:
        return _dequantized(kind, data)
    blocks = data.view(len(data), -1, BLOCKS[kind][1])
    return _READERS[kind](blocks)


def _half(blocks: Tensor, at: int) -> Tensor:
    """[rows, blocks] float32 of the float16 at a byte of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()[..., 0]


def _split(packed: Tensor, size: int) -> Tensor:
    """[..., n] -> [..., n // size, size]."""
    return packed.reshape(*packed.shape[:-1], -1, size)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2, n]: the low halves, then the high ones."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[rows, blocks, 4] bytes -> [rows, blocks, 32]: each bit as 16 or 0."""
    return ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2) << 4


def _rows(
    codes: Tensor, scales: Tensor, group: int, bits: int, offsets: Tensor | None = None, table: Tensor | None = None
) -> QuantizedRows:
    """Make quantised rows of tensors whose dimensions behind the first, such as blocks and what is in them, follow one another in a row."""
    merged = None if offsets is None else offsets.flatten(1)
    return QuantizedRows(codes.flatten(1).contiguous(), scales.flatten(1), group, bits, merged, table)


def _q8_0(blocks: Tensor) -> QuantizedRows:
    return _rows(blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), 32, 8)


def _q4_0(blocks: Tensor) -> QuantizedRows:
    """With a zero point of 8 and not with a table, for which kernels do not quantise activations."""
    scales = _half(blocks, 0)
    return _rows(_nibbles(blocks[..., 2:]), scales, 32, 4, -8.0 * scales)


def _q4_1(blocks: Tensor) -> QuantizedRows:
    return _rows(_nibbles(blocks[..., 4:]), _half(blocks, 0), 32, 4, _half(blocks, 2))


def _iq4_nl(blocks: Tensor) -> QuantizedRows:
    return _rows(_nibbles(blocks[..., 2:]), _half(blocks, 0), 32, 4, table=_NL4)


def _mxfp4(blocks: Tensor) -> QuantizedRows:
    """Exponents of 8 bits, of half the scale since the table has twice the numbers."""
    return _rows(_nibbles(blocks[..., 1:]), torch.exp2(blocks[..., 0].float() - 128), 32, 4, table=_FP4)


def _q5_0(blocks: Tensor) -> QuantizedRows:
    codes = _nibbles(blocks[..., 6:]).flatten(-2) | _fifth_bits(blocks[..., 2:6])
    return _rows(codes.view(torch.int8) - 16, _half(blocks, 0), 32, 8)


def _q5_1(blocks: Tensor) -> QuantizedRows:
    codes = _nibbles(blocks[..., 8:]).flatten(-2) | _fifth_bits(blocks[..., 4:8])
    return _rows(codes, _half(blocks, 0), 32, 8, _half(blocks, 2))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, blocks, 8] each, of the types of 256 columns: 6-bit numbers in 12 bytes, times two float16."""
    first, second, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (mixed & 15) | ((first >> 2) & 48)), dim=-1)
    minima = torch.cat((second & 63, (mixed >> 4) | ((second >> 2) & 48)), dim=-1)
    return _half(blocks, 0)[..., None] * scales, -(_half(blocks, 2)[..., None] * minima)


def _q4_k(blocks: Tensor) -> QuantizedRows:
    scales, offsets = _scales_and_minima(blocks)
    return _rows(_nibbles(_split(blocks[..., 16:], 32)), scales, 32, 4, offsets)


def _q5_k(blocks: Tensor) -> QuantizedRows:
    scales, offsets = _scales_and_minima(blocks)
    low = _nibbles(_split(blocks[..., 48:], 32)).flatten(-3, -2)
    high = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1  # [.., 8, 32]
    return _rows(low | (high << 4), scales, 32, 8, offsets)


def _q6_k(blocks: Tensor) -> QuantizedRows:
    low = _nibbles(_split(blocks[..., :128], 64)).flatten(-3)
    high = (_split(blocks[..., 128:192], 32)[..., None, :] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    codes = (low | (high.flatten(-3) << 4)).view(torch.int8) - 32
    scales = _half(blocks, 208)[..., None] * blocks[..., 192:208].contiguous().view(torch.int8)
    return _rows(codes, scales, 16, 8)


def _dequantized(kind: str, data: Tensor) -> Tensor:
    try:
        gguf: Any = import_module("gguf")
        quants: Any = import_module("gguf.quants")
    except ImportError as error:
        raise ModelLoadError(f"weights of the GGUF type {kind} need the gguf package: pip install gguf") from error
    return torch.from_numpy(quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind]))


_READERS = {
    **{"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
    **{"IQ4_NL": _iq4_nl, "MXFP4": _mxfp4},
}
