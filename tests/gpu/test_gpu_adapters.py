"""Rows with adapters on a GPU, beside others and in graphs, against Transformers with merged weights."""

from __future__ import annotations

import copy
import pathlib
from dataclasses import replace

import pytest
import torch
import transformers
from gpu_cases import ON_CPU, ON_CUDA, Case, params, save_small
from safetensors.torch import load_file
from test_gpu_families import assert_generates
from test_gpu_quantized import FLOAT8, quantize_as_loaded
from tiny_adapters import write_adapter

from aengine.runner.contract import LoadAdapter

pytestmark = pytest.mark.slow


def merged(model: transformers.PreTrainedModel, adapter: pathlib.Path, scale: float) -> transformers.PreTrainedModel:
    model, tensors = copy.deepcopy(model), load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight.data += scale * tensors[name.replace("lora_A", "lora_B")].float() @ a.float()
    return model


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
@pytest.mark.parametrize("case", params((*ON_CPU[1:], *ON_CUDA)))
def test_rows_with_adapters(case: Case, quantization: str, tmp_path: pathlib.Path) -> None:
    """Ranks that fill their slots and such that do not; weights as they are, and quantised at load."""
    if quantization != "none" and (case.device == "cpu" or case.dtype == "float32" or case.backend == "torch_native"):
        pytest.skip("as in other cases")
    dtype = getattr(torch, case.dtype)
    model = save_small("qwen3", tmp_path / "model", case.dtype)
    options = [{"rank": 32, "size": 0.2, "head": True}, {"rank": 5, "size": 0.2, "seed": 1, "targets": ("v_proj", "down_proj")}]
    adapters = [write_adapter(tmp_path / str(at), tmp_path / "model", alpha=8, dtype=dtype, **each) for at, each in enumerate(options)]
    runner = case.runner(tmp_path / "model", max_adapters=2, max_adapter_rank=32, quantization=quantization)
    for key, adapter in enumerate(adapters, 1):
        runner.apply(runner.prepare(LoadAdapter(key, adapter.name, str(adapter))))
    if quantization != "none":
        quantize_as_loaded(model, quantization)
    if quantization == "fp8":
        case = replace(case, tolerance=FLOAT8)
    assert_generates(
        model, runner, case, [merged(model, adapter, 8 / each["rank"]) for adapter, each in zip(adapters, options, strict=True)]
    )
