"""Drives ranks that `stand_in.py` runs."""

from __future__ import annotations

import mmap
import os
import queue
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hang_guard import HANG_SECONDS
from numpy.typing import NDArray
from stand_in import SLOT

from aengine.api.config import EngineConfig
from aengine.parallel.driver import DriverRanks, start_ranks
from aengine.parallel.messages import Sizes
from aengine.scheduler.plan import NO_INTS, StepPlan

STAND_IN = Path(__file__).with_name("stand_in.py")
SECONDS = HANG_SECONDS
"""What is waited for comes within this time, on any machine."""


class Driver:
    """Rank 0, and what it sees of the others."""

    def __init__(self, what: str, num_ranks: int, **options: Any) -> None:
        self.reported: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        config = EngineConfig(model="none", tensor_parallel_size=num_ranks, **options)
        command = (sys.executable, str(STAND_IN), what)
        self.ranks: DriverRanks = start_ranks(config, Path("/nowhere"), self.reported.put, exchange_bytes=4096, command=command)
        self.steps = 0
        self._memory: NDArray[np.int32] = np.zeros(0, np.int32)

    def load(self) -> None:
        self.ranks.same({"dtype": "float32"})
        self.ranks.agree(Sizes(1000, 128, 5, "part 0"))
        if self.ranks.exchange_fd is not None:
            self._memory = np.frombuffer(mmap.mmap(self.ranks.exchange_fd, 0), np.int32)

    def of_rank(self, rank: int) -> NDArray[np.int32]:
        """What a rank of this host wrote."""
        return self._memory[rank * SLOT :][:SLOT]

    def pid(self, rank: int) -> int:
        (follower,) = (each for each in self.ranks._followers if each.rank == rank)
        assert follower.pid is not None
        return follower.pid

    def step(self, rows: Sequence[int] = (0, 1), tokens: Sequence[int] = (5, 6), within: Callable[[], object] = lambda: None) -> None:
        ones = np.ones(len(rows), np.int32)
        plan = StepPlan(self.steps, np.array(rows, np.int32), len(rows), ones, ones, ones, NO_INTS, (), *[NO_INTS] * 4)
        self.ranks.send_plan(plan)
        within()
        self.ranks.send_logits(np.array(rows[:1], np.int32))
        self.ranks.send_last_tokens(np.array(tokens, np.int32))
        self.steps += 1

    def step_for_ever(self, rows: Sequence[int], at: int = -1, kill: int = 0) -> None:
        """Before step `at`, the process `kill` is killed."""
        while True:
            if self.steps == at:
                os.kill(kill, signal.SIGKILL)
            self.step(rows)

    def wait_for_steps(self, ranks: Sequence[int]) -> None:
        while any(self.of_rank(rank)[1] < self.steps for rank in ranks):
            self.ranks.check()

    def failure(self) -> BaseException:
        return self.reported.get(timeout=SECONDS)


@contextmanager
def driving(what: str = "", num_ranks: int = 2, *, load: bool = True, **options: Any) -> Iterator[Driver]:
    driver = Driver(what, num_ranks, **options)
    try:
        if load:
            driver.load()
        yield driver
    finally:
        driver.ranks.close()
        driver._memory = driver._memory.copy()  # which closes the file


def ends(pid: int) -> Callable[[], None]:
    """To be called later: fails unless that process, of anyone, ends."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda: None

    def wait() -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        ended = poller.poll(SECONDS * 1000)
        os.close(fd)
        assert ended

    return wait
