"""New weights from another process: whole, or not at all."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import uuid
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hang_guard import HANG_SECONDS
from safetensors.torch import load_file
from test_greedy import make_runner
from test_new_weights import save_two, tokens, update

from aengine.api import weight_sources as sources
from aengine.api.errors import ModelLoadError
from aengine.api.weight_sources import GroupWeights, SharedWeights
from aengine.runner.contract import NewWeights

TRAINER = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from safetensors.torch import load_file
import aengine.api.weight_sources as sources

tensors = load_file(sys.argv[1])
kind, at = sys.argv[2:4]

def dies():
    yield from list(tensors.items())[:5]
    os._exit(9)

if kind == "shared":
    shared = sources.SharedWeights(at)
    shared.write(tensors)
    shared.write(dies())
dist.init_process_group("gloo", init_method=at, rank=0, world_size=2, timeout=timedelta(seconds=900))
sources.send_weights(tensors)
send, left = sources._broadcast, [7]

def sends_some(*given):
    left[0] -= 1
    send(*given) if left[0] else os._exit(9)

sources._broadcast = sends_some
sources.send_weights(tensors)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    return save_two("qwen3", tmp_path_factory.mktemp("models"))


def trainer(weights: pathlib.Path, kind: str, at: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", TRAINER, str(weights / "model.safetensors"), kind, at])


@pytest.mark.slow
def test_group(models: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> None:
    """The trainer sends weights, and half of others."""
    old, new = models
    runner = make_runner(old)
    at = f"file://{tmp_path / 'group'}"
    process = trainer(new, "group", at)
    dist.init_process_group("gloo", init_method=at, rank=1, world_size=2, timeout=timedelta(seconds=HANG_SECONDS))
    try:
        update(runner, GroupWeights(timeout=HANG_SECONDS))
        expected = tokens(make_runner(new))
        assert tokens(runner) == expected
        with pytest.raises(ModelLoadError, match="rank 0 of the group sent no weights"):
            runner.prepare(NewWeights(GroupWeights(timeout=HANG_SECONDS)))
        assert tokens(runner) == expected
        assert process.wait(HANG_SECONDS) == 9
    finally:
        dist.destroy_process_group()
        process.kill()


@pytest.mark.slow
def test_shared_memory(models: tuple[pathlib.Path, pathlib.Path]) -> None:
    """The trainer writes weights, and half of others."""
    old, new = models
    runner, shared = make_runner(old), SharedWeights(f"aengine-test-{uuid.uuid4().hex}")
    try:
        assert trainer(new, "shared", shared.name).wait(HANG_SECONDS) == 9
        update(runner, shared)
        assert tokens(runner) == tokens(make_runner(new))
    finally:
        shared.remove()
    with pytest.raises(ModelLoadError, match="there is no shared memory"):
        runner.prepare(NewWeights(shared))


def test_dtypes_of_tensors(models: tuple[pathlib.Path, pathlib.Path]) -> None:
    """They need not be that of the model, as in a checkpoint."""
    old, new = models
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(new / "model.safetensors").items()}
    runner, other = make_runner(old), make_runner(old)
    update(runner, tensors)
    update(other, {name: tensor.to(torch.float64) for name, tensor in tensors.items()})
    assert tokens(runner) == tokens(other) != tokens(make_runner(old))


@pytest.mark.parametrize("name", ["", "..", "a/b", "ä", "a" * 201])
def test_names_of_shared_memory(name: str) -> None:
    with pytest.raises(ValueError, match="is not one of 1 to 200 letters"):
        SharedWeights(name)


@pytest.mark.parametrize("bound", [None, torch.device("cuda", 2)])
@pytest.mark.parametrize("engine_device", [None, torch.device("cpu"), torch.device("cuda", 3)])
def test_weights_come_to_a_device_of_their_group(
    monkeypatch: pytest.MonkeyPatch, engine_device: torch.device | None, bound: torch.device | None
) -> None:
    """Not to the first one, which is the current one of the thread that receives them."""
    backend = "gloo"
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    group: Any = SimpleNamespace(bound_device_id=bound)
    assert sources._device_of(group, engine_device) == torch.device("cpu")
    backend = "nccl"
    on_cuda = engine_device is not None and engine_device.type == "cuda"
    assert sources._device_of(group, engine_device) == (bound or (engine_device if on_cuda else torch.device("cuda", 1)))
