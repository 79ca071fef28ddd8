"""Replicas are killed at random moments while every kind of request runs: nobody sees more than a pause."""

from __future__ import annotations

import logging
import random
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from changed_models import changed_model
from children import end, pids_of_replicas
from grpc_harness import serving
from hang_guard import HANG_SECONDS
from slow_cases import BY_HAND
from workload import Case, Result, make_cases, run_all, run_case

from aengine import AsyncEngine, Embedding, EngineBase, EngineConfig, NoReplicaError, Router
from aengine.api.outputs import ReplicaState
from aengine.client import AsyncClient
from aengine.router.discovery import merged
from aengine.router.processes import run_replicas
from aengine.router.replica_load import ReplicaLoad

pytestmark = pytest.mark.anyio
_log = logging.getLogger(__name__)

MEMORY = 64 << 20
PROMPT = "In the beginning God created the heaven and the earth."


async def undisturbed(cases: list[Case], weights: str | None = None, **options: Any) -> tuple[list[Result], Embedding, str]:
    """The last is the fingerprint of what gives them."""
    async with AsyncEngine("demo", kv_cache_memory=MEMORY, **options) as engine:
        if weights is not None:
            await engine.update_weights(weights)
        return await run_all(engine, cases), await engine.embed(PROMPT), engine.stats().fingerprint


@pytest.mark.parametrize(
    ("num_cases", "num_kills"),
    [
        pytest.param(30, 3, marks=pytest.mark.slow),
        pytest.param(200, 30, marks=BY_HAND),
    ],
    ids=["few", "many"],
)
async def test_kills_change_nothing(num_cases: int, num_kills: int, capsys: pytest.CaptureFixture[str]) -> None:
    cases = make_cases(num_cases, seed=num_cases)
    known, embedding, _ = await undisturbed(cases)
    random_ = random.Random(5)
    kills, pause, first, num_streams = 0, 0.0, 0.0, 0
    open_streams: set[int] = set()
    left: set[int] = set()  # of those, that have brought nothing since the last kill: the next one could make them suspects, not victims

    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(Router("demo", replicas=3, kv_cache_memory=MEMORY, wait_seconds=120.0))
        serve = await stack.enter_async_context(serving(router, limit=None))
        address = serve.server.address
        session = await stack.enter_async_context(AsyncClient(address, multiplex=True))
        resuming = await stack.enter_async_context(AsyncClient(address, auto_resume=True))
        readers: list[EngineBase] = [router, session, resuming]

        async def kill() -> None:
            nonlocal kills
            while kills < num_kills:
                await anyio.sleep(random_.uniform(0.1, 1.0))
                if sum(replica.state is ReplicaState.SERVING for replica in router.replicas()) >= 2 and not left:
                    end(random_.choice(pids_of_replicas()), signal.SIGKILL)
                    kills += 1
                    left.update(open_streams)

        async def read(stream: int) -> None:
            nonlocal pause, first, num_streams
            index, reader = stream % num_cases, readers[stream % len(readers)]
            open_streams.add(stream)
            result = await run_case(reader, cases[index], lambda: left.discard(stream))
            open_streams.discard(stream)
            left.discard(stream)
            if result.facts() != known[index].facts():  # the difference is long, and says it last
                ends = [tokens[-1] if tokens else None for tokens in result.tokens]
                _log.error("case %d of %s ended with %s after %d tokens", index, type(reader).__name__, ends, sum(map(len, result.tokens)))
            assert result.facts() == known[index].facts(), (index, cases[index])
            pause, first, num_streams = max(pause, result.pause), max(first, result.first), num_streams + 1

        async def embed() -> None:
            while kills < num_kills:
                open_streams.add(-1)
                found = await router.embed(PROMPT)
                open_streams.discard(-1)
                left.discard(-1)
                np.testing.assert_allclose(found.values, embedding.values, atol=1e-5)
                await anyio.sleep(0.05)

        limit = anyio.CapacityLimiter(24)
        with anyio.fail_after(HANG_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(kill)
                group.start_soon(embed)
                index = 0
                while index < num_cases or kills < num_kills:
                    await limit.acquire_on_behalf_of(index)

                    async def one(index: int = index) -> None:
                        try:
                            await read(index)
                        finally:
                            limit.release_on_behalf_of(index)

                    group.start_soon(one)
                    index += 1
    with capsys.disabled():
        print(f"\n{num_streams} streams, {kills} kills, longest pause {pause:.2f} s, longest wait for a first token {first:.2f} s")


@pytest.mark.parametrize(
    ("num_cases", "num_kills", "other"),
    [
        pytest.param(24, 4, {"dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param(300, 30, {"dtype": "float32"}, marks=BY_HAND),
        pytest.param(200, 30, {"quantization": "int8"}, marks=BY_HAND),
    ],
    ids=["few", "many", "many-int8"],
)
async def test_replicas_that_differ(
    num_cases: int, num_kills: int, other: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By dtype or quantisation, and by weights that some get while they run. Each stream is that of the model that it began with, and ends
    early only with the reason that no replica of that is left."""
    changed = changed_model(tmp_path / "changed")
    cases = make_cases(num_cases, seed=num_cases)
    options: list[dict[str, Any]] = [{}, other]
    known: dict[str, list[Result]] = {}
    for each in options:
        for weights in (None, str(changed)):
            results, _, fingerprint = await undisturbed(cases, weights, **each)
            known[fingerprint] = results
    assert len(known) == 4
    random_ = random.Random(5)
    kills, updates, ended, counts = 0, 0, 0, dict.fromkeys(known, 0)
    open_streams: set[int] = set()
    left: set[int] = set()  # as above
    token = "secret"

    def is_part(found: list[list[int]], result: Result, whole: bool) -> bool:
        alone = [[token.token_id for token in one] for one in result.tokens]
        return all(a == b if whole else b[: len(a)] == a for a, b in zip(found, alone, strict=True))

    async def addresses() -> AsyncGenerator[frozenset[str], None]:
        sources = [run_replicas(EngineConfig(model="demo", kv_cache_memory=MEMORY, **each), 2, token) for each in options]
        async with aclosing(merged(sources)) as found:
            async for each in found:
                yield frozenset().union(*each)

    async with Router(source=addresses(), token=token, wait_seconds=120.0) as router:

        async def disturb() -> None:
            nonlocal kills, updates
            while kills < num_kills:
                await anyio.sleep(random_.uniform(0.1, 1.0))
                serving = [one.name for one in router.replicas() if one.state in (ReplicaState.SERVING, ReplicaState.SUPERSEDED)]
                if len(serving) >= 3 and random_.random() < 0.3:
                    async with AsyncClient(random_.choice(serving), token=token) as client:
                        await client.update_weights(str(changed), running="finish")
                        updates += 1
                elif len(serving) >= 2 and not left:
                    end(random_.choice(pids_of_replicas()), signal.SIGKILL)
                    kills += 1
                    left.update(open_streams)

        async def read(number: int) -> None:
            nonlocal ended
            index = number % num_cases
            case, whole = cases[index], True
            open_streams.add(number)
            found: list[list[int]] = [[] for _ in range(case.params.n)]
            made_by: set[tuple[ReplicaLoad, int]] = set()
            try:
                async with router.stream(case.prompt, case.params) as stream:
                    async for token in stream:
                        left.discard(number)
                        made_by.add(stream._source._made_by)  # type: ignore[attr-defined]
                        found[token.index].append(token.token_id)
            except NoReplicaError:
                whole, ended = False, ended + 1
            open_streams.discard(number)
            left.discard(number)
            if made_by:
                models = {load.generation_of(version) for load, version in made_by}
                if (
                    len(made_by) == 1 and not models & known.keys()
                ):  # the replica has not told yet of the weights that it got, or died before
                    (model,) = [name for name, results in known.items() if is_part(found, results[index], whole)][:1]
                else:
                    assert len(models) == 1, (
                        [(load.name, version, load.generation_of(version)) for load, version in made_by],
                        list(known),
                        whole,
                    )
                    (model,) = models
                assert is_part(found, known[model][index], whole), (index, case)
                counts[model] += whole

        limit = anyio.CapacityLimiter(24)
        async with anyio.create_task_group() as group:
            group.start_soon(disturb)
            index = 0
            while index < num_cases or kills < num_kills:
                await limit.acquire_on_behalf_of(index)

                async def one(index: int = index) -> None:
                    try:
                        await read(index)
                    finally:
                        limit.release_on_behalf_of(index)

                group.start_soon(one)
                index += 1
    with capsys.disabled():
        print(f"\n{sum(counts.values())} streams {counts}, {kills} kills, {updates} updates, {ended} ended for lack of a replica")
