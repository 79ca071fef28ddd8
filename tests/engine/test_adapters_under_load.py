"""Adapters of the demo model, loaded and unloaded at random while many use them."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hang_guard import HANG_SECONDS
from oracle_engine import DEMO_DIR, idle
from slow_cases import slow_but
from tiny_adapters import write_adapter

from aengine import AsyncEngine, EngineDeadError, InvalidRequestError, SamplingParams
from aengine.api.errors import AdapterError, RankDiedError
from aengine.kernels.cpu.ops import PackedCpuAdapter
from aengine.parallel.launch import Follower

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "page_size": 4}
PROMPTS = [list(range(1, 4 + 5 * i)) for i in range(3)]
NAMES = ("a", "b", "c", "d")
Expected = dict[tuple[str | None, int], tuple[int, ...]]
_expected: dict[str, Expected] = {}  # by attention_backend


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of six adapters that change tokens, and of nothing that can be loaded."""
    folder = tmp_path_factory.mktemp("adapters")
    made = [write_adapter(folder / str(seed), DEMO_DIR, rank=4 << seed % 4, seed=seed, size=1.0) for seed in range(6)]
    return [*map(str, made), str(folder)]


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=12, ignore_eos=True, seed=seed, temperature=0.0 if seed % 2 else 0.8)


async def expected_of(paths: Sequence[str], backend: str = "auto") -> Expected:
    """By adapter and prompt, alone in an engine."""
    expected = _expected.setdefault(backend, {})
    if expected:
        return expected
    adapters = {str(i): path for i, path in enumerate(paths[:-1])}
    async with AsyncEngine("demo", adapters=adapters, attention_backend=backend, **OPTIONS) as engine:
        for name in (None, *adapters):
            for i, prompt in enumerate(PROMPTS):
                completion = await engine.generate(prompt, params(i), adapter=name)
                expected[name and adapters[name], i] = completion.token_ids
    assert len(set(expected.values())) == len(expected)
    return expected


async def operate(engine: AsyncEngine, choose: random.Random, paths: Sequence[str], expected: Expected, count: int, users: int) -> int:
    """`count` operations of `users` at once; returns how many requests were compared."""
    path_of: dict[str, str] = {}  # of the names that are loaded or being loaded
    left, num_compared = count, 0

    async def load(name: str) -> None:
        path = path_of[name] = choose.choice(paths)
        try:
            assert (await engine.load_adapter(name, path)).name == name
        except AdapterError:
            assert path == paths[-1]
            del path_of[name]

    async def unload(name: str) -> None:
        with suppress(InvalidRequestError), anyio.move_on_after(choose.choice((0.0, 60.0))):
            await engine.unload_adapter(name)
            del path_of[name]

    async def use(name: str | None) -> None:
        nonlocal num_compared
        i = choose.randrange(len(PROMPTS))
        path = None if name is None else path_of.get(name)
        try:
            stream = engine.stream(PROMPTS[i], params(i), adapter=name)
        except InvalidRequestError:
            return
        try:
            if choose.random() < 0.2:
                for _ in range(choose.randrange(3)):
                    await stream.__anext__()
                await stream.aclose()
            else:
                ids = tuple([token.token_id async for token in stream])
                assert ids == expected[path, i], f"adapter {name} of {path}, prompt {i}: {ids} instead of {expected[path, i]}"
                num_compared += 1
        except AdapterError:
            assert path == paths[-1]

    async def user() -> None:
        nonlocal left
        while left:
            left -= 1
            name = choose.choice(NAMES)
            if name not in path_of and choose.random() < 0.5:
                await load(name)
            elif name in path_of and choose.random() < 0.1:
                await unload(name)
            else:
                await use(name if name in path_of and choose.random() < 0.8 else None)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        for _ in range(users):
            group.start_soon(user)
    for info in engine.adapters:
        await engine.unload_adapter(info.name)
    return num_compared


def num_packed() -> int:
    gc.collect()
    return sum(isinstance(each, PackedCpuAdapter) for each in gc.get_objects())


RANKS: dict[str, Any] = {"one rank": {}, "two ranks": {"tensor_parallel_size": 2}, "two stages": {"pipeline_parallel_size": 2}}
CASES = [("auto", "one rank", 60), ("auto", "one rank", 500), ("torch_native", "one rank", 60)]
CASES += [("torch_native", "two ranks", 60), ("auto", "two stages", 60)]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "ranks", "count"), slow_but(CASES[:1], CASES))
async def test_random_operations(paths: list[str], backend: str, ranks: str, count: int) -> None:
    expected = await expected_of(paths, backend)
    assert num_packed() == 0
    options = {"max_num_seqs": 8, "max_adapters": 3, "kv_cache_memory": 60 * 20480, "attention_backend": backend, **RANKS[ranks]}
    async with AsyncEngine("demo", **options, **OPTIONS) as engine:
        assert await operate(engine, random.Random(count), paths, expected, count, 16) > count // 5
        assert engine.adapters == ()
        assert idle(engine)
        assert (engine._core.serving.adapters._used, engine._core.serving.adapters._by_name) == ({}, {})
        assert num_packed() == 0
    for thread in threading.enumerate():
        if thread.name.startswith("aengine"):
            thread.join(HANG_SECONDS)
            assert not thread.is_alive(), thread


@pytest.mark.slow
async def test_random_operations_on_two_ranks(paths: list[str]) -> None:
    """At the end a rank is killed while it prepares."""
    expected = await expected_of(paths)
    engine = AsyncEngine("demo", tensor_parallel_size=2, adapters={"a": paths[0]}, **OPTIONS)
    await engine.start()
    try:
        assert (await engine.generate(PROMPTS[0], params(0), adapter="a")).token_ids == expected[paths[0], 0]
        await engine.unload_adapter("a")
        assert await operate(engine, random.Random(2), paths, expected, 25, 8) > 5
        with pytest.raises(AdapterError, match=r"^(rank 1: )?"):
            await engine.load_adapter("x", paths[-1])
        ranks: Any = engine._core.serving.model.runner._ranks
        (follower,) = ranks._followers
        assert isinstance(follower, Follower)
        assert follower.pid is not None
        os.kill(follower.pid, signal.SIGSTOP)
        errors: list[EngineDeadError] = []

        async def load() -> None:
            with pytest.raises(EngineDeadError) as caught:
                await engine.load_adapter("b", paths[1])
            errors.append(caught.value)

        async with anyio.create_task_group() as group:
            group.start_soon(load)
            await anyio.wait_all_tasks_blocked()
            stream = engine.stream(PROMPTS[0], params(0), adapter="b")
            os.kill(follower.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await stream.__anext__()
        assert isinstance(errors[0].__cause__, RankDiedError)
    finally:
        await engine.aclose()
