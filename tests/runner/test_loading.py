"""Real files on their way into a runner: PyTorch's give what transformers makes of them, and what does not fit is not read."""

from __future__ import annotations

import json
import logging
import pathlib

import numpy as np
import pytest
import torch
import transformers
from driver import Driver
from reference import greedy, save_tiny
from safetensors.torch import save_file

from aengine.api.config import EngineConfig
from aengine.api.errors import InsufficientMemoryError, ModelLoadError
from aengine.kernels.arrays import BFLOAT16
from aengine.models.config.model_config import load_spec
from aengine.models.loading import hub
from aengine.models.loading.hub import resolve_model
from aengine.models.named_weights import num_parameters
from aengine.runner import setup
from aengine.runner.cpu import model as host_model
from aengine.runner.cpu.executor import CpuExecutor
from aengine.runner.runner import ModelRunner
from aengine.runner.torch import loading


def make_runner(model_dir: pathlib.Path, **options) -> ModelRunner:
    settings = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8, "kv_cache_memory": 8 << 20, **options}
    return ModelRunner(EngineConfig(model=str(model_dir), **settings), model_dir)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("backend", ["auto", "torch_native"])
@pytest.mark.parametrize("shards", [1, 2])
def test_pytorch_files_give_the_tokens_of_transformers(tmp_path: pathlib.Path, shards: int, backend: str) -> None:
    model = save_tiny("qwen3", tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    tensors = list(model.state_dict().items())
    names = [f"pytorch_model-{number + 1:05}-of-{shards:05}.bin" for number in range(shards)] if shards > 1 else ["pytorch_model.bin"]
    for number, name in enumerate(names):
        torch.save(dict(tensors[number::shards]), tmp_path / name)
    if shards > 1:
        weight_map = {tensor: names[number % shards] for number, (tensor, _) in enumerate(tensors)}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    prompts = [np.random.default_rng(1).integers(0, 199, length).tolist() for length in (1, 17, 40)]
    expected = greedy(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), prompts, 24)
    assert len({token for tokens in expected for token in tokens}) > 20
    runner = make_runner(resolve_model(str(tmp_path)), attention_backend=backend)
    assert Driver(runner).generate(prompts, 24) == expected


@pytest.mark.parametrize("backend", ["auto", "torch_native"])
def test_a_checkpoint_of_several_dtypes(tmp_path: pathlib.Path, backend: str) -> None:
    model = save_tiny("qwen3", tmp_path)
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.float32]
    tensors = {name: tensor.to(dtypes[number % 4]) for number, (name, tensor) in enumerate(model.state_dict().items())}
    save_file(tensors, tmp_path / "model.safetensors")
    model.load_state_dict(tensors)
    prompts = [[5, 6, 7], [8]]
    runner = make_runner(tmp_path, attention_backend=backend)
    assert Driver(runner).generate(prompts, 24) == greedy(model, prompts, 24)


SETTINGS = [
    {"attention_backend": "torch_native"},
    {},
    {"dtype": "bfloat16"},
    {"quantization": "int8", "dtype": "bfloat16"},
    {"quantization": "int4"},
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_what_does_not_fit_is_not_read(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], load_format: str) -> None:
    demo = resolve_model("demo")
    options = {**settings, "load_format": load_format, "kv_cache_memory": 1 << 20}
    runner = make_runner(demo, **options)
    executor = runner._executor
    if isinstance(executor, CpuExecutor):
        mapped = load_format == "auto" and runner.dtype == BFLOAT16  # else the embedding is copied beside the packed head
        held = executor._model._stack.nbytes + (0 if mapped else executor._model._stack._weights.tables["embedding"].nbytes)
    else:
        held = num_parameters(runner.spec) * runner.dtype.itemsize
    cache = 2 * executor.bytes_per_page()
    runner.close()
    for module in (loading, host_model):
        monkeypatch.setattr(module, "free_host_memory", lambda: available)
    available = round(held * 1.03) + cache
    make_runner(demo, **options).close()

    def read(*_: object) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr(setup, "stored_weights", read)
    monkeypatch.setattr(setup, "random_weights", read)
    available = round(held * 0.97)
    with pytest.raises(InsufficientMemoryError, match=r"^the model needs [\d.]+ MiB of memory \(.* of weights and .* of KV cache\), but"):
        make_runner(demo, **options)


def test_weights_that_do_not_match_are_refused_before_any_is_packed(tmp_path: pathlib.Path) -> None:
    save_tiny("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4, "layer_types": None, "vocab_size": 200}))
    checked: list[None] = []
    with pytest.raises(
        ModelLoadError, match=r"it lacks model\.layers\.3\..*; it has other shapes .*: lm_head\.weight \[199, 64\] instead of"
    ):
        ModelRunner(EngineConfig(model="x", device="cpu"), tmp_path, check=lambda: checked.append(None))
    assert not checked
    assert load_spec(tmp_path).num_layers == 4


def test_progress_is_logged_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine")
    now = 100.0
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    monkeypatch.setattr(hub.time, "monotonic", lambda: now)
    with hub.LoadProgress(8 << 30) as bar:
        for _ in range(16):
            now += 1.0
            bar.add_bytes(1 << 29)
    assert caplog.messages == [f"loaded {gib} of 8.0 GiB of weights" for gib in ("2.5", "5.0", "7.5")]
