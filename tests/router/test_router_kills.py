"""Replicas are killed at random moments while every kind of request runs: nobody sees more than a pause."""

from __future__ import annotations

import random
import signal
from contextlib import AsyncExitStack

import anyio
import numpy as np
import pytest
from children import end, pids_of_replicas
from grpc_harness import serving
from slow_cases import BY_HAND
from workload import Case, Result, make_cases, run_all, run_case

from aengine import AsyncEngine, Embedding, EngineProtocol, Router
from aengine.client import AsyncClient
from aengine.outputs import ReplicaState

pytestmark = pytest.mark.anyio

MEMORY = 64 << 20
PROMPT = "In the beginning God created the heaven and the earth."


async def undisturbed(cases: list[Case]) -> tuple[list[Result], Embedding]:
    async with AsyncEngine("demo", kv_cache_memory=MEMORY) as engine:
        return await run_all(engine, cases), await engine.embed(PROMPT)


@pytest.mark.parametrize(
    ("num_cases", "num_kills"),
    [
        pytest.param(40, 4, marks=pytest.mark.slow),
        pytest.param(200, 30, marks=BY_HAND),
    ],
    ids=["few", "many"],
)
async def test_kills_change_nothing(num_cases: int, num_kills: int, capsys: pytest.CaptureFixture[str]) -> None:
    cases = make_cases(num_cases, seed=num_cases)
    known, embedding = await undisturbed(cases)
    random_ = random.Random(5)
    kills, pause, first, num_streams = 0, 0.0, 0.0, 0

    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(Router("demo", replicas=3, kv_cache_memory=MEMORY, wait_seconds=120.0))
        serve = await stack.enter_async_context(serving(router, limit=None))
        address = serve.server.address
        session = await stack.enter_async_context(AsyncClient(address, multiplex=True))
        resuming = await stack.enter_async_context(AsyncClient(address, auto_resume=True))
        readers: list[EngineProtocol] = [router, session, resuming]

        async def kill() -> None:
            nonlocal kills
            while kills < num_kills:
                await anyio.sleep(random_.uniform(0.1, 1.0))
                if sum(replica.state is ReplicaState.SERVING for replica in router.replicas()) >= 2:
                    end(random_.choice(pids_of_replicas()), signal.SIGKILL)
                    kills += 1

        async def read(index: int) -> None:
            nonlocal pause, first, num_streams
            result = await run_case(readers[index % len(readers)], cases[index])
            assert result.facts() == known[index].facts(), (index, cases[index])
            pause, first, num_streams = max(pause, result.pause), max(first, result.first), num_streams + 1

        async def embed() -> None:
            while kills < num_kills:
                found = await router.embed(PROMPT)
                np.testing.assert_allclose(found.values, embedding.values, atol=1e-5)
                await anyio.sleep(0.05)

        limit = anyio.CapacityLimiter(24)
        with anyio.fail_after(400):
            async with anyio.create_task_group() as group:
                group.start_soon(kill)
                group.start_soon(embed)
                index = 0
                while index < num_cases or kills < num_kills:
                    await limit.acquire_on_behalf_of(index)

                    async def one(index: int = index) -> None:
                        try:
                            await read(index % num_cases)
                        finally:
                            limit.release_on_behalf_of(index)

                    group.start_soon(one)
                    index += 1
    with capsys.disabled():
        print(f"\n{num_streams} streams, {kills} kills, longest pause {pause:.2f} s, longest wait for a first token {first:.2f} s")
