"""Runners on CUDA that sleep: the same tokens, and memory of the device that others can have."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from attention_backends import backend_param
from driver import Driver
from test_graphs_gpu import MODEL, cuda_runner
from test_graphs_gpu import model_dir as model_dir
from test_sleeping import PARAMS, PROMPTS, Sleeper

from aengine.api.errors import InsufficientMemoryError
from aengine.runner.contract import NewWeights
from aengine.runner.torch import executor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DRAFT = {"speculative": "draft", "max_drafts": 3}
BACKENDS = [("triton", {}), ("flashinfer", {}), ("triton", {"quantization": "fp8"}), ("triton", {"eager": True}), ("triton", DRAFT)]


@pytest.mark.parametrize("levels", [[1], [2], [1, 2]])
@pytest.mark.parametrize(("backend", "options"), [backend_param(*one) for one in BACKENDS])
def test_tokens_are_the_same(model_dir: pathlib.Path, backend: str, options: dict[str, Any], levels: list[int]) -> None:
    if options is DRAFT:
        options = {**DRAFT, "speculative_model": str(model_dir)}
    with cuda_runner(model_dir, backend, **options) as runner:
        expected = Driver(runner, chunk=16).generate(PROMPTS, 20, PARAMS)
    with cuda_runner(model_dir, backend, **options) as runner:
        assert Sleeper(runner, levels, chunk=16).generate(PROMPTS, 20, PARAMS) == expected


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.whole_device
@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_really_given_back(tmp_path: pathlib.Path, level: int) -> None:
    """Of KV pages and weights nine tenths."""
    long = {**MODEL, "max_position_embeddings": 1 << 16}  # of which the rows can use a pool of 1 GiB
    (tmp_path / "config.json").write_text(json.dumps(long))
    with cuda_runner(tmp_path, "triton", kv_cache_memory=1 << 30) as runner:
        Driver(runner).generate(PROMPTS, 4)
        before = free()
        use = runner.memory_used()
        runner.sleep(level, np.arange(1, 9, dtype=np.int32))
        assert free() - before > 0.9 * (1 << 30)
        assert use - runner.memory_used() > 0.9 * (1 << 30)
        runner.wake(runner.prepare(NewWeights(None)) if level == 2 else None)
        assert abs(free() - before) < 100 << 20


def pinned() -> int:
    """Bytes of pinned host memory that torch holds."""
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


@pytest.mark.parametrize("level", [1, 2])
def test_no_pinned_memory_is_kept(model_dir: pathlib.Path, level: int) -> None:
    """Of weights that slept, or that came in place of others."""
    with cuda_runner(model_dir, "triton") as runner:
        expected = Driver(runner).generate(PROMPTS, 4)
        before = pinned()
        runner.sleep(level, np.zeros(0, np.int32))
        runner.wake(runner.prepare(NewWeights(None)) if level == 2 else None)
        runner.apply(runner.prepare(NewWeights(None)))
        assert pinned() <= before
        assert Driver(runner).generate(PROMPTS, 4) == expected


def test_too_little_host_memory_changes_nothing(model_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At level 2 nothing of the weights goes there."""
    with cuda_runner(model_dir, "triton") as runner:
        expected = Driver(runner).generate(PROMPTS, 4)
        monkeypatch.setattr(executor, "free_host_memory", lambda: 0)
        with pytest.raises(InsufficientMemoryError, match=r"what the device is to give back needs .* of host memory"):
            runner.sleep(1, np.zeros(0, np.int32))
        assert Driver(runner).generate(PROMPTS, 4) == expected
        runner.sleep(2, np.zeros(0, np.int32))
        runner.wake(runner.prepare(NewWeights(None)))
        assert Driver(runner).generate(PROMPTS, 4) == expected
