"""Stages of the torch decoder, recorded and not: what they generate is what one stage does.

The stages are runners of this process and thread. Hidden states wait in a queue until the next stage takes them.
"""

from __future__ import annotations

import pathlib
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driver import GREEDY, sampled
from eager_capture import EagerCapture
from reference import save_tiny
from replays import count_replays
from slow_cases import slow_but
from test_rank_order import DriverStandIn, FollowerStandIn, runner_of
from tiny_adapters import write_adapter
from workloads import random_steps

from aengine.kernels.arrays import FLOAT32
from aengine.models.adapters import load_adapter
from aengine.parallel.messages import Plan
from aengine.parallel.shard import Shard
from aengine.runner.contract import InFlightStep
from aengine.runner.runner import ModelRunner
from aengine.scheduler.plan import NO_INTS, IntArray, StepPlan

PARAMS = (GREEDY, GREEDY, sampled(3), sampled(5, repetition_penalty=1.2), sampled(6, prompt_logprobs=1, logprobs=2))


class QueueRing:
    """Stands in for a `Ring`."""

    def __init__(self, following: deque[tuple[int, IntArray]], preceding: deque[tuple[int, IntArray]]) -> None:
        self._following = following
        self._preceding = preceding

    def send(self, step: int, words: IntArray) -> None:
        self._following.append((step, words.copy()))

    def receive(self, step: int) -> IntArray:
        number, words = self._preceding.popleft()
        assert number == step
        return words

    def close(self) -> None:
        pass


class Staged:
    """A `Runner` of all stages."""

    def __init__(self, stages: list[ModelRunner]) -> None:
        self._stages = stages
        self.between: Callable[[], object] = lambda: None  # the first and the last part of a step on the first stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stages[0], name)

    def launch(self, plan: StepPlan) -> InFlightStep:
        first, *later = self._stages
        step = first.launch(plan)
        for runner in later:
            assert not len(runner.launch(Plan.of(plan).step_plan()).result().tokens)
        self.between()
        return step


def staged(path: pathlib.Path, num_stages: int, capture: Any, **options: Any) -> Staged:
    between: list[deque[tuple[int, IntArray]]] = [deque() for _ in range(num_stages)]
    runners = []
    for stage in range(num_stages):
        ranks: Any = (FollowerStandIn if stage else DriverStandIn)(Shard(stage=stage, num_stages=num_stages), deque())
        ranks.connect_stages = lambda stage=stage: QueueRing(between[stage], between[stage - 1])
        runners.append(runner_of(path, capture, ranks, pipeline_parallel_size=num_stages, **options))
        runners[-1]._executor.warm_up()
    return Staged(runners)


@pytest.mark.parametrize(
    ("family", "num_stages", "capture"),
    slow_but(
        [("gpt-oss", 3, EagerCapture)],
        [
            ("gpt-oss", 3, EagerCapture),
            ("gpt-oss", 2, None),
            ("deepseek-v3-dense", 2, EagerCapture),
            ("qwen3-tied-biased", 2, EagerCapture),
        ],
    ),
)
def test_stages_generate_what_one_does(family: str, num_stages: int, capture: Any, tmp_path: pathlib.Path) -> None:
    save_tiny(family, tmp_path)
    expected = random_steps(runner_of(tmp_path), 8, 30, most=8, params=PARAMS)
    assert sum(map(len, expected)) > 50
    runner = staged(tmp_path, num_stages, capture)
    counts = [count_replays(stage) for stage in runner._stages] if capture else []
    assert random_steps(runner, 8, 30, most=8, params=PARAMS) == expected
    for each in counts:
        assert {kind for (kind, _), count in each.items() if count} == {"decode", "pieces"}


@pytest.mark.slow
def test_adapters(tmp_path: pathlib.Path) -> None:
    """They change embedding and output head, too. A stage has those of its layers, whose slots the end of a step finds again."""
    save_tiny("qwen3", tmp_path / "model")
    keys = (1, 0, 2)
    for key in (1, 2):
        write_adapter(tmp_path / str(key), tmp_path / "model", rank=4, seed=key, size=0.5, embedding=key == 2, head=True)
    options = {"max_adapters": 2, "max_adapter_rank": 4}
    one, several = runner_of(tmp_path / "model", **options), staged(tmp_path / "model", 2, EagerCapture, **options)
    for runner in (one, *several._stages):
        executor: Any = runner._executor
        for key in (1, 2):
            adapter = load_adapter(tmp_path / str(key), runner.spec, FLOAT32, executor.shard, 4)
            with torch.inference_mode():
                executor.set_adapter(key, executor.pack_adapter(adapter))
    table = several._stages[0]._executor._adapters.table

    @torch.inference_mode()
    def step_without_adapters() -> None:
        table.on = False
        table.write_slots(NO_INTS)
        table.begin(1)

    several.between = step_without_adapters
    expected = random_steps(one, 8, 30, most=6, params=PARAMS, adapters=keys)
    assert random_steps(several, 8, 30, most=6, params=PARAMS, adapters=keys) == expected
    assert expected != random_steps(one, 8, 30, most=6, params=PARAMS)
