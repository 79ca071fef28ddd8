"""Scales of an fp8 KV cache: under each of the names that checkpoints use, one number each, and never in the way of the weights."""

from __future__ import annotations

import json
import logging
import math
import pathlib

import pytest
import torch
from safetensors.torch import save_file
from test_weights import CONFIG, Tensors, load, save_shards, spec_of, tensors_of

from aengine.api.config import EngineConfig
from aengine.api.errors import ModelLoadError
from aengine.kernels.arrays import FLOAT32
from aengine.models.config.model_config import read_spec
from aengine.models.loading.weights import stored_kv_scales
from aengine.runner.contract import Device
from aengine.runner.setup import ExecutorSetup

ATTENTION = "model.layers.{}.self_attn."
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "vllm": ("attn.k_scale", "attn.v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
}


def scales_of(path: pathlib.Path, scales: Tensors) -> tuple[tuple[float, float], ...] | None:
    save_file({**tensors_of(spec_of()), **scales}, path / "model.safetensors")
    load(spec_of(), path)  # the weights are read as if the scales were not there
    return stored_kv_scales(spec_of(), path)


def scale(layer: int, name: str, value: float, dtype: torch.dtype = torch.float32) -> Tensors:
    return {ATTENTION.format(layer) + name: torch.tensor(value, dtype=dtype)}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_under_each_name(tmp_path: pathlib.Path, names: tuple[str, str], dtype: torch.dtype) -> None:
    key, value = names
    scales = {**scale(0, key, 0.5, dtype), **scale(0, value, 0.25, dtype), **scale(1, key, 2.0, dtype), **scale(1, value, 4.0, dtype)}
    assert scales_of(tmp_path, scales) == ((0.5, 0.25), (2.0, 4.0))


def test_the_older_name_is_of_both(tmp_path: pathlib.Path) -> None:
    assert scales_of(tmp_path, {**scale(0, "kv_scale", 0.5), **scale(1, "kv_scale", 2.0), **scale(1, "v_scale", 3.0)}) == (
        (0.5, 0.5),
        (2.0, 3.0),
    )


def test_scales_of_a_model_that_was_saved_without_its_head(tmp_path: pathlib.Path) -> None:
    tensors = {**tensors_of(spec_of()), **scale(1, "k_scale", 0.5)}
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    load(spec_of(), tmp_path)
    assert stored_kv_scales(spec_of(), tmp_path) == ((1.0, 1.0), (0.5, 1.0))


def test_what_is_absent_is_one(tmp_path: pathlib.Path) -> None:
    assert scales_of(tmp_path, {}) is None
    assert scales_of(tmp_path, scale(1, "q_scale", 5.0)) is None
    one = {ATTENTION.format(1) + "v_scale": torch.tensor([0.125])}
    assert scales_of(tmp_path, one) == ((1.0, 1.0), (1.0, 0.125))


def test_scales_in_shards(tmp_path: pathlib.Path) -> None:
    save_shards(tmp_path, [{**tensors_of(spec_of()), **scale(0, "k_scale", 0.5)}, scale(1, "v_scale", 0.25)])
    assert stored_kv_scales(spec_of(), tmp_path) == ((0.5, 1.0), (1.0, 0.25))


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (scale(0, "k_scale", -1.0), r"layers\.0\.self_attn\.k_scale is -1\.0, not a positive number"),
        (scale(0, "k_scale", math.inf), "is inf, not a positive number"),
        ({ATTENTION.format(0) + "k_scale": torch.ones(2)}, r"k_scale has shape \[2\]; supported is one number"),
        ({ATTENTION.format(0) + "v_scale": torch.ones(1, dtype=torch.uint8)}, "v_scale is stored as uint8"),
        ({**scale(0, "k_scale", 1.0), **scale(0, "k_proj.k_scale", 1.0)}, r"two scales of the same: .*k_.*scale and .*k_.*scale"),
    ],
)
def test_refusals_name_the_tensor(tmp_path: pathlib.Path, scales: Tensors, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        scales_of(tmp_path, scales)


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.k_scale", "model.layers.0.self_attn.k_proj.v_scale", "model.layers.0.k_scale"])
def test_a_scale_of_something_else_is_unexpected(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"has unexpected {name}"):
        scales_of(tmp_path, {name: torch.tensor(1.0)})


KV_ALONE = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
}


def test_a_config_that_quantizes_kv_alone_is_read() -> None:
    assert read_spec({**CONFIG, "quantization_config": KV_ALONE}) == spec_of()


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_scheme": {**KV_ALONE["kv_cache_scheme"], "type": "int"}},
        {"kv_cache_scheme": {**KV_ALONE["kv_cache_scheme"], "strategy": "attn_head"}},
        {"kv_cache_scheme": {**KV_ALONE["kv_cache_scheme"], "dynamic": True}},
    ],
)
def test_other_schemes_of_kv_are_refused(change: dict) -> None:
    with pytest.raises(ModelLoadError, match=r"kv_cache_scheme .* is not supported; supported are 8-bit floats"):
        read_spec({**CONFIG, "quantization_config": {**KV_ALONE, **change}})


def test_an_fp8_cache_takes_them(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine")
    scales_of(tmp_path, scale(1, "k_scale", 0.5))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def setup(**options) -> ExecutorSetup:
        return ExecutorSetup(EngineConfig(model=str(tmp_path), **options), spec_of(), tmp_path, FLOAT32, Device("cpu"), 1, 1, 64, 64)

    attention = setup(kv_cache_dtype="fp8").attention()
    assert (attention.cache_dtype, attention.scales(0), attention.scales(1)) == (torch.float8_e4m3fn, (1.0, 1.0), (0.5, 1.0))
    assert caplog.messages == ["fp8 KV cache: scaled as the checkpoint says"]
    assert setup(kv_cache_dtype="fp8", load_format="dummy").attention().kv_scales is None
    assert caplog.messages[1:] == ["fp8 KV cache: its scales are 1"]
    assert setup().attention().kv_scales is None
    assert caplog.messages[2:] == []
