"""Runners that sleep and wake between steps compute the same tokens, and give their memory back."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from driver import Driver, Sequence_, sampled
from reference import save_tiny
from replays import count_replays, graphs_of
from slow_cases import slow_but
from test_graphs import graph_runner
from test_greedy import make_runner

from aengine.runner.changes import NewWeights
from aengine.runner.model_runner import ModelRunner
from aengine.scheduler.plan import StepResult

PROMPTS = [[3 + i] * (1 + 7 * i) for i in range(8)]
PARAMS = [sampled(i, (0.0, 0.9)[i % 2], top_p=0.9 if i % 2 else 1.0) for i in range(8)]


class Sleeper(Driver):
    """Has the runner sleep every few steps."""

    def __init__(self, runner: ModelRunner, levels: Sequence[int], **options: Any) -> None:
        super().__init__(runner, **options)
        self.levels = levels

    def run_step(self, sequences: Sequence[Sequence_]) -> StepResult:
        assert isinstance(self.runner, ModelRunner)
        if self.step % 5 == 4:
            pages = sorted({page for s in sequences for column in s.pages for page in column} - {0})
            for level in self.levels:
                self.runner.sleep(level, np.array(pages, np.int32))
            self.runner.wake(self.runner.prepare(NewWeights(None)) if self.levels[-1] == 2 else None)
        return super().run_step(sequences)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny("qwen3", path)
    return path


KERNELS, TORCH = {"attention_backend": "cpu"}, {"attention_backend": "torch_native"}
INT8 = {"quantization": "int8", "kv_cache_dtype": "int8", "dtype": "bfloat16"}
DRAFT = {"speculative": "draft", "speculative_model": "demo"}
CASES = [(options, levels) for options in (KERNELS, TORCH, {**KERNELS, **INT8}) for levels in ([1], [2], [1, 2])]


@pytest.mark.parametrize(("options", "levels"), slow_but([(KERNELS, [1, 2]), (TORCH, [1]), (TORCH, [2])], CASES))
def test_tokens_are_the_same(options: dict[str, Any], levels: list[int], tiny: pathlib.Path) -> None:
    runner = make_runner(tiny, **options)
    expected = Driver(runner, chunk=16).generate(PROMPTS, 20, PARAMS)
    runner.close()
    runner = make_runner(tiny, **options)
    assert Sleeper(runner, levels, chunk=16).generate(PROMPTS, 20, PARAMS) == expected
    runner.sleep(levels[-1], np.zeros(0, np.int32))
    runner.close()


@pytest.mark.parametrize("level", [1, 2])
def test_graphs_are_recorded_again(level: int, tiny: pathlib.Path) -> None:
    expected = Driver(make_runner(tiny, **TORCH)).generate(PROMPTS, 20, PARAMS)
    runner = graph_runner(tiny)
    before = graphs_of(runner)
    assert Sleeper(runner, [level]).generate(PROMPTS, 20, PARAMS) == expected
    assert graphs_of(runner) is not before
    replays = count_replays(runner)
    assert Driver(runner).generate(PROMPTS, 20, PARAMS) == expected
    assert sum(replays.values()) > 10
    runner.close()
