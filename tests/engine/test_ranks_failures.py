"""A rank of an engine that is killed or stopped, at any moment: every stream ends with an error that names it, and nothing is left."""

from __future__ import annotations

import os
import random
import signal

import anyio
import pytest
from oracle_engine import until
from slow_cases import slow_but

from aengine import AsyncEngine, EngineDeadError, RankDiedError, RankError, RankHungError, SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
SHAPES = [(2, 1), (1, 2), (2, 2)]
QUICK = (2, 1, signal.SIGKILL, 0)
CASES = [(*shape, number, seed) for shape in SHAPES for number in (signal.SIGKILL, signal.SIGSTOP) for seed in range(4)]


def engine_of(size: int, stages: int, step_timeout: float = 300.0) -> AsyncEngine:
    options = {"dtype": "float32", "max_model_len": 512, "step_timeout": step_timeout}
    return AsyncEngine("demo", tensor_parallel_size=size, pipeline_parallel_size=stages, **options)


def other_ranks() -> dict[int, int]:
    """The processes that this one has started, by the number of their rank."""
    found = {}
    for pid in os.listdir("/proc"):
        if pid.isdecimal():
            try:
                with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as command:
                    parent = int(stat.read().rpartition(")")[2].split()[1])
                    ranks = [word.partition("=")[2] for word in command.read().split("\0") if word.startswith("--rank=")]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == os.getpid() and ranks:
                found[int(ranks[0])] = int(pid)
    return found


async def read_for_ever(engine: AsyncEngine, i: int, counted: list[int]) -> None:
    while True:
        async for _ in engine.stream([i + 1] * (1 + 3 * i), SamplingParams(max_tokens=400, ignore_eos=True, seed=i)):
            counted.append(i)


@pytest.mark.parametrize(("size", "stages", "number", "seed"), slow_but([QUICK], CASES))
async def test_a_rank_is_lost_while_steps_run(size: int, stages: int, number: signal.Signals, seed: int) -> None:
    choose = random.Random(seed)
    async with engine_of(size, stages, 300.0 if number == signal.SIGKILL else 4.0) as engine:
        ranks = other_ranks()
        assert sorted(ranks) == list(range(1, size * stages))
        rank, at = choose.choice(sorted(ranks)), choose.randrange(1, 400)
        tokens: list[int] = []
        errors: list[EngineDeadError] = []

        async def read(i: int) -> None:
            with pytest.raises(EngineDeadError) as caught:
                await read_for_ever(engine, i, tokens)
            errors.append(caught.value)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for i in range(6):
                    group.start_soon(read, i)
                await until(lambda: len(tokens) >= at)
                os.kill(ranks[rank], number)
        causes = {error.__cause__ for error in errors}
        assert len(errors) == 6
        assert len(causes) == 1
        (cause,) = causes
        assert isinstance(cause, RankError)
        assert isinstance(cause, RankDiedError if number == signal.SIGKILL else RankHungError)
        assert (cause.rank, cause.pid) == (rank, ranks[rank])
        assert not engine.healthy
    assert not other_ranks()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages"), SHAPES)
async def test_a_rank_is_killed_while_nothing_runs(size: int, stages: int) -> None:
    async with engine_of(size, stages) as engine:
        ranks = other_ranks()
        os.kill(ranks[1], signal.SIGKILL)
        await until(lambda: not engine.healthy)
        with pytest.raises(EngineDeadError) as caught:
            engine.stream("Hello")
        cause = caught.value.__cause__
        assert isinstance(cause, RankDiedError)
        assert cause.rank == 1
    assert not other_ranks()
