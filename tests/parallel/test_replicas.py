"""Engines that share experts, as threads that are connected as they are on several hosts: what they compare, tell and notice."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from meeting import SECONDS, Meeting

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError, ModelLoadError, RankDiedError, RankHungError
from aengine.parallel.expert_replicas import Replicas, join_replicas
from aengine.parallel.join import free_port

T = TypeVar("T")
FACTS = {"model": "m", "dtype": "float32"}


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


class Joined:
    def __init__(self, pool: ThreadPoolExecutor, replicas: list[Replicas], failures: list[queue.SimpleQueue[BaseException]]) -> None:
        self.replicas = replicas
        self.failures = failures  # what each reports
        self._pool = pool

    def all(self, work: Callable[[int, Replicas], T]) -> list[T]:
        futures = [self._pool.submit(work, index, each) for index, each in enumerate(self.replicas)]
        return [future.result(SECONDS) for future in futures]


@contextmanager
def joined(size: int, path: Path, **options: Any) -> Iterator[Joined]:
    secret = path / "secret"
    secret.write_text("a secret of replicas")
    shared = {"model": "none", "rank_address": free_address(), "rank_secret_file": str(secret), "expert_parallel_size": size, **options}
    failures = [queue.SimpleQueue[BaseException]() for _ in range(size)]
    with ThreadPoolExecutor(size) as pool, ExitStack() as stack:
        futures: list[Future[Replicas]] = []

        def others_join() -> None:
            """Nobody waits for one that has failed."""
            if any(future.done() and future.exception() is not None for future in futures):
                raise RuntimeError("another one has failed")

        configs = [EngineConfig(**shared, expert_parallel_rank=rank) for rank in range(size)]
        futures += [pool.submit(join_replicas, config, failures[rank].put, others_join) for rank, config in enumerate(configs)]
        replicas = [future.result(SECONDS) for future in futures]
        for each in replicas:
            stack.callback(each.close)
        yield Joined(pool, replicas, failures)


def test_they_agree(tmp_path: Path) -> None:
    with joined(3, tmp_path) as those:
        those.all(lambda index, each: each.same({**FACTS}))
        assert those.all(lambda index, each: each.agree(100 - index)) == [98, 98, 98]
        assert [each.shard.rank for each in those.replicas] == [0, 1, 2]
        assert len({each.store for each in those.replicas}) == 1


def test_what_differs_is_refused_on_all(tmp_path: Path) -> None:
    with joined(3, tmp_path) as those:

        def compares(index: int, each: Replicas) -> str:
            try:
                each.same({**FACTS, "dtype": "bfloat16" if index == 2 else "float32"})
                each.agree(1)
            except ModelLoadError as error:
                return str(error)
            return ""

        for text in those.all(compares):
            assert "rank 2 (host " in text
            assert "cannot be used: its dtype is bfloat16, that of rank 0 is float32" in text


@pytest.mark.parametrize("wants", range(3))
def test_all_others_are_woken(tmp_path: Path, wants: int) -> None:
    """Also those that have no connection to the one that has a step."""
    with joined(3, tmp_path) as those:
        meeting, woken = Meeting(3), [threading.Event() for _ in range(3)]
        computed: list[int] = []

        def work(index: int, each: Replicas) -> bool:
            each.on_wanted = woken[index].set
            each.connect(lambda count: meeting.exchange(index, count), lambda: computed.append(index))
            each.agree(1)
            if index == wants:
                each.begin_step(5)
            else:
                assert woken[index].wait(SECONDS)
                assert each.join_step()
            assert each.join_step(), "a step follows, in which nobody has tokens"
            return each.join_step()

        assert those.all(work) == [False] * 3
        assert sorted(computed) == sorted({0, 1, 2} - {wants})


@pytest.mark.parametrize("gone", range(3))
def test_when_one_is_gone_none_goes_on(tmp_path: Path, gone: int) -> None:
    """Those that have no connection to it hear what happened from rank 0."""
    with joined(3, tmp_path) as those:
        those.replicas[gone].close()
        for index, each in enumerate(those.replicas):
            if index == gone:
                continue
            error = those.failures[index].get(timeout=SECONDS)
            assert isinstance(error, RankDiedError)
            assert f"rank {gone} (host " in str(error)
            assert "closed the connection" in str(error)
            with pytest.raises(RankDiedError):
                each.check()
            with pytest.raises(RankDiedError):
                each.agree(1)
        assert those.failures[gone].empty()


def test_who_does_not_answer_has_a_name(tmp_path: Path) -> None:
    with joined(2, tmp_path) as those:
        error = those.replicas[1].hung(0)
        assert isinstance(error, RankHungError)
        assert "rank 0 (host 127.0.0.1) did not answer rank 1 within step_timeout" in str(error)


def test_joining_ends(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of replicas")

    class EndedError(Exception):
        pass

    def check() -> None:
        raise EndedError

    for rank in (0, 1):
        options: dict[str, Any] = {"expert_parallel_size": 2, "expert_parallel_rank": rank, "rank_address": free_address()}
        with pytest.raises(EndedError):
            join_replicas(EngineConfig(model="none", rank_secret_file=str(secret), **options), lambda error: None, check)


def test_without_an_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank_address: is missing: 2 engines share experts"):
        join_replicas(EngineConfig(model="none", expert_parallel_size=2), lambda error: None, lambda: None)
