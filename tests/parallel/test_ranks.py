"""Ranks that start, take steps and end, with `stand_in.py` as the others."""

from __future__ import annotations

import mmap
import os
import queue
import sys
from pathlib import Path

import numpy as np
import pytest
from stand_in import SLOT

from aengine.config import EngineConfig
from aengine.errors import ModelLoadError, RankDiedError
from aengine.parallel.driver import DriverRanks, start_ranks
from aengine.scheduler.plan import NO_INTS, StepPlan

STAND_IN = str(Path(__file__).with_name("stand_in.py"))


class Failures:
    """What was reported."""

    def __init__(self) -> None:
        self.queue: queue.Queue[BaseException] = queue.Queue()

    def next(self) -> BaseException:
        return self.queue.get(timeout=60)


def start(failures: Failures, what: str = "", ranks: int = 2, **options: object) -> DriverRanks:
    config = EngineConfig(model="none", tensor_parallel_size=ranks, **options)
    command = (sys.executable, STAND_IN, what)
    return start_ranks(config, Path("/nowhere"), failures.queue.put, exchange_bytes=4096, command=command)


def plan(step: int, rows: list[int]) -> StepPlan:
    ones = np.ones(len(rows), np.int32)
    return StepPlan(step, np.array(rows, np.int32), len(rows), ones, ones, ones, NO_INTS, (), *[NO_INTS] * 4)


@pytest.fixture
def failures() -> Failures:
    return Failures()


def test_steps_reach_all_ranks(failures: Failures) -> None:
    ranks = start(failures, ranks=3)
    try:
        ranks.same({"dtype": "float32"})
        assert ranks.agree(1000, 128) == (98, 64)
        assert ranks.exchange_fd is not None
        with mmap.mmap(ranks.exchange_fd, 0) as memory:
            slots = np.frombuffer(memory, np.int32)
            for step in range(3):
                ranks.send_plan(plan(step, [step, 7]))
                ranks.send_logits(np.array([step], np.int32))
                ranks.send_last_tokens(np.array([5, step], np.int32))
            others = slots[SLOT : 3 * SLOT].reshape(2, SLOT)
            while not (others[:, 1] == 3).all():
                os.sched_yield()
            assert others[:, 2:].tolist() == [[11, 7]] * 2
            pids = others[:, 0].tolist()
            del slots, others
    finally:
        ranks.close()
    ranks.check()
    assert failures.queue.empty()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_ends_is_reported(failures: Failures) -> None:
    ranks = start(failures, "exit")
    try:
        ranks.same({"dtype": "float32"})
        ranks.agree(1000, 128)
        ranks.send_plan(plan(0, [1]))
        ranks.send_last_tokens(NO_INTS)
        error = failures.next()
        assert isinstance(error, RankDiedError)
        assert (error.rank, error.log_lines[-1]) == (1, "it had enough")
        assert "ended with exit code 3" in str(error)
        with pytest.raises(RankDiedError) as caught:
            ranks.check()
        assert caught.value is error
    finally:
        ranks.close()


def test_a_rank_that_cannot_load_is_named(failures: Failures) -> None:
    ranks = start(failures, "refuse")
    try:
        with pytest.raises(ModelLoadError, match="rank 1: there is no such model"):
            ranks.agree(1000, 128)
    finally:
        ranks.close()
