"""Stages of the torch decoder, recorded and not: what they generate is what one stage does.

The stages are runners of this process and thread. Hidden states wait in a queue until the next stage takes them.
"""

from __future__ import annotations

import pathlib
from collections import deque
from typing import Any

import pytest
from driver import GREEDY, sampled
from eager_capture import EagerCapture
from reference import save_tiny
from replays import count_replays
from slow_cases import slow_but
from test_rank_order import DriverStandIn, FollowerStandIn, runner_of
from workloads import random_steps

from aengine.parallel.messages import Plan
from aengine.parallel.shard import Shard
from aengine.runner.base import InFlightStep
from aengine.runner.model_runner import ModelRunner
from aengine.scheduler.plan import IntArray, StepPlan

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stages[0], name)

    def launch(self, plan: StepPlan) -> InFlightStep:
        first, *later = self._stages
        step = first.launch(plan)
        for runner in later:
            assert not len(runner.launch(Plan.of(plan).step_plan()).result().tokens)
        return step


def staged(path: pathlib.Path, num_stages: int, capture: Any) -> Staged:
    between: list[deque[tuple[int, IntArray]]] = [deque() for _ in range(num_stages)]
    runners = []
    for stage in range(num_stages):
        ranks: Any = (FollowerStandIn if stage else DriverStandIn)(Shard(stage=stage, num_stages=num_stages), deque())
        ranks.connect_stages = lambda stage=stage: QueueRing(between[stage], between[stage - 1])
        runners.append(runner_of(path, capture, ranks, pipeline_parallel_size=num_stages))
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
