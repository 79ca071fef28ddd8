"""Ranks of an engine that are killed or stopped: every stream ends with an error that names the rank, and nothing is left."""

from __future__ import annotations

import functools
import gc
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from hang_guard import HANG_SECONDS, let_others_run
from slow_cases import slow_but

from aengine import AsyncEngine, EngineDeadError, EngineStateError, InsufficientMemoryError, ModelLoadError, SamplingParams
from aengine.api.errors import AEngineError, RankDiedError, RankError, RankHungError
from aengine.parallel.driver import start_ranks

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
STEP_TIMEOUT = 5.0  # of which a fifth is left to say who hangs
LONG = SamplingParams(max_tokens=2000, ignore_eos=True, seed=1)  # none of them ends before what ends all


def engine_of(size: int = 2, **options: Any) -> AsyncEngine:
    return AsyncEngine(
        "demo", **{"tensor_parallel_size": size, "dtype": "float32", "max_model_len": 2048, "step_timeout": STEP_TIMEOUT, **options}
    )


def children() -> set[int]:
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


def sockets() -> set[str]:
    """What this process has open of sockets, pipes and memory: not the files of libraries."""
    links = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.add(os.readlink(fd))
    return {link for link in links if link.startswith(("socket:", "pipe:", "/memfd:", "/dev/shm", "anon_inode:[pidfd]"))}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    before, shared, cores = sockets(), os.listdir("/dev/shm"), os.sched_getaffinity(0)
    yield
    assert children() == set()
    assert (os.listdir("/dev/shm"), os.sched_getaffinity(0)) == (shared, cores)
    until = time.monotonic() + HANG_SECONDS
    while left := sockets() - before:  # a thread that has done its work may still hold some
        assert time.monotonic() < until, left
        gc.collect()


async def pids(num_ranks: int) -> dict[int, int]:
    """Of the ranks that run, by rank, as soon as they are all there."""
    with anyio.fail_after(HANG_SECONDS):
        while True:
            found = {}
            for pid in children():
                found.update({int(word.removeprefix("--rank=")): pid for word in command_of(pid) if word.startswith("--rank=")})
            if len(found) == num_ranks - 1:
                return found
            await let_others_run()


async def works() -> None:
    """The program goes on: another engine serves."""
    async with engine_of(1) as engine:
        assert len((await engine.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))).token_ids) == 3


def check_names(error: BaseException | None, rank: int, pid: int, number: signal.Signals) -> None:
    kind, what = (RankDiedError, "was killed by SIGKILL") if number is signal.SIGKILL else (RankHungError, "did not answer")
    assert type(error) is kind, error
    assert isinstance(error, RankError)
    assert (error.rank, error.pid) == (rank, pid), error
    assert f"rank {rank} (pid {pid}) {what}" in str(error)


QUICK = [(2, 1, 0, signal.SIGKILL, 5), (2, 1, 1, signal.SIGSTOP, 0)]
STAGES = [(2, 2, 2, signal.SIGKILL, 30), (2, 2, 3, signal.SIGKILL, 0), (1, 3, 4, signal.SIGKILL, 3), (1, 3, 5, signal.SIGSTOP, 10)]
CASES = [
    (
        choose.choice((2, 2, 4)),
        1,
        seed,
        choose.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)),
        choose.choice((0, 1, 3, 10, 30, 90)),
    )
    for seed in range(2, 9)
    for choose in [random.Random(seed)]
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("size", "stages", "seed", "number", "tokens"), slow_but(QUICK, [*QUICK, *STAGES, *CASES]))
async def test_a_rank_that_is_killed_or_stopped(size: int, stages: int, seed: int, number: signal.Signals, tokens: int) -> None:
    """After so many tokens; 0: while the engine is idle."""
    timeout = STEP_TIMEOUT if number is signal.SIGSTOP else 60
    engine = engine_of(size, pipeline_parallel_size=stages, step_timeout=timeout)
    with anyio.fail_after(HANG_SECONDS):
        try:
            await engine.start()
            rank, pid = random.Random(seed).choice(sorted((await pids(size * stages)).items()))
            errors: list[BaseException] = []
            num_read, struck = 0, 0.0

            def strike() -> None:
                nonlocal struck
                struck = time.monotonic()
                os.kill(pid, number)

            async def reads(seed: int) -> None:
                nonlocal num_read
                try:
                    async for _ in engine.stream([1, 2, seed], LONG):
                        num_read += 1
                        if num_read == tokens:
                            strike()
                except EngineDeadError as error:
                    errors.append(error)

            if not tokens:
                strike()
            if tokens or number is signal.SIGSTOP:
                async with anyio.create_task_group() as readers:
                    for i in range(4):
                        readers.start_soon(reads, i)
            with pytest.raises(EngineDeadError) as caught:
                await engine.wait_stopped()
            print(f"{number.name} of rank {rank} of {size * stages} after {tokens} tokens: all ended in {time.monotonic() - struck:.3f} s")
            assert len(errors) == (4 if tokens or number is signal.SIGSTOP else 0)
            for error in (*errors, caught.value):
                check_names(error.__cause__, rank, pid, number)
            assert not engine.healthy
            with pytest.raises(EngineDeadError):
                await engine.generate([1], LONG)
        finally:
            await engine.aclose()
        if not seed:
            await works()


@pytest.mark.parametrize("seed", slow_but([], range(3)))
async def test_a_rank_that_is_killed_while_it_loads(seed: int) -> None:
    choose = random.Random(seed)
    engine = engine_of(choose.choice((2, 4)))
    killed: list[tuple[int, int]] = []

    async def kill() -> None:
        found = await pids(engine.config.tensor_parallel_size)
        killed.append(choose.choice(sorted(found.items())))
        await anyio.sleep(choose.random() * 3)  # anywhere within loading, or after it
        os.kill(killed[0][1], signal.SIGKILL)

    with anyio.fail_after(HANG_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(kill)
            try:
                await engine.start()
                await engine.wait_stopped()
            except RankDiedError as error:
                check_names(error, *killed[0], signal.SIGKILL)
            except EngineDeadError as error:
                check_names(error.__cause__, *killed[0], signal.SIGKILL)
            finally:
                await engine.aclose()
    assert not engine.healthy


@pytest.mark.parametrize(
    ("given_up", "delay"), slow_but([], [(how, delay) for delay in (0.0, 0.4, 1.2) for how in ("closed", "cancelled")])
)
async def test_loading_can_be_given_up(given_up: str, delay: float) -> None:
    """By `aclose`, or by who called `start`."""
    engine = engine_of()
    with anyio.fail_after(HANG_SECONDS):
        async with anyio.create_task_group() as group:

            async def starts() -> None:
                with suppress(EngineStateError):  # it is closed
                    await engine.start()

            group.start_soon(starts)
            await pids(2)
            await anyio.sleep(delay)
            if given_up == "cancelled":
                group.cancel_scope.cancel()
            else:
                await engine.aclose()
        await engine.aclose()
    assert children() == set()


async def fails_with(engine: AsyncEngine) -> BaseException | None:
    """What starting or serving ends with."""
    with anyio.fail_after(HANG_SECONDS):
        try:
            try:
                await engine.start()
            except AEngineError as error:
                return error
            with pytest.raises(EngineDeadError) as caught:
                await engine.generate([1], LONG)
            return caught.value.__cause__
        finally:
            await engine.aclose()


CANNOT_LOAD = {
    "digest": (ModelLoadError, r"^rank 1 \(pid \d+\) cannot be used: its model is 0123456789abcdef, that of rank 0 is \w+$"),
    "level": (ModelLoadError, r"^rank 1 \(pid \d+\) cannot be used: its level of the CPU kernels is portable, that of rank 0 is \w+$"),
    "memory": (InsufficientMemoryError, r"^rank 1: "),
}
FAILS = {
    "step": (RankDiedError, r"^rank 1 \(pid \d+\) failed: RuntimeError: something broke; its last log lines:\n"),
    "slow": (RankHungError, r"^rank 1 \(pid \d+\) did not answer the driver within step_timeout; its last log lines:\n"),
}


@pytest.mark.parametrize("what", slow_but([], [*CANNOT_LOAD, *FAILS]))
async def test_a_rank_that_fails_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, str(Path(__file__).with_name("bad_rank.py")), what)
    monkeypatch.setattr("aengine.engine.loading.start_ranks", functools.partial(start_ranks, command=command))
    kind, message = {**CANNOT_LOAD, **FAILS}[what]
    error = await fails_with(engine_of())
    assert type(error) is kind, repr(error)
    assert re.match(message, str(error)), str(error)


@pytest.mark.slow
async def test_two_engines_with_ranks() -> None:
    """The death of a rank of one does not concern the other."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    async with engine_of() as engine:
        expected = (await engine.generate([1, 2], params)).token_ids
        first = set((await pids(2)).values())
        async with engine_of() as other:
            (pid,) = children() - first
            async with anyio.create_task_group() as group:
                group.start_soon(other.generate, [1, 2], params)
                await engine.generate([1, 2], params)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await other.wait_stopped()
            assert (await engine.generate([1, 2], params)).token_ids == expected
