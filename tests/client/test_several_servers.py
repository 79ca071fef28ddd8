"""Two servers behind one name: what a client asks of a request goes to the server that has it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
from cutting_proxy import cutting_proxy
from grpc_harness import serving
from hang_guard import HANG_SECONDS
from oracle_engine import OracleEngine, idle, until

from aengine import FinishReason, SamplingParams
from aengine.client import AsyncClient

pytestmark = pytest.mark.anyio

ENDLESS = SamplingParams(seed=1, ignore_eos=True)


@dataclass
class Two:
    engines: list[OracleEngine]
    addresses: list[str]

    @property
    def name(self) -> str:
        return "ipv4:" + ",".join(self.addresses)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with two_servers() as two:
        yield two


@asynccontextmanager
async def two_servers() -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(OracleEngine()) for _ in range(2)]
        servers = [await stack.enter_async_context(serving(engine)) for engine in engines]
        yield Two(engines, [serve.server.address for serve in servers])


async def test_requests_are_cancelled_where_they_run(two: Two) -> None:
    for engine in two.engines:
        await engine.pause()
    async with AsyncClient(two.name) as client:
        streams = {name: client.stream([1], ENDLESS, request_id=name) for name in "abcdef"}
        for stream in streams.values():
            await stream.started()
        for name, stream in streams.items():
            assert await client.cancel(name) is True
            with anyio.fail_after(HANG_SECONDS):
                tokens = [token async for token in stream]
            assert tokens[-1].finish_reason is FinishReason.CANCELLED
    await until(lambda: all(idle(engine) for engine in two.engines))


async def test_streams_are_taken_up_where_they_run(two: Two) -> None:
    budgets = random.Random(3).sample(range(2000, 9000), 12)
    params = SamplingParams(seed=5, max_tokens=300, ignore_eos=True)
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(cutting_proxy(address, budgets)) for address in two.addresses]
        behind = Two(two.engines, [proxy.address for proxy in proxies])
        client = await stack.enter_async_context(AsyncClient(behind.name, auto_resume=True))
        while sum(proxy.num_cuts for proxy in proxies) < 4:
            with anyio.fail_after(HANG_SECONDS):
                tokens = [token.token_id async for token in client.stream([1, 2], params)]
            (served,) = [engine for engine in two.engines if engine.stats().steps]
            assert tokens == served.solo(5)[0]
    await until(lambda: all(idle(engine) for engine in two.engines))


async def test_another_server_takes_over(two: Two) -> None:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(cutting_proxy(address)) for address in two.addresses]
        client = await stack.enter_async_context(AsyncClient(Two(two.engines, [proxy.address for proxy in proxies]).name))
        params = SamplingParams(seed=2, max_tokens=3, ignore_eos=True)
        before = await client.generate([1], params)
        first = next(proxy for proxy in proxies if proxy.num_bytes)
        first.stop()
        with anyio.fail_after(HANG_SECONDS):
            assert await client.generate([1], params) == before
        assert all(engine.stats().steps for engine in two.engines)
