"""A `ModelRunner` whose other ranks are threads of this process, over the channels and messages that processes have."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import queue
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from hang_guard import HANG_SECONDS

from aengine.api.config import EngineConfig
from aengine.parallel.channel import Channel
from aengine.parallel.driver import SHARED_BYTES, DriverRanks
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.join import listen
from aengine.parallel.launch import Follower
from aengine.parallel.messages import ApplyChange, Welcome
from aengine.parallel.shard import Shard
from aengine.runner.follower import run_follower
from aengine.runner.runner import ModelRunner
from aengine.scheduler.plan import StepPlan

SECONDS = HANG_SECONDS
"""What is waited for comes within this time, on any machine."""


@dataclasses.dataclass
class State:
    """What ranks have in common after a step."""

    page_table: np.ndarray
    last_tokens: np.ndarray

    @classmethod
    def of(cls, runner: ModelRunner) -> State:
        executor: Any = runner._executor
        last = executor._last_tokens.numpy() if hasattr(executor, "_last_tokens") else executor._model.last_tokens
        return cls(runner._page_table.copy(), last.copy())


class ThreadRanks(FollowerRanks):
    """Notes the state in which its rank waits for a plan."""

    runner: ModelRunner
    states: queue.SimpleQueue[State]

    def next_task(self) -> StepPlan | ApplyChange | None:
        self.states.put(State.of(self.runner))
        return super().next_task()


class ThreadRunner(ModelRunner):
    def __init__(self, config: EngineConfig, model_dir: pathlib.Path, *, ranks: Any) -> None:
        super().__init__(config, model_dir, ranks=ranks)
        if isinstance(ranks, ThreadRanks):
            ranks.runner = self


class RankedRunner:
    """The runner of rank 0, and what the others have done."""

    def __init__(self, runner: ModelRunner, others: list[queue.SimpleQueue[State]], followers: list[Future[None]]) -> None:
        self.runner = runner
        self._others = others
        self._followers = followers

    def others(self) -> list[State]:
        """Of each other rank, once for each step, in their order, after one from before the first step."""
        found = []
        for states, follower in zip(self._others, self._followers, strict=True):
            while True:
                try:
                    found.append(states.get(timeout=1.0))
                    break
                except queue.Empty:
                    if follower.done():
                        follower.result()
        return found


@contextmanager
def runner_on_ranks(config: EngineConfig, model_dir: pathlib.Path) -> Iterator[RankedRunner]:
    """Stages are not possible: their ranks are not all in the same step."""
    size = config.tensor_parallel_size
    with ExitStack() as stack:
        store = stack.enter_context(listen("127.0.0.1:0"))
        task = Welcome(json.dumps(dataclasses.asdict(config)), str(model_dir), size, *store.getsockname())
        memory = os.memfd_create("exchange")
        os.ftruncate(memory, SHARED_BYTES)
        pairs = [socket.socketpair() for _ in range(1, size)]
        followers = [Follower(rank, Channel(pair[0], f"rank {rank}"), None) for rank, pair in enumerate(pairs, 1)]
        states: list[queue.SimpleQueue[State]] = [queue.SimpleQueue() for _ in pairs]

        def follow(rank: int) -> None:
            ranks = ThreadRanks(Channel(pairs[rank - 1][1], "the driver"), rank, exchange_fd=memory)
            ranks.states = states[rank - 1]
            try:
                run_follower(ranks)
            except BaseException:
                ranks._ended.set()  # else the process ends
                ranks._channel.close()
                raise

        stack.enter_context(patch("aengine.runner.follower.ModelRunner", ThreadRunner))
        pool = stack.enter_context(ThreadPoolExecutor(size))
        futures = [pool.submit(follow, rank) for rank in range(1, size)]
        for follower in followers:
            follower.channel.send(task)
        exact = config.tensor_parallel_mode == "exact"
        ranks = DriverRanks(config, Shard(0, size, 0, 1, exact), followers, lambda error: None, lambda: None, memory, store)
        runner = None
        try:
            runner = ModelRunner(config, model_dir, ranks=ranks)
            yield RankedRunner(runner, states, futures)
        finally:
            if runner is None:
                ranks.close()
            else:
                runner.close()
            for future in futures:
                future.result(SECONDS)
