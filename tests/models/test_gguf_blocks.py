"""Blocks of GGUF types against the functions of the gguf package."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from driver import Driver, record_logits
from gguf_files import Stored, gguf_bytes
from row_tensors import dequantized

from aengine.api.config import EngineConfig
from aengine.kernels.arrays import BFLOAT16
from aengine.kernels.cpu.library import load_kernels
from aengine.kernels.cpu.packing import pack_linear
from aengine.kernels.quantized import QuantizedRows, common_zero_point, in_one_format
from aengine.models.gguf.blocks import DTYPES, kept_bytes, read_rows
from aengine.models.gguf.gguf_file import BLOCKS, TYPES
from aengine.runner.runner import ModelRunner

gguf = pytest.importorskip("gguf")
BITS = {"Q8_0": 8, "Q5_0": 6, "Q5_1": 6, "Q5_K": 6, "Q6_K": 6, "Q2_K": 2, "TQ1_0": 2, "TQ2_0": 2}
"""Of the codes of quantised types; of others 4."""
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
        bits = generator.normal(0, 0.1, (rows, blocks, 1)).astype(np.float16).view(np.uint16)
        data[..., 49::2] = (data[..., 49::2] & 15) | (bits >> np.array([0, 4, 8, 12]) & 15) << 4
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
    assert (rows.bits if isinstance(rows, QuantizedRows) else None) == (None if kind in DTYPES else BITS.get(kind, 4))


@pytest.mark.parametrize("kind", [name for name, (values, _) in BLOCKS.items() if values == 256 and name not in ("TQ1_0", "TQ2_0")])
def test_scales_are_multiples_of_factors(kind: str) -> None:
    rows = read_rows(kind, random_blocks(kind, 3, 2))
    assert isinstance(rows, QuantizedRows)
    assert rows.groups_per_factor == 256 // rows.group_size
    for scales, factors in ((rows.scales, rows.factors), (rows.offsets, rows.offset_factors)):
        if factors is not None:
            multiples = scales / np.repeat(factors, rows.groups_per_factor, axis=1)
            assert (multiples == np.rint(multiples)).all()
            assert np.abs(multiples).max() <= 127


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind not in (*DTYPES, "F64")])
def test_the_memory_that_a_type_takes_is_known_before(kind: str) -> None:
    data = random_blocks(kind, 64, 2048 // BLOCKS[kind][0])
    rows = read_rows(kind, data)
    assert isinstance(rows, QuantizedRows)
    packed = pack_linear(load_kernels(), [rows], dtype=BFLOAT16, threads=1)
    assert 0.93 <= kept_bytes(kind, data.nbytes) / packed.nbytes <= 1.1


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q3_K", "Q5_K", "Q2_K"), ("IQ4_XS", "Q6_K"), ("Q4_0", "Q8_0"), ("IQ2_XS", "Q4_K")])
def test_parts_of_several_types_have_one_format(kinds: tuple[str, ...]) -> None:
    parts = [read_rows(kind, random_blocks(kind, 3, 16 if BLOCKS[kind][0] == 32 else 2)) for kind in kinds]
    quantized = [part for part in parts if isinstance(part, QuantizedRows)]
    found = in_one_format(quantized)
    assert len({(part.bits, part.group_size, part.codes.dtype, part.table is None) for part in found}) == 1
    assert found[0].bits == max(part.bits if part.table is None else 8 for part in quantized)
    assert {part.groups_per_factor for part in found} == {max(part.groups_per_factor for part in found)}
    for part, before in zip(found, quantized, strict=True):
        torch.testing.assert_close(dequantized(part), dequantized(before), rtol=1e-5, atol=1e-6)
    assert in_one_format(found) is found


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


def model_file(kinds: Sequence[str] | None) -> bytes:
    """A Llama with q, k and v, output, gate, up and down of these types, by turns; None: of the numbers that they stand for."""
    written = itertools.cycle(MIXED if kinds is None else kinds)
    tensors: dict[str, Stored] = {}

    def add(name: str, rows: int, columns: int) -> None:
        kind = next(written)
        data = random_blocks(kind, rows, columns // BLOCKS[kind][0]) if rows > 1 else np.ones((1, columns), np.float32)
        if rows > 1:
            data = data if kinds is not None else gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        quantized = rows > 1 and kinds is not None
        tensors[f"{name}.weight"] = kind if quantized else "F32", (rows, columns) if rows > 1 else (columns,), data.tobytes()

    add("token_embd", 64, 256)
    add("output_norm", 1, 256)
    for layer in range(2):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}", 1, 256)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            add(f"blk.{layer}.{name}", 256, 256)
    shape = {"block_count": 2, "context_length": 256, "embedding_length": 256, "feed_forward_length": 256, "vocab_size": 64}
    attention = {"attention.head_count": 4, "attention.head_count_kv": 4, "attention.layer_norm_rms_epsilon": 1e-5}
    metadata = {f"llama.{key}": value for key, value in {**shape, **attention}.items()}
    return gguf_bytes({"general.architecture": "llama", "tokenizer.ggml.model": "none", **metadata}, tensors)


MIXED = ("Q4_K", "Q6_K", "IQ4_XS", "Q2_K", "Q3_K", "Q5_K", "IQ3_S")


def test_logits_are_those_of_the_numbers(tmp_path: pathlib.Path) -> None:
    """Of a model of many types, some in one matrix, which all are kept as codes."""
    found = []
    for name, kinds in (("codes", MIXED), ("numbers", None)):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(model_file(kinds))
        options = {"dtype": "float32", "device": "cpu", "kv_cache_memory": 4 << 20, "max_num_seqs": 2}
        runner = ModelRunner(EngineConfig(model=str(path), **options), path)
        seen = record_logits(runner)
        Driver(runner).generate([list(range(5, 24))], 2)
        found.append(torch.cat([step.float() for step in seen]))
    codes, numbers = found
    assert (codes - numbers).abs().max() < 1e-4 * numbers.abs().max()
