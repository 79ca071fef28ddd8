"""Runners on CUDA that sleep: the same tokens, and memory of the device that others can have."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from attention_backends import backend_param
from driver import Driver
from test_graphs_gpu import cuda_runner
from test_graphs_gpu import model_dir as model_dir
from test_sleeping import PARAMS, PROMPTS, Sleeper

from aengine.runner.changes import NewWeights

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
def test_memory_is_really_given_back(model_dir: pathlib.Path, level: int) -> None:
    """Of KV pages and weights nine tenths."""
    with cuda_runner(model_dir, "triton", kv_cache_memory=1 << 30) as runner:
        Driver(runner).generate(PROMPTS, 4)
        before = free()
        use = runner.memory_used()
        runner.sleep(level, np.arange(1, 9, dtype=np.int32))
        assert free() - before > 0.9 * (1 << 30)
        assert use - runner.memory_used() > 0.9 * (1 << 30)
        runner.wake(runner.prepare(NewWeights(None)) if level == 2 else None)
        assert abs(free() - before) < 100 << 20
