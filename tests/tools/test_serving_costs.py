"""What the benchmark of serving stands on: an engine without a model, in a process of its own that tells what it did."""

from __future__ import annotations

import argparse

import pytest
from grpc_loop import ASYNCIO

from aengine import SamplingParams
from tools.bench.clients import READERS, cost
from tools.bench.paced_engine import TEXT, PacedEngine
from tools.bench.paced_server import health_checks, paced_server
from tools.bench.routing import DOORS
from tools.bench.routing import cost as routed_cost
from tools.bench.serving import LOADS, measure

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return ASYNCIO


@pytest.mark.parametrize("pace", [None, 500.0])
async def test_the_engine_says_its_text(pace: float | None) -> None:
    async with PacedEngine(4) as engine:
        engine.runner.steps_per_second = pace
        ids = engine.tokenizer.encode(TEXT)
        prompt = ids[:5]
        answer = await engine.generate(prompt, SamplingParams(max_tokens=len(ids) + 2, ignore_eos=True))
        assert list(answer.token_ids) == (ids * 2)[len(prompt) : len(prompt) + len(ids) + 2]


@pytest.mark.slow
async def test_every_load_gets_tokens() -> None:
    with paced_server(4, uvloop=False) as server, health_checks(server.address) as checks:
        for load in LOADS.values():
            for pace in (None, 200.0):
                before, after = await measure(server, load(4), 4, pace, 0.3, warm_up=0.0)
                assert after.under_way == 4
                assert (after.tokens > before.tokens, after.cpu_seconds > before.cpu_seconds) == (True, True)
        checks.send("stop")
        assert checks.recv()


@pytest.mark.slow
@pytest.mark.parametrize("multiplex", [False, True])
async def test_every_reader_gets_tokens(multiplex: bool) -> None:
    for reader in READERS:
        found = await cost(multiplex, reader, 200.0, argparse.Namespace(streams=4, seconds=0.3))
        assert min(found.client, found.server, found.tokens_per_second) > 0


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
async def test_every_load_comes_through_a_router(door: str) -> None:
    options = argparse.Namespace(replicas=2, streams=4, seconds=0.3, uvloop=False)
    direct, routed = [await routed_cost(door, 200.0, options, routed=routed) for routed in (False, True)]
    assert min(direct.tokens_per_second, direct.replicas, routed.tokens_per_second, routed.replicas, routed.router) > 0
    assert direct.router == 0
