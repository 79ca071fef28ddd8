"""Numbers of a model that runs: its dtype, weights and logits that are not finite, and bits that depend on a request alone."""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from driver import GREEDY, Driver, sampled
from eager_capture import EagerCapture
from quantized_layouts import LAYOUTS
from quantized_models import random_model, rewrite
from reference import save_tiny
from safetensors.torch import load_file, save_file
from test_greedy import make_runner

from aengine.api.config import EngineConfig
from aengine.api.errors import ModelLoadError, NothingToChooseError
from aengine.attention import build_layout
from aengine.models.loading import weights
from aengine.runner.contract import NewWeights
from aengine.runner.results import Pooler
from aengine.runner.runner import ModelRunner
from aengine.sampling.arrays import DeviceArrays
from aengine.scheduler.plan import NewRow

POISON = 7
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("sound")
    save_tiny("qwen3", path)
    return path


@pytest.fixture(scope="module")
def poisoned(sound: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model whose embedding of one token is no number."""
    path = tmp_path_factory.mktemp("poisoned")
    tensors = load_file(sound / "model.safetensors")
    tensors[EMBEDDING][POISON] = math.nan
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text((sound / "config.json").read_text())
    return path


def in_float16(path: pathlib.Path) -> pathlib.Path:
    tensors = load_file(path / "model.safetensors")
    save_file({name: one.half() if one.is_floating_point() else one for name, one in tensors.items()}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config.pop("torch_dtype", None)
    (path / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    return path


@pytest.mark.parametrize("codes", [False, True])
def test_a_cpu_takes_another_dtype_for_float16(codes: bool, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine")
    (tmp_path / "plain").mkdir()
    path = random_model("gpt_neox", tmp_path / "plain")
    if codes:
        (tmp_path / "codes").mkdir()
        rewrite(path, tmp_path / "codes", LAYOUTS["gptq 4 bits"])
        path = tmp_path / "codes"
    in_float16(path)

    def dtype(chosen: str) -> np.dtype:
        runner = ModelRunner(EngineConfig(model="x", device="cpu", dtype=chosen, kv_cache_memory=8 << 20, max_num_seqs=2), path)
        runner.close()
        return runner.dtype

    expected = "float32" if codes else "bfloat16"
    assert dtype("auto").name == expected
    (line,) = [line for line in caplog.messages if line.startswith("dtype ")]
    assert line == f"dtype {expected} for weights of float16, which CPUs are slow in; choose another one with dtype"
    assert dtype("float16") == np.float16
    assert len([line for line in caplog.messages if line.startswith("dtype ")]) == 1


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [EMBEDDING, "model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_refused(number: float, name: str, sound: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tensors = load_file(sound / "model.safetensors")
    tensors[name].view(-1)[-3] = number
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((sound / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=rf"^{name} in {tmp_path}/model.safetensors has numbers that are not finite$"):
        make_runner(tmp_path)


def test_new_weights_that_are_not_finite_change_nothing(sound: pathlib.Path, poisoned: pathlib.Path) -> None:
    runner = make_runner(sound)
    before = Driver(runner).generate([[5, 6, 8]], 6)
    with pytest.raises(ModelLoadError, match=f"^{EMBEDDING} in {poisoned}/model.safetensors has numbers that are not finite$"):
        runner.prepare(NewWeights(poisoned))
    with pytest.raises(ModelLoadError, match=f"^{EMBEDDING} has numbers that are not finite$"):
        runner.prepare(NewWeights(load_file(poisoned / "model.safetensors")))
    assert Driver(runner).generate([[5, 6, 8]], 6) == before


HOW = {
    "the likeliest": GREEDY,
    "draws": sampled(1),
    "draws of the likeliest": sampled(1, top_k=5),
    "logprobs": replace(GREEDY, logprobs=2),
    "a bias": replace(sampled(2, top_p=0.9), logit_bias=((3, 1.0),)),
}
WHERE = {"kernels": ("auto", None), "torch": ("torch_native", None), "graphs": ("torch_native", EagerCapture)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", HOW)
def test_a_row_without_numbers_fails_alone(how: str, where: str, poisoned: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "are_finite", lambda rows: True)
    backend, capture = WHERE[where]
    config = EngineConfig(
        model="x", device="cpu", dtype="float32", kv_cache_memory=8 << 20, max_num_seqs=4, attention_backend=backend, graph_sizes=(1, 4)
    )
    expected = Driver(ModelRunner(config, poisoned, capture=capture)).generate([[5, 6, 8]], 4, HOW[how])
    driver = Driver(ModelRunner(config, poisoned, capture=capture))
    good, bad = driver.add([5, 6, 8], HOW[how]), driver.add([5, POISON, 8], HOW[how])
    for _ in range(2):  # the step that follows may have begun before the failure is seen
        (failure,) = driver.run_step([good, bad]).failures.items()
        assert failure[0] == bad.row
        assert isinstance(failure[1], NothingToChooseError)
        assert re.fullmatch(r"model: no token can be chosen at position \d: no logit that is left is a number", str(failure[1]))
    for _ in range(2):
        assert not driver.run_step([good]).failures
    assert [good.output] == expected


def test_pages_of_files_are_given_back(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was packed is not in the memory of the process a second time."""
    monkeypatch.setattr(weights, "_RETURNED_BYTES", 0)
    save_tiny("qwen3", tmp_path)
    runner = make_runner(tmp_path)
    mapped, resident = 0, 0
    for line in pathlib.Path(f"/proc/{os.getpid()}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            ours = line.endswith(f"{tmp_path}/model.safetensors")
            mapped += ours
        elif ours and words[0] == "Rss:":
            resident += int(words[1])
    assert resident == 0
    runner.close()


def _ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("cuts", [(40,), (7, 33), (1, 2, 3, 34), (39, 1)])
def test_the_mean_does_not_depend_on_chunks(cuts: tuple[int, ...]) -> None:
    states = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 40)[:, None]

    def pooled(lengths: tuple[int, ...]) -> np.ndarray:
        pooler, found, start = Pooler(DeviceArrays(torch.device("cpu"))), 0.0, 0
        pooler.update([NewRow(0, replace(GREEDY, pooling="mean"), 40)])
        for length in lengths:
            layout = build_layout(_ints(0), 0, _ints(start), _ints(length), np.zeros((1, 1, 4), np.int32), 16)
            made = pooler.pool(np.zeros(1, np.int32), layout, states[start : start + length])
            found, start = found + made.on_host()[0].states, start + length
        return (found / 40).astype(np.float32)

    assert pooled(cuts).tobytes() == pooled((8,) * 5).tobytes()
