"""An engine of asyncio in trio: what `tests/client/test_engine_promises.py` keeps in asyncio over the bridge, and what only trio has."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import pytest
import trio
from hang_guard import HANG_SECONDS
from oracle_engine import OracleEngine, StepGate, idle, step_with_the_loop, until

from aengine import AsyncEngine, EngineDeadError, EngineStateError, FinishReason, InvalidRequestError, SamplingParams, Token, on_asyncio
from aengine.aio import bridge as bridged_streams
from aengine.aio.bridge import AsyncioEngine
from aengine.aio.edge import LoopThread
from aengine.api.outputs import CachedPages
from aengine.client import AsyncClient
from aengine.engine.edges import Cancel
from aengine.router.router import Router
from aengine.server.app import Server

pytestmark = pytest.mark.anyio

ENDLESS = SamplingParams(seed=1, ignore_eos=True)


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "aengine-asyncio":
            thread.join(HANG_SECONDS)  # its last word is said, and its last line runs
            assert not thread.is_alive()


@asynccontextmanager
async def bridged(**options: Any) -> AsyncIterator[tuple[OracleEngine, OracleEngine]]:
    """An engine, and what stands for it here."""
    oracle = OracleEngine(**options)
    with anyio.fail_after(HANG_SECONDS):
        async with on_asyncio(oracle) as engine:
            yield oracle, engine


async def tokens_of(stream: Any) -> list[Token]:
    return [token async for token in stream]


async def test_a_stream_is_that_of_the_engine() -> None:
    async with bridged() as (oracle, engine):
        stream = engine.stream([1, 2, 3], SamplingParams(seed=5, max_tokens=20, ignore_eos=True, n=2), request_id="mine")
        assert (stream.request_id, stream.seed) == ("mine", 5)
        await stream.started()
        assert stream.usage.prompt_tokens == 3
        tokens = await tokens_of(stream)
        assert [token.token_id for token in tokens if token.index == 0] == oracle.solo(5)[0]
        completion = stream.completion()
        assert completion.token_ids == tuple(oracle.solo(5)[0])
        assert [one.finish_reason for one in (completion, *completion.others)] == [FinishReason.MAX_TOKENS] * 2
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 40)
        assert stream.timing.queue is not None
        assert engine.stream([1], SamplingParams(seed=5, max_tokens=1)).request_id
        assert engine.model_info.name == "oracle"


async def test_what_is_wrong_is_raised_by_the_stream() -> None:
    async with bridged() as (_, engine):
        for read in (lambda stream: stream.started(), tokens_of):
            with pytest.raises(InvalidRequestError, match="prompt"):
                await read(engine.stream([99]))
        with pytest.raises(InvalidRequestError, match="priority"):
            engine.stream([1], priority=1000)
        refused = engine.stream([99])
        assert len(refused.request_id) == 32
        await refused.aclose()


async def test_many_streams_come_over_in_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[int] = []

    def receive(batches: list[Any]) -> None:
        received.append(len(batches))
        original(batches)

    original = bridged_streams._receive
    monkeypatch.setattr(bridged_streams, "_receive", receive)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    async with bridged() as (oracle, engine):
        streams = [engine.stream([1], params, request_id=f"r{i}") for i in range(30)]
        async with anyio.create_task_group() as tasks:
            for stream in streams:
                tasks.start_soon(tokens_of, stream)
        assert [stream.usage.completion_tokens for stream in streams] == [50] * 30
        assert len(received) <= oracle.stats().steps + 10  # one for each step, and those without a token


async def test_a_slow_reader_parks_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridged_streams, "MOST_UNREAD", 16)
    async with bridged(max_unread_tokens=4) as (oracle, engine):
        step_with_the_loop(oracle)
        stream = engine.stream([1], ENDLESS)
        await until(lambda: oracle.stats().parked)
        assert len((await engine.generate([2], SamplingParams(seed=2, max_tokens=3, ignore_eos=True))).token_ids) == 3
        assert [token.token_id for token in await tokens_of(stream)] == oracle.solo(1)[0]


class TestLeaving:
    async def test_a_scope_that_ends_cancels_the_request(self) -> None:
        async with bridged() as (oracle, engine):
            gate = StepGate(oracle, at=3)
            stream = engine.stream([1], ENDLESS)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(tokens_of, stream)
                    await until(gate.held.is_set)
                    scope.cancel()
            gate.open()
            assert (await tokens_of(stream))[-1].finish_reason is FinishReason.CANCELLED
            await until(lambda: idle(oracle))

    async def test_generate_ends_when_the_pages_are_free(self) -> None:
        async with bridged() as (oracle, engine):
            gate = StepGate(oracle, at=3)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.generate, [1], ENDLESS)
                await until(gate.held.is_set)
                nursery.cancel_scope.cancel()
                gate.open()
            assert idle(oracle)

    async def test_aclose_returns_when_the_pages_are_free_though_it_is_cancelled(self) -> None:
        async with bridged() as (oracle, engine):
            stream = engine.stream([1], ENDLESS)
            await stream.__anext__()
            with trio.CancelScope() as scope:
                scope.cancel()
                await stream.aclose()
            assert idle(oracle)

    async def test_dropping_cancels(self) -> None:
        async with bridged() as (oracle, engine):
            gate = StepGate(oracle, at=3)
            async for _ in engine.stream([1], ENDLESS):
                break
            gc.collect()
            await until(lambda: idle(oracle) or any(isinstance(command, Cancel) for command in [*oracle._core.steps._mailbox._commands]))
            gate.open()
            await until(lambda: idle(oracle))
            assert oracle.stats().completion_tokens < 10

    async def test_a_reader_of_another_task_sees_the_end(self) -> None:
        async with bridged() as (oracle, engine):
            gate = StepGate(oracle, at=2)
            stream = engine.stream([1], ENDLESS)
            read: list[Token] = []

            async def collect() -> None:
                read.extend(await tokens_of(stream))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(collect)
                await until(gate.held.is_set)
                gate.open()
                await stream.aclose()
            assert read[-1].finish_reason is FinishReason.CANCELLED


class TestLifeCycle:
    async def test_closing_ends_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also those that are held, with all that came before."""
        monkeypatch.setattr(bridged_streams, "MOST_UNREAD", 16)
        async with bridged() as (oracle, engine):
            step_with_the_loop(oracle)
            held, fresh = engine.stream([1], ENDLESS), engine.stream([2], SamplingParams(seed=2, ignore_eos=True))
            await until(lambda: oracle.stats().parked == 2)
            assert engine.healthy
            await engine.aclose()
            tokens = await tokens_of(held)
            assert len(tokens) > 17  # more than what may wait here
            assert [token.token_id for token in tokens[:-1]] == oracle.solo(1)[0][: len(tokens) - 1]
            for stream in (held, fresh):
                await stream.started()
                await stream.aclose()
            assert not engine.healthy
            for use in (lambda: engine.stream([1]), lambda: engine._running()):
                with pytest.raises(EngineStateError, match="closed"):
                    use()
            with pytest.raises(EngineStateError, match="closed"):
                await engine.generate([1])
            await engine.aclose()

    async def test_two_may_close_it(self) -> None:
        async with bridged() as (oracle, engine):
            gate = StepGate(oracle, at=1)
            stream = engine.stream([1], ENDLESS)
            await until(gate.held.is_set)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.aclose)
                nursery.start_soon(engine.aclose)
                gate.open()
            assert not oracle.healthy
            assert (await tokens_of(stream))[-1].finish_reason is FinishReason.CANCELLED

    async def test_a_start_that_fails(self) -> None:
        with pytest.raises(Exception, match="no-such-model") as caught:
            async with on_asyncio(AsyncEngine("/no-such-model")):
                pass
        assert type(caught.value).__module__ == "aengine.api.errors"

    async def test_a_start_that_is_cancelled(self) -> None:
        class Slow(OracleEngine):
            cancelled = False

            async def start(self) -> None:
                begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled = True

        begun = threading.Event()
        slow = Slow()
        engine = on_asyncio(slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.start)
            await until(begun.is_set)
            nursery.cancel_scope.cancel()
        assert slow.cancelled
        await engine.aclose()

    async def test_it_is_started_once_and_belongs_to_one_loop(self) -> None:
        unused = on_asyncio(OracleEngine())
        with pytest.raises(EngineStateError, match="not started"):
            unused.stream([1])
        await unused.aclose()
        with pytest.raises(EngineStateError, match="started before"):
            await unused.start()
        async with bridged() as (_, engine):
            with pytest.raises(EngineStateError, match="started before"):
                await engine.start()

            async def elsewhere() -> None:
                with pytest.raises(EngineStateError, match="another event loop"):
                    engine.stream([1])
                with pytest.raises(EngineStateError, match="another event loop"):
                    await engine.tokenize("a")

            await trio.to_thread.run_sync(lambda: asyncio.run(elsewhere()))

    async def test_the_death_of_the_engine(self) -> None:
        async with bridged() as (oracle, engine):
            stream = engine.stream([1], ENDLESS)
            await stream.__anext__()

            def fail(plan: Any) -> None:
                raise ValueError("the device is gone")

            oracle.runner.before_step = fail
            with pytest.raises(EngineDeadError, match="the device is gone"):
                await tokens_of(stream)
            assert stream.completion().finish_reason is FinishReason.ERROR
            assert not engine.healthy

    async def test_two_engines_in_two_loops(self) -> None:
        async def in_asyncio() -> list[int]:
            async with OracleEngine() as other, on_asyncio(OracleEngine()) as bridge:
                here = await other.generate([1], SamplingParams(seed=3, max_tokens=9))
                assert await bridge.generate([1], SamplingParams(seed=3, max_tokens=9)) == here
                return list(here.token_ids)

        async with bridged() as (_, engine):
            elsewhere = await trio.to_thread.run_sync(lambda: asyncio.run(in_asyncio()))
            assert list((await engine.generate([1], SamplingParams(seed=3, max_tokens=9))).token_ids) == elsewhere


class Watched(OracleEngine):
    closed = False

    async def watch_pages(self, salt: bytes, most: int) -> AsyncGenerator[CachedPages | None, None]:
        try:
            for _ in range(most):
                await asyncio.sleep(0)
                yield None
        finally:
            self.closed = True


async def test_what_engines_have_beyond_the_protocol() -> None:
    watched = Watched()
    async with on_asyncio(watched) as engine:
        assert await engine.flush_cache() == 0
        assert engine.stats().running == 0
        assert engine.engine_info == watched.engine_info
        assert [item async for item in engine.watch_pages(b"", 3)] == [None] * 3
        assert watched.closed
        watched.closed = False
        pages = engine.watch_pages(b"", 3)
        await pages.__anext__()
        await pages.aclose()
        assert watched.closed


@pytest.mark.parametrize("kind", [AsyncClient, Router])
def test_a_bridge_has_what_its_engine_has(kind: type[AsyncioEngine]) -> None:
    """Any public method or property, but for those that only the loop of the engine may use."""
    public = {name for name in dir(kind) if not name.startswith("_")} - {"bridge_class", "config", "on_ray", "open"}
    assert public <= set(dir(kind.bridge_class))


# ---- the client --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def served() -> AsyncIterator[tuple[OracleEngine, str]]:
    """An engine behind a server, which runs in asyncio, in another thread."""
    thread = LoopThread("aengine-asyncio")
    thread.start()

    async def start() -> tuple[OracleEngine, Server]:
        oracle = OracleEngine()
        await oracle.start()
        server = Server(oracle, port=0)
        await server.start()
        await server.set_serving()
        return oracle, server

    oracle, server = await thread.call(start)
    yield oracle, server.address
    await thread.call(server.stop)
    await thread.call(oracle.aclose)
    await thread.stop()


@pytest.mark.parametrize("multiplex", [False, True])
async def test_the_client_in_trio(served: tuple[OracleEngine, str], multiplex: bool) -> None:
    oracle, address = served
    params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
    with trio.fail_after(HANG_SECONDS):
        async with AsyncClient(address, multiplex=multiplex) as client:
            async with client.stream([1, 2, 3], params) as stream:
                assert [token.token_id async for token in stream] == oracle.solo(5)[0]
            assert (await client.generate([1, 2, 3], params)).token_ids == tuple(oracle.solo(5)[0])
            assert (await client.load()).pages_total > 0
            async with aclosing(client.watch_load()) as reports:
                assert (await reports.__anext__()).stats.pages_total > 0
            with trio.CancelScope() as scope:
                async for _ in client.stream([1], ENDLESS):
                    scope.cancel()
            await until(lambda: idle(oracle))
        assert not client.healthy


async def test_a_router_in_trio(served: tuple[OracleEngine, str]) -> None:
    oracle, address = served
    params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
    with trio.fail_after(HANG_SECONDS):
        async with Router(backends=(address,)) as router:
            async with router.stream([1, 2, 3], params) as stream:
                assert [token.token_id async for token in stream] == oracle.solo(5)[0]
            assert [replica.name for replica in router.replicas()] == [address]
            with trio.CancelScope() as scope:
                async for _ in router.stream([1], ENDLESS):
                    scope.cancel()
            await until(lambda: idle(oracle))


async def test_the_client_needs_asyncio_to_be_started_as_it_is() -> None:
    with pytest.raises(EngineStateError, match="on_asyncio"):
        await AsyncClient("127.0.0.1:1").start()
