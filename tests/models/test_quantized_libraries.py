"""Quantised modules and models that the libraries of the formats write, where these are installed."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from quantized_layouts import LAYOUTS, Layout, Tensors, compressed
from quantized_models import check_logits, plain, random_model, rewrite, rows_of
from row_tensors import dequantized
from torch import Tensor

from aengine.models.loading.hub import resolve_model

INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
NVFP4: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [16, 32]}


def compressed_tensors(form: str, weights: dict[str, Any]) -> Layout:
    """What compressed-tensors makes of a matrix, and what it decompresses that to."""
    library = pytest.importorskip("compressed_tensors", reason="the library that writes this format")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = QuantizationArgs(**weights)
    compressor = library.compressors.BaseCompressor.get_value_from_registry(form)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = weight.shape
        blocks = {"group": (1, 32), "tensor_group": (1, 16), "channel": (1, columns), "tensor": (rows, columns), "block": (16, 32)}
        high, wide = blocks[weights["strategy"]]
        parts = weight.view(rows // high, high, columns // wide, wide)
        whole = {}
        if weights["strategy"] == "tensor_group":
            whole["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
        scale, zero = calculate_qparams(parts.amin((1, 3)), parts.amax((1, 3)), arguments, global_scale=whole.get("weight_global_scale"))
        if weights["strategy"] == "tensor":
            scale, zero = scale.view(1), zero.view(1)
        stored = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero, **whole}, scheme)
        expected = compressor.decompress(dict(stored), scheme)["weight"].float()
        return {f".{name}": tensor for name, tensor in stored.items()}, expected

    return Layout(compressed(form, **weights), write)


@pytest.mark.parametrize(
    ("form", "weights"),
    [
        ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
        ("pack-quantized", {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}),
        ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}),
        ("nvfp4-pack-quantized", NVFP4),
        ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [16, 32]}),
    ],
)
def test_what_compressed_tensors_writes(form: str, weights: dict) -> None:
    layout = compressed_tensors(form, weights)
    tensors, expected = layout.write(torch.randn(48, 64))
    rounded = 2**-8 if form == "nvfp4-pack-quantized" else 1e-6  # which is decompressed in bfloat16
    torch.testing.assert_close(dequantized(rows_of(layout.config, tensors, (48, 64))), expected, rtol=rounded, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "form", "weights"),
    [
        ("demo", "pack-quantized", INT4),
        ("demo", "int-quantized", INT8),
        ("gpt_neox", "pack-quantized", {**INT4, "symmetric": False}),
        ("qwen3_moe", "pack-quantized", INT4),
        ("qwen3_moe", "float-quantized", FLOAT8),
        ("cohere2", "int-quantized", INT8),
    ],
)
def test_models_that_compressed_tensors_writes(tmp_path: pathlib.Path, model: str, form: str, weights: dict) -> None:
    layout = compressed_tensors(form, weights)
    source = resolve_model("demo") if model == "demo" else random_model(model, tmp_path / "source")
    meant = rewrite(source, tmp_path, layout)
    check_logits(plain(source, tmp_path, meant), tmp_path, "auto")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_what_bitsandbytes_writes(kind: str, double: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="the library that writes this format")
    codes, state = functional.quantize_4bit(torch.randn(40, 128), quant_type=kind, compress_statistics=double)
    tensors = {".weight": codes, **{f".weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}}
    config = {**LAYOUTS["nf4"].config, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
    assert torch.equal(dequantized(rows_of(config, tensors, (40, 128))), functional.dequantize_4bit(codes, state))


def test_what_bitsandbytes_writes_in_8_bits() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="the library that writes this format")
    codes, scales, _ = functional.int8_vectorwise_quant(torch.randn(40, 128).half())
    rows = rows_of(LAYOUTS["bitsandbytes int8"].config, {".weight": codes, ".SCB": scales}, (40, 128))
    torch.testing.assert_close(dequantized(rows), functional.int8_vectorwise_dequant(codes, scales))
