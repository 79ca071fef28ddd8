"""`EngineConfig.quantization`: which matrices of a model become codes, and that the model is that of what these stand for."""

from __future__ import annotations

import os
import pathlib

import pytest
import torch
from driver import Driver, record_logits
from reference import FAMILIES, LATENT, TINY, save_random
from row_tensors import dequantized
from safetensors.torch import load_file, save_file

from aengine.api.config import EngineConfig
from aengine.kernels.arrays import as_array
from aengine.kernels.cpu.library import FLOAT8_CODES, INT4_CODES, INT8_QUADS, Workspace, load_kernels
from aengine.kernels.cpu.packing import quantize_matrix
from aengine.models.named_weights import NEVER_QUANTIZED, named_weights
from aengine.runner.runner import ModelRunner

pytestmark = pytest.mark.skipif(os.environ.get("AENGINE_CPU_LEVEL") == "torch", reason="AENGINE_CPU_LEVEL turns the CPU kernels off")
MODELS = {
    "latent": ("DeepseekV3", {**LATENT, "kv_lora_rank": 32, "first_k_dense_replace": 1}),
    "transposed": FAMILIES["gpt-oss"],
}
FORMATS = {"int4": INT4_CODES, "fp8": FLOAT8_CODES}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("model", "quantization"), [("latent", "int4"), ("transposed", "int4"), ("latent", "fp8")])
def test_experts_and_heads(tmp_path: pathlib.Path, model: str, quantization: str) -> None:
    (quantized := tmp_path / "quantized").mkdir()
    (meant := tmp_path / "meant").mkdir()
    prefix, changes = MODELS[model]
    save_random(prefix, {**TINY, **changes}, quantized, 1, dtype=torch.float32)
    runner, logits = run(quantized, quantization=quantization)
    weights = runner._executor._model._stack._weights
    assert {one.c.format for name, group in weights.grouped.items() if ".experts." in name for one in group.linears} == {
        FORMATS[quantization]
    }
    assert weights.linears["head"].c.format == (INT8_QUADS if quantization == "int4" else FLOAT8_CODES)
    assert all(linear.c.format not in FORMATS.values() for name, linear in weights.linears.items() if name.endswith("router"))

    tensors = load_file(quantized / "model.safetensors")
    workspace = Workspace(load_kernels(), 1)
    for name, weight in named_weights(runner.spec).items():
        stem = name.removesuffix(".weight").rpartition(".")[2]
        if len(weight.shape) == 1 or name.endswith(".bias") or stem in {*NEVER_QUANTIZED, "embedding"}:
            continue
        if quantization == "int4" and stem == "head":
            continue  # 8 bits: its error is below
        for part in weight.parts:
            transposed = part.transform is not None and part.transform.transposed
            stored = tensors[part.source].mT if transposed else tensors[part.source]
            rows = dequantized(quantize_matrix(workspace, as_array(stored.reshape(-1, stored.shape[-1])), quantization)).view(stored.shape)
            tensors[part.source] = (rows.mT if transposed else rows).contiguous()
    save_file(tensors, meant / "model.safetensors", {"format": "pt"})
    (meant / "config.json").write_text((quantized / "config.json").read_text())
    _, expected = run(meant)
    assert (logits - expected).norm() < (0.02 if quantization == "int4" else 1e-5) * expected.norm()


def run(folder: pathlib.Path, **options: str) -> tuple[ModelRunner, torch.Tensor]:
    """The runner, and the logits of the last token of a prompt."""
    runner = ModelRunner(EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_memory=4 << 20, **options), folder)
    seen = record_logits(runner)
    Driver(runner).generate([list(range(5, 24))], 1)
    return runner, seen[0][0]
