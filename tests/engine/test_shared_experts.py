"""Engines that share the experts of a model: each gets what an engine with all experts gets, whatever the others do."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from hang_guard import HANG_SECONDS
from sharing_experts import CASES, CHILD, REQUESTS, config_of, environment, saved, shared_configs, sharing
from slow_cases import slow_but

from aengine import AsyncEngine, EngineDeadError, InvalidRequestError, ModelLoadError, SamplingParams
from aengine.api.errors import ConfigError, RankDiedError, RankHungError

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
LONG = SamplingParams(max_tokens=90, ignore_eos=True, temperature=1.0, seed=1)
SPECULATIVE: list[Callable[[str], dict[str, Any]]] = [
    lambda path: {},
    lambda path: {"speculative": "ngram"},
    lambda path: {"speculative": "draft", "speculative_model": path, "max_drafts": 3},  # which has all experts itself
]
Tokens = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in CASES}


def path_of(models: dict[str, Path], name: str) -> Path:
    path = models[name]
    return path if (path / "secret").exists() else saved(name, path)


async def tokens_of(engine: AsyncEngine, index: int) -> Tokens:
    """What a request of `REQUESTS` gets, by sequence."""
    prompt, params = REQUESTS[index]
    completion = await engine.generate(prompt, params)
    return [each.token_ids for each in (completion, *completion.others)]


async def expected_of(path: Path, **options: Any) -> list[Tokens]:
    async with AsyncEngine(config_of(path, **options)) as engine:
        return [await tokens_of(engine, index) for index in range(len(REQUESTS))]


async def together(engines: list[AsyncEngine], orders: list[list[int]]) -> list[dict[int, Tokens]]:
    """What requests get that each engine begins at the same time, by engine."""
    found: list[dict[int, Tokens]] = [{} for _ in engines]

    async def ask(number: int, index: int) -> None:
        found[number][index] = await tokens_of(engines[number], index)

    async with anyio.create_task_group() as tasks:
        for number, order in enumerate(orders):
            for index in order:
                tasks.start_soon(ask, number, index)
    return found


QUICK = [("deepseek-v3", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), slow_but(QUICK, [*QUICK, ("mixtral", 3), ("gpt-oss", 2), ("qwen2-moe", 4)]))
async def test_each_gets_what_one_engine_gets(models: dict[str, Path], name: str, size: int) -> None:
    """One is busy and the others are not; all are, with different requests."""
    path = path_of(models, name)
    expected = await expected_of(path)
    assert len({token for tokens in expected for sequence in tokens for token in sequence}) > 40, "the model says too little"
    with anyio.fail_after(HANG_SECONDS):
        backend = "auto" if size > 2 else "torch_native"  # which is our own kernels for attention
        async with sharing(path, size, attention_backend=backend) as engines:
            busy = random.Random(0).randrange(size)
            orders = [list(range(len(REQUESTS))) if number == busy else [] for number in range(size)]
            assert (await together(engines, orders))[busy] == dict(enumerate(expected))
            idle = [engine.stats() for number, engine in enumerate(engines) if number != busy]
            assert all(stats.steps == 0 for stats in idle), "a step for others is none of its own"
            orders = [list(range(number % 3, len(REQUESTS), 1 + number % 2)) for number in range(size)]
            for found, order in zip(await together(engines, orders), orders, strict=True):
                assert found == {index: expected[index] for index in order}


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow_but([0], range(4)))
async def test_random_arrivals(models: dict[str, Path], seed: int) -> None:
    """Some are cancelled, engines pause and sleep, and all others get what they should."""
    path = path_of(models, "qwen3-moe")
    expected = await expected_of(path)
    choose = random.Random(seed)
    size = choose.choice((2, 3))
    with anyio.fail_after(HANG_SECONDS):
        async with sharing(path, size, **choose.choice(SPECULATIVE)(str(path))) as engines:

            async def asks(engine: AsyncEngine, seed: int) -> None:
                choose = random.Random(seed)
                for _ in range(3):
                    for _ in range(choose.choice((0, 1, 50))):
                        await anyio.lowlevel.checkpoint()
                    index = choose.randrange(len(REQUESTS))
                    if choose.random() < 0.3:
                        async with engine.stream([1, 2, seed % 100], LONG) as stream:
                            for _ in range(choose.randint(0, 5)):
                                await anext(stream)
                    assert await tokens_of(engine, index) == expected[index]

            async def disturbs(engine: AsyncEngine, seed: int) -> None:
                choose = random.Random(seed)
                for _ in range(3):
                    await engine.pause()
                    await anyio.sleep(choose.random() / 50)
                    await engine.unpause()
                    await engine.sleep(level=1)
                    await anyio.sleep(choose.random() / 50)
                    await engine.wake()

            async with anyio.create_task_group() as tasks:
                for engine in engines:
                    for _ in range(3):
                        tasks.start_soon(asks, engine, choose.getrandbits(32))
                tasks.start_soon(disturbs, choose.choice(engines), choose.getrandbits(32))


@pytest.mark.slow
async def test_what_the_others_need_is_kept(models: dict[str, Path]) -> None:
    """Weights stay in memory while an engine sleeps, and are not replaced; a sleeping one computes for others."""
    path = path_of(models, "qwen3-moe")
    with anyio.fail_after(HANG_SECONDS):
        async with sharing(path, 2) as (engine, other):
            with pytest.raises(InvalidRequestError, match="level: 2 is not possible with expert_parallel_size > 1"):
                await engine.sleep(level=2)
            with pytest.raises(ModelLoadError, match="weights are not replaced with expert_parallel_size > 1"):
                await engine.update_weights(str(path))
            await engine.sleep(level=1)
            assert len((await other.generate([1, 2], LONG)).token_ids) == 90
            await engine.wake()
            assert len((await engine.generate([1, 2], LONG)).token_ids) == 90


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "cpu"}, "expert_parallel_size: 2 is not possible with attention_backend 'cpu'; choose 1"),
        ({"model": "demo"}, "expert_parallel_size: .* has no experts; choose 1"),
    ],
)
async def test_what_is_not_possible_is_refused(models: dict[str, Path], options: dict[str, Any], message: str) -> None:
    path = path_of(models, "qwen3-moe")
    errors: list[Exception] = []

    async def starts(engine: AsyncEngine) -> None:
        try:
            await engine.start()
        except (ConfigError, ModelLoadError, RankDiedError) as error:
            errors.append(error)
        finally:
            await engine.aclose()

    with anyio.fail_after(HANG_SECONDS):
        async with anyio.create_task_group() as tasks:
            for each in shared_configs(path, 2, **options):
                tasks.start_soon(starts, AsyncEngine(each))
    assert len(errors) == 2
    refused = [error for error in errors if isinstance(error, ConfigError)]
    assert refused, errors
    for error in refused:
        with pytest.raises(ConfigError, match=message):
            raise error


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rank", [0, 1])
async def test_when_one_refuses_the_other_waits_no_longer(models: dict[str, Path], rank: int) -> None:
    configs = shared_configs(path_of(models, "qwen3-moe"), 2)
    configs[rank] = dataclasses.replace(configs[rank], attention_backend="cpu")
    errors: dict[int, Exception] = {}

    async def starts(index: int) -> None:
        engine = AsyncEngine(configs[index])
        try:
            await engine.start()
        except (ConfigError, RankDiedError) as error:
            errors[index] = error
        finally:
            await engine.aclose()

    with anyio.fail_after(HANG_SECONDS):
        async with anyio.create_task_group() as tasks:
            for index in (0, 1):
                tasks.start_soon(starts, index)
    assert isinstance(errors[rank], ConfigError)
    assert isinstance(errors[1 - rank], RankDiedError)


@pytest.mark.slow
async def test_of_three_one_is_killed(models: dict[str, Path]) -> None:
    """Those that are left end together, and know which one it was."""
    rank = 2
    configs = shared_configs(path_of(models, "mixtral"), 3)
    engines = [AsyncEngine(config) for index, config in enumerate(configs) if index != rank]
    errors: list[EngineDeadError] = []

    async def reads(engine: AsyncEngine, child: anyio.abc.Process) -> None:
        try:
            async for _ in engine.stream([1, 2], LONG):
                if engine.stats().completion_tokens > 5:
                    child.kill()
        except EngineDeadError as error:
            errors.append(error)

    with anyio.fail_after(HANG_SECONDS):
        command = [sys.executable, "-c", CHILD, json.dumps(dataclasses.asdict(configs[rank]))]
        async with await anyio.open_process(command, env=environment(), stderr=sys.stderr) as child:
            async with anyio.create_task_group() as tasks:
                for engine in engines:
                    tasks.start_soon(engine.start)
            await reads(engines[1], child)
            for engine in engines:
                with pytest.raises(EngineDeadError) as caught:
                    await engine.wait_stopped()
                errors.append(caught.value)
                await engine.aclose()
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error.__cause__, RankDiedError)
        assert f"rank {rank} (host " in str(error.__cause__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number", "tokens"),
    slow_but([(1, signal.SIGKILL, 7)], [(1, signal.SIGKILL, 7), (0, signal.SIGKILL, 3), (1, signal.SIGKILL, 0), (1, signal.SIGSTOP, 5)]),
)
async def test_when_one_is_gone_all_streams_end(models: dict[str, Path], rank: int, number: signal.Signals, tokens: int) -> None:
    """After so many tokens; 0: while all are idle. The one that is killed or stopped is another process."""
    path = path_of(models, "qwen3-moe")
    timeout = 2.0 if number is signal.SIGSTOP else 60.0
    configs = shared_configs(path, 2, step_timeout=timeout)
    engine = AsyncEngine(configs[1 - rank])
    with anyio.fail_after(HANG_SECONDS):
        command = [sys.executable, "-c", CHILD, json.dumps(dataclasses.asdict(configs[rank]))]
        async with await anyio.open_process(command, env=environment(), stderr=sys.stderr) as child:
            try:
                await engine.start()
                errors: list[BaseException] = []
                num_read, struck = 0, 0.0

                async def reads(seed: int) -> None:
                    nonlocal num_read, struck
                    try:
                        async for _ in engine.stream([1, 2, seed], LONG):
                            num_read += 1
                            if num_read == tokens:
                                struck = time.monotonic()
                                child.send_signal(number)
                    except EngineDeadError as error:
                        errors.append(error)

                if tokens:
                    async with anyio.create_task_group() as readers:
                        for seed in range(4):
                            readers.start_soon(reads, seed)
                else:
                    struck = time.monotonic()
                    child.send_signal(number)
                with pytest.raises(EngineDeadError) as caught:
                    await engine.wait_stopped()
                print(f"{number.name} of rank {rank} after {tokens} tokens: all ended in {time.monotonic() - struck:.3f} s")
                assert len(errors) == (4 if tokens else 0)
                kind = RankDiedError if number is signal.SIGKILL else RankHungError
                for error in (*errors, caught.value):
                    assert isinstance(error.__cause__, kind), error.__cause__
                    assert error.__cause__.rank == rank
                assert not engine.healthy
            finally:
                await engine.aclose()
                with suppress(ProcessLookupError):
                    child.kill()
