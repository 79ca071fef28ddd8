"""The torch decoder's collectives, in steps that are recorded and others: all ranks call the same ones in the same order, or each waits for
another one.

Nothing is exchanged here: a stand-in writes down what is called, and ranks run one after the other.
"""

from __future__ import annotations

import pathlib
from collections import deque
from typing import Any

import pytest
import torch
from driver import GREEDY, sampled
from eager_capture import EagerCapture, _Tape
from reference import save_tiny
from slow_cases import slow_but
from torch import Tensor
from workloads import random_steps

from aengine.api.config import EngineConfig
from aengine.layers.collectives import Collectives
from aengine.parallel.driver import DriverRanks
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.messages import ApplyChange, LastTokens, Logits, Plan, Sizes
from aengine.parallel.shard import Shard
from aengine.runner.runner import ModelRunner
from aengine.runner.setup import ExecutorSetup
from aengine.runner.torch import executor
from aengine.scheduler.plan import IntArray, StepPlan

KINDS = (GREEDY, GREEDY, sampled(3), sampled(4, top_p=0.8), sampled(5, repetition_penalty=1.2), sampled(6, prompt_logprobs=1, logprobs=2))
Call = tuple[str, tuple[int, ...], torch.dtype]


class Noted(Collectives):
    """As if all ranks had what this one has."""

    def __init__(self, shard: Shard, calls: list[Call]) -> None:
        self.shard = shard
        self._calls = calls

    def _note(self, kind: str, x: Tensor) -> None:
        if x.numel():
            _Tape.run_live(lambda: self._calls.append((kind, tuple(x.shape), x.dtype)))

    def stacked(self, x: Tensor) -> Tensor:
        self._note("all-gather", x)
        return torch.stack([x] * self.shard.size)

    def broadcast(self, x: Tensor) -> None:
        self._note("broadcast", x)

    def close(self) -> None:
        pass


class _Ranks:
    exchange_fd, threads, num_local, local_index = None, 1, 1, 0
    same = progress = on_failure = check = close = lambda *given, **named: None

    def __init__(self, shard: Shard, messages: deque[Plan | Logits | LastTokens]) -> None:
        self.shard = shard
        self.messages = messages

    def agree(self, own: Sizes) -> Sizes:
        return own


class DriverStandIn(_Ranks, DriverRanks):
    def send_plan(self, plan: StepPlan) -> None:
        self.messages.append(Plan.of(plan))

    def send_logits(self, indices: IntArray) -> None:
        self.messages.append(Logits(indices))

    def send_last_tokens(self, tokens: IntArray) -> None:
        self.messages.append(LastTokens(tokens))


class FollowerStandIn(_Ranks, FollowerRanks):
    def next_task(self) -> StepPlan | ApplyChange | None:
        message = self.messages.popleft() if self.messages else None
        assert message is None or isinstance(message, Plan)
        return None if message is None else message.step_plan()

    def receive(self) -> Logits | LastTokens:
        message = self.messages.popleft()
        assert not isinstance(message, Plan)
        return message


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny("qwen3", path)
    return path


def runner_of(tiny: pathlib.Path, capture: Any = None, ranks: Any = None, **options: Any) -> ModelRunner:
    sizes = {"max_num_seqs": 8, "kv_cache_memory": 64 << 20, "graph_sizes": (1, 3, 8), "graph_tokens": 60}
    settings = {"dtype": "float32", "device": "cpu", "attention_backend": "torch_native", **sizes, **options}
    return ModelRunner(EngineConfig(model=str(tiny), **settings), tiny, capture, ranks=ranks)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("capture", "mode", "size"),
    slow_but(
        [(None, "exact", 2), (EagerCapture, "fast", 2)],
        [(c, m, s) for c in (None, EagerCapture) for m in ("exact", "fast") for s in (2, 4)],
    ),
)
def test_all_ranks_call_the_same(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capture: Any, mode: str, size: int) -> None:
    calls: list[list[Call]] = [[] for _ in range(size)]

    def connect(setup: ExecutorSetup, check: Any) -> Collectives:
        return Noted(setup.shard, calls[setup.shard.index])

    monkeypatch.setattr(executor, "connect_ranks", connect)
    sent: deque[Plan | Logits | LastTokens] = deque()
    options = {"tensor_parallel_size": size, "tensor_parallel_mode": mode}
    for index, kind in enumerate([DriverStandIn, *[FollowerStandIn] * (size - 1)]):
        shard = Shard(index, size, exact=mode == "exact", splits_embedding=True)
        runner = runner_of(tiny, capture, kind(shard, sent if index == 0 else deque(sent)), **options)
        runner._executor.warm_up()
        if index == 0:
            random_steps(runner, 7, 30, most=8, params=KINDS)
            continue
        ranks = runner._ranks
        assert isinstance(ranks, FollowerStandIn)
        while (plan := ranks.next_task()) is not None:
            assert isinstance(plan, StepPlan)
            runner.launch(plan).result()
        assert calls[index] == calls[0]
    assert {kind for kind, _, _ in calls[0]} == {"all-gather", "broadcast"}
    assert any(isinstance(message, Logits) for message in sent)


@pytest.mark.parametrize(
    ("capture", "exact"),
    slow_but([(EagerCapture, True)], [(capture, exact) for capture in (None, EagerCapture) for exact in (True, False)]),
)
def test_collectives_of_one_rank_change_no_token(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capture: Any, exact: bool) -> None:
    """What is gathered and summed lies where graphs find it."""
    expected = random_steps(runner_of(tiny), 8, 30, most=8, params=KINDS)
    calls: list[Call] = []
    monkeypatch.setattr(executor, "connect_ranks", lambda setup, check: Noted(Shard(exact=exact, splits_embedding=True), calls))
    assert random_steps(runner_of(tiny, capture), 8, 30, most=8, params=KINDS) == expected
    assert calls
