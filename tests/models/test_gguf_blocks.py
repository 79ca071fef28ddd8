"""Blocks of GGUF types against the functions of the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from row_tensors import dequantized

from aengine.kernels.quantized import QuantizedRows, common_zero_point
from aengine.models.gguf.gguf_file import BLOCKS, TYPES
from aengine.models.gguf.tensors import DTYPES, read_rows

gguf = pytest.importorskip("gguf")
EXACT = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q5_0": 8, "Q5_1": 8, "Q4_K": 4, "Q5_K": 8, "Q6_K": 8, "IQ4_NL": 4, "MXFP4": 4}
"""Types that stay quantised, with the bits of their codes."""
SCALES = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": ()}
"""The bytes of a block at which there is a float16; of other types 0, and 2 if they have an offset too."""


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Any bytes are codes; the float16 numbers are made small and finite."""
    generator = np.random.default_rng(7)
    data = generator.integers(0, 256, (rows, blocks, BLOCKS[kind][1]), dtype=np.uint8)
    for at in SCALES.get(kind, (0, 2) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)):
        data[..., at : at + 2] = generator.normal(0, 0.1, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = generator.integers(2, 140, (rows, blocks))
    if kind == "IQ1_M":  # the high 4 bits of four numbers
        data[..., 49::2] = data[..., 49::2] & 15
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", [name for name in BLOCKS if name != "F64"])
def test_values_are_those_of_the_package(kind: str) -> None:
    data = (
        random_blocks(kind, 3, 2) if kind not in DTYPES else np.random.default_rng(1).normal(size=(3, 8)).astype(np.float16).view(np.uint8)
    )
    rows = read_rows(kind, data)
    found = dequantized(rows) if isinstance(rows, QuantizedRows) else torch.from_numpy(rows.astype(np.float32))
    expected = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert (rows.bits if isinstance(rows, QuantizedRows) else None) == EXACT.get(kind)


def test_codes_of_q4_0_are_integers_with_a_zero_point() -> None:
    """Products with a table of numbers do not quantise activations, which takes twice as long with many rows."""
    rows = read_rows("Q4_0", random_blocks("Q4_0", 3, 2))
    assert isinstance(rows, QuantizedRows)
    assert rows.table is None
    assert common_zero_point([rows]) == 8


def test_sizes_of_blocks_are_those_of_the_package() -> None:
    for number, (name, values, size) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (values, size))
