"""Clients that do not read: their requests stand still, hold little, and cost the others nothing."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest
from grpc_harness import Serving, events_of, serving
from oracle_engine import OracleEngine, step_with_the_loop, until
from oracle_requests import check_whole, ids_of, nothing_left, num_generated, oracle_request
from raw_h2 import DEFAULT_WINDOW, GENERATION, RawCall, RawConnection, framed, raw_connection
from records_seen import Seen, watch
from speculating import also_with_drafts

from aengine.server.core.generation import READ_TOKENS
from aengine.server.grpc import interceptor

pytestmark = pytest.mark.anyio

MAX_UNREAD = 8


def most_held(engine: OracleEngine) -> int:
    """A request lags with one token more than MAX_UNREAD, and is parked within two steps after that one."""
    return MAX_UNREAD + 3 * (1 if engine.config.speculative == "off" else 1 + engine.config.max_drafts)


CANCELLED, ABORTED = 1, 10
STREAM = GENERATION + "StreamGenerate"


def make_engine(max_model_len: int = 400, max_unread: int = MAX_UNREAD) -> OracleEngine:
    engine = OracleEngine(max_unread_tokens=max_unread, num_pages=4000)
    engine.runner.max_model_len = max_model_len
    return engine


async def stall(connection: RawConnection, seed: int) -> RawCall:
    """A request whose answer is not taken beyond the windows there are."""
    return await connection.call(STREAM, framed(oracle_request(seed, request_id=f"stalled-{seed}")), greedy=False)


async def check_others_go_on(engine: OracleEngine, serve: Serving) -> None:
    seeds = range(1000, 1003)
    calls = [serve.generation.StreamGenerate(oracle_request(seed, max_tokens=100)) for seed in seeds]
    for seed, events in zip(seeds, await asyncio.gather(*map(events_of, calls)), strict=True):
        check_whole(engine, seed, events)


async def stands_still(engine: OracleEngine, serve: Serving, request_id: str) -> int:
    """Wait until a request is parked for good; returns how many tokens it has. It may be parked for a moment before."""
    await until(lambda: engine.stats().parked == 1)
    num_tokens = -1
    while engine.stats().parked == 0 or num_tokens != num_generated(engine, request_id):
        num_tokens = num_generated(engine, request_id)
        await check_others_go_on(engine, serve)
    return num_tokens


@pytest.mark.quick_cases(1)
@also_with_drafts
@pytest.mark.parametrize("window", [0, 1, 700])
async def test_a_closed_window_parks_the_request_until_it_opens(window: int) -> None:
    async with make_engine() as engine, serving(engine) as serve, raw_connection(serve.server.address, window=window) as connection:
        step_with_the_loop(engine)
        call = await stall(connection, 1)
        await until(lambda: call.num_bytes == window)
        num_tokens = await stands_still(engine, serve, "stalled-1")
        at_most = most_held(engine) + (READ_TOKENS + window // 12 if window > 1 else 0)  # no delta takes fewer bytes
        assert MAX_UNREAD < num_tokens <= at_most
        await check_others_go_on(engine, serve)
        assert engine.stats().parked == 1
        assert (num_generated(engine, "stalled-1"), call.num_bytes) == (num_tokens, window)
        await call.open()
        check_whole(engine, 1, await call.events())
        assert call.status == 0
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)


@also_with_drafts
async def test_a_window_that_opens_little_by_little_loses_nothing() -> None:
    async with make_engine() as engine, serving(engine) as serve, raw_connection(serve.server.address, window=0) as connection:
        call = await stall(connection, 1)
        while not call.ended:
            before = call.num_bytes
            connection.h2.increment_flow_control_window(97, call.stream_id)
            connection.h2.increment_flow_control_window(97)
            await connection.flush()
            await until(lambda: call.ended or call.num_bytes == before + 97)  # noqa: B023
        check_whole(engine, 1, await call.events())
        assert call.status == 0


@pytest.mark.quick_cases(1)
@also_with_drafts
async def test_a_little_more_window_takes_a_little_more_from_the_engine() -> None:
    """A server that took all there is would have it all again soon, beside what it took."""
    max_unread = 4 * READ_TOKENS
    async with (
        make_engine(1000, max_unread) as engine,
        serving(engine) as serve,
        raw_connection(serve.server.address, window=0) as connection,
    ):
        step_with_the_loop(engine)
        call = await stall(connection, 1)
        for _ in range(3):
            await until(lambda: engine.stats().parked == 1)
            before = call.num_bytes
            connection.h2.increment_flow_control_window(60, call.stream_id)
            await connection.flush()
            await until(lambda: call.num_bytes == before + 60)  # noqa: B023
        assert await stands_still(engine, serve, "stalled-1") <= max_unread + READ_TOKENS + 3 * 60 // 12
        await call.open()
        check_whole(engine, 1, await call.events())


@pytest.mark.slow
async def test_the_window_of_a_connection_holds_up_that_connection_alone() -> None:
    async with make_engine(2500) as engine, serving(engine) as serve, raw_connection(serve.server.address) as connection:
        step_with_the_loop(engine)
        calls = [await stall(connection, seed) for seed in (1, 2)]
        await until(lambda: sum(call.num_bytes for call in calls) == DEFAULT_WINDOW)
        await until(lambda: engine.stats().parked == 2)
        await check_others_go_on(engine, serve)
        assert engine.stats().parked == 2
        for call in calls:
            await call.open()
        for seed, call in enumerate(calls, 1):
            check_whole(engine, seed, await call.events())


@pytest.mark.parametrize("way", ["reset", "abort", "close"])
async def test_many_of_them_hold_little_and_leave_nothing(way: str) -> None:
    async with make_engine() as engine, serving(engine) as serve, AsyncExitStack() as stack:
        step_with_the_loop(engine)
        connections = [await stack.enter_async_context(raw_connection(serve.server.address, window=0)) for _ in range(10)]
        calls = [await stall(connections[seed % 10], seed) for seed in range(20)]
        await until(lambda: engine.stats().parked == 20)
        await check_others_go_on(engine, serve)
        held = [num_generated(engine, f"stalled-{seed}") for seed in range(20)]
        assert MAX_UNREAD < min(held) <= max(held) <= most_held(engine) + READ_TOKENS, "one may be parked for a moment, and read once more"
        assert serve.server.in_flight == 20
        if way == "reset":
            for call in calls:
                await call.reset()
        else:
            for connection in connections:
                if way == "abort":
                    connection.abort()
                else:
                    await connection.close()
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)
        await check_others_go_on(engine, serve)


async def test_the_end_waits_for_the_client_but_not_in_the_engine() -> None:
    """Few tokens: the engine is done with them while the client has taken nothing, and they are not lost."""
    async with make_engine() as engine, serving(engine) as serve, raw_connection(serve.server.address, window=0) as connection:
        call = await connection.call(STREAM, framed(oracle_request(1, max_tokens=3)), greedy=False)
        await until(lambda: 1 in engine.runner.truths and nothing_left(engine))
        assert (call.num_bytes, serve.server.in_flight) == (0, 1)
        await call.open()
        events = await call.events()
        check_whole(engine, 1, events)
        assert len(ids_of(events)) == 3


@pytest.mark.parametrize("window", [0, 100])
async def test_a_client_that_does_not_read_for_too_long_loses_its_call(window: int, caplog: pytest.LogCaptureFixture) -> None:
    async with make_engine() as engine, serving(engine, stall_seconds=0.2) as serve:
        async with raw_connection(serve.server.address, window=window) as connection:
            step_with_the_loop(engine)
            call = await stall(connection, 1)
            # It is parked first, which may be over before anyone looks.
            await until(lambda: engine.stats().parked == 1 or (engine.stats().steps and serve.server.in_flight == 0))
            await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)
            await call.open()  # what was on its way is still there, and why there is no more
            events = await call.events()
            assert [event.event_number for event in events] == [*range(len(events))]
            assert not events[-1].HasField("finished")
            assert call.status == ABORTED
        await check_others_go_on(engine, serve)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


GENERATE = GENERATION + "Generate"


@pytest.mark.parametrize("method", [STREAM, GENERATE])
async def test_a_client_that_never_reads_is_cut_off(method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of its call is left, in gRPC neither, though its window stays closed and its connection open."""
    monkeypatch.setattr(interceptor, "ABORT_SECONDS", 0.1)
    seen = Seen()
    async with (
        make_engine() as engine,
        serving(engine, stall_seconds=0.2) as serve,
        raw_connection(serve.server.address, window=0) as connection,
    ):
        watch(serve.server.core.observers, seen)
        before = asyncio.all_tasks()
        request = oracle_request(1, max_tokens=None if method == STREAM else 3)
        call = await connection.call(method, framed(request), greedy=False)
        await call.wait_end()
        assert (call.num_bytes, call.status) == (0, CANCELLED)
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0 and len(serve.server.core.calls) == 0)
        await until(lambda: not asyncio.all_tasks() - before)
        assert not connection.closed.is_set()
        await check_others_go_on(engine, serve)
    assert (seen.calls[0].code, seen.calls[0].reason) == ("ABORTED", "READER_STALLED")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("body", [None, framed(b"\0" * 100)[:50]], ids=["nothing", "part of a message"])
async def test_a_client_that_never_sends_its_message_loses_its_call(body: bytes | None) -> None:
    seen = Seen()
    async with make_engine() as engine, serving(engine, stall_seconds=0.2) as serve, raw_connection(serve.server.address) as connection:
        watch(serve.server.core.observers, seen)
        session = await connection.call(GENERATION + "Session", end=False)  # a stream of messages may begin when it likes
        call = await connection.call(STREAM, body, end=False)
        await call.wait_end()
        assert call.status == ABORTED
        assert not session.ended
    assert seen.calls[0].reason == "SENDER_STALLED"


@pytest.mark.slow
async def test_a_client_that_reads_slowly_does_not() -> None:
    """In all it takes longer than a message may wait."""
    async with (
        make_engine() as engine,
        serving(engine, stall_seconds=1.0) as serve,
        raw_connection(serve.server.address, window=0) as connection,
    ):
        call = await stall(connection, 1)
        for _ in range(6):
            before = call.num_bytes
            connection.h2.increment_flow_control_window(40, call.stream_id)
            await connection.flush()
            await until(lambda: call.num_bytes == before + 40)  # noqa: B023
            await asyncio.sleep(0.2)
        await call.open()
        check_whole(engine, 1, await call.events())
