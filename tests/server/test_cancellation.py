"""Requests that are given up, in every phase of their life and in every way a client has: nothing of them may stay.

Steps are held by a gate, so a request is where the test wants it; the client is raw HTTP/2, so that nothing is done for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from grpc_harness import OVER_A_ROUTER, Serving, events_of, serving
from oracle_engine import Ahead, OracleEngine, StepGate, busy_worker, step_with_the_loop, until
from oracle_requests import check_whole, nothing_left, oracle_request
from raw_h2 import GENERATION, RawCall, RawConnection, framed, raw_connection
from slow_cases import slow_but
from speculating import also_with_drafts

from aengine import SamplingParams
from aengine.api.outputs import RequestState
from aengine.engine import requests
from aengine.engine.edges import Cancel
from aengine.v1.generation_pb2 import FINISH_REASON_CANCELLED
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, GenerateRequest, GenerateResponse, StreamGenerateRequest

pytestmark = pytest.mark.anyio

MINE = "mine"
BUSY = 99  # seed of the request that keeps the engine busy, where there is one
Release = Callable[[], object]
Phase = Callable[[OracleEngine], AbstractAsyncContextManager[tuple[StreamGenerateRequest, Callable[[], bool], Release]]]


def in_state(engine: OracleEngine, state: RequestState) -> bool:
    info = engine.request_info(MINE)
    return info is not None and info.state is state


# Each phase yields the request, how to see that it is in the phase, and what lets the engine go on.


@asynccontextmanager
async def preparing(engine: OracleEngine) -> AsyncIterator[tuple[StreamGenerateRequest, Callable[[], bool], Release]]:
    """Its text waits for the tokenizer's worker."""
    if OVER_A_ROUTER.get():
        pytest.skip("a router has the ids before the engine gets the request")
    request = oracle_request(1, request_id=MINE)
    request.spec.prompt.text = "!" * (requests.INLINE_CHARACTERS + 1)
    with busy_worker(engine) as go_on:
        yield request, lambda: in_state(engine, RequestState.PREPARING), go_on


@asynccontextmanager
async def queued(engine: OracleEngine) -> AsyncIterator[tuple[StreamGenerateRequest, Callable[[], bool], Release]]:
    """It waits for its first step, behind one that is held."""
    gate = StepGate(engine)
    async with engine.stream([1], SamplingParams(seed=BUSY, ignore_eos=True)):
        await until(gate.held.is_set)
        yield oracle_request(1, request_id=MINE), lambda: in_state(engine, RequestState.WAITING), gate.open
        gate.open()


@asynccontextmanager
async def in_prefill(engine: OracleEngine) -> AsyncIterator[tuple[StreamGenerateRequest, Callable[[], bool], Release]]:
    """The second of the four chunks of its prompt is held."""
    gate = StepGate(engine, at=1)
    request = oracle_request(1, prompt=[i % 50 for i in range(4 * 64)], request_id=MINE)
    yield request, gate.held.is_set, gate.open
    gate.open()


@asynccontextmanager
async def decoding(engine: OracleEngine) -> AsyncIterator[tuple[StreamGenerateRequest, Callable[[], bool], Release]]:
    """The step of its sixth token is held."""
    gate = StepGate(engine, at=5)
    yield oracle_request(1, request_id=MINE), gate.held.is_set, gate.open
    gate.open()


PHASES = [(preparing, "plain"), (queued, "plain"), (in_prefill, "plain"), (decoding, "plain"), (decoding, "drafts")]


def in_phases(test: Callable[..., object]) -> Callable[..., object]:
    return pytest.mark.usefixtures("speculation")(pytest.mark.parametrize(("phase", "speculation"), PHASES, indirect=["speculation"])(test))


# Each way gives the request up; deadlines do so by themselves.


async def by_reset(call: RawCall, connection: RawConnection, serve: Serving) -> None:
    await call.reset()


async def by_abort(call: RawCall, connection: RawConnection, serve: Serving) -> None:
    connection.abort()


async def by_close(call: RawCall, connection: RawConnection, serve: Serving) -> None:
    await connection.close()


async def by_deadline(call: RawCall, connection: RawConnection, serve: Serving) -> None:
    await call.wait_end()  # the client does not act on it, so it is the server's


DEADLINE = (("grpc-timeout", "300m"),)
WAYS = [by_reset, by_abort, by_close, by_deadline]


def was_noticed(engine: OracleEngine) -> bool:
    """Whether the engine was told; what is with the step thread is in its mailbox while a step is held."""
    return any(isinstance(command, Cancel) for command in [*engine._core.steps._mailbox._commands]) or engine.request_info(MINE) is None


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("way", "method", "ahead"),
    slow_but(
        lambda case: case[1:] == ("StreamGenerate", Ahead.HOST) or case[:2] == (by_reset, "Generate"),
        [(way, *called) for way in WAYS for called in [*(("StreamGenerate", ahead) for ahead in Ahead), ("Generate", Ahead.NEVER)]],
    ),
)
@in_phases
async def test_a_request_that_is_given_up(phase: Phase, way: Callable[..., object], method: str, ahead: Ahead) -> None:
    async with OracleEngine(ahead=ahead) as engine, serving(engine) as serve:
        async with phase(engine) as (request, reached, go_on), raw_connection(serve.server.address) as connection:
            message = framed(request)  # the two requests have the same fields
            headers = DEADLINE if way is by_deadline else ()
            call = await connection.call(GENERATION + method, message, headers=headers)
            await until(reached)
            await way(call, connection, serve)  # type: ignore[misc]
            await until(lambda: was_noticed(engine))
            go_on()
            if way is by_deadline:
                assert call.status in (4, None)
                assert call.status == 4 or call.reset_code == 8
            await until(lambda: engine.request_info(MINE) is None and serve.server.in_flight == 0)
            if phase in (preparing, queued):
                assert engine.stats().prompt_tokens == (phase is queued), "it was computed"
        await until(lambda: nothing_left(engine))
        check_whole(engine, 2, await events_of(serve.generation.StreamGenerate(oracle_request(2, request_id=MINE))))


@in_phases
async def test_cancel_requests_in_every_phase(phase: Phase) -> None:
    """From another connection; the stream ends as a result, and the answer to the canceller comes when the pages are free."""
    async with OracleEngine() as engine, serving(engine) as serve:
        async with phase(engine) as (request, reached, go_on), raw_connection(serve.server.address) as connection:
            call = await connection.call(GENERATION + "StreamGenerate", framed(request))
            await until(reached)
            cancel = asyncio.ensure_future(serve.generation.CancelRequests(CancelRequestsRequest(request_ids=[MINE])))
            await until(lambda: was_noticed(engine))
            go_on()
            assert list((await cancel).cancelled_request_ids) == [MINE]
            assert engine.request_info(MINE) is None
            events = await call.events()
            assert call.status == 0
            assert [event.event_number for event in events] == list(range(len(events)))
            assert events[-2].sequence_finished.finish.reason == FINISH_REASON_CANCELLED
            assert events[-1].HasField("finished")
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)


@also_with_drafts
async def test_cancel_requests_of_one_whose_client_does_not_read() -> None:
    """Its pages are free at once; its call ends when the client reads or leaves."""
    async with OracleEngine(max_unread_tokens=8) as engine, serving(engine) as serve:
        step_with_the_loop(engine)
        async with raw_connection(serve.server.address, window=0) as connection:
            calls = []
            for seed in (1, 2):
                request = oracle_request(seed, request_id=f"stalled-{seed}")
                calls.append(await connection.call(GENERATION + "StreamGenerate", framed(request), greedy=False))
            await until(lambda: engine.stats().parked == 2)
            response = await serve.generation.CancelRequests(CancelRequestsRequest(request_ids=["stalled-1", "stalled-2"]))
            assert len(response.cancelled_request_ids) == 2
            assert nothing_left(engine)
            assert serve.server.in_flight == 2
            await calls[0].open()
            events = await calls[0].events()
            assert events[-2].sequence_finished.finish.reason == FINISH_REASON_CANCELLED
            await until(lambda: serve.server.in_flight == 1)
        await until(lambda: serve.server.in_flight == 0)


@pytest.mark.parametrize("way", [by_reset, by_abort, by_close])
async def test_leaving_between_the_last_token_and_the_status(way: Callable[..., object]) -> None:
    """The client's window has no room for the end of the stream."""
    async with OracleEngine() as engine, serving(engine) as serve:
        async with raw_connection(serve.server.address, window=0) as connection:
            call = await connection.call(GENERATION + "StreamGenerate", framed(oracle_request(1, max_tokens=3)), greedy=False)
            await until(lambda: 1 in engine.runner.truths and nothing_left(engine))
            assert serve.server.in_flight == 1
            await way(call, connection, serve)  # type: ignore[misc]
            await until(lambda: serve.server.in_flight == 0)
        assert nothing_left(engine)


async def test_leaving_right_after_the_last_event() -> None:
    async with OracleEngine() as engine, serving(engine) as serve, raw_connection(serve.server.address) as connection:
        for seed in range(20):
            call = await connection.call(GENERATION + "StreamGenerate", framed(oracle_request(seed, max_tokens=2)))
            while not (event := await call.event()).HasField("finished"):  # type: ignore[union-attr]
                assert event is not None
            if not call.ended:
                await call.reset()
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)


async def test_a_deadline_that_has_passed_computes_nothing() -> None:
    async with OracleEngine() as engine, serving(engine) as serve, raw_connection(serve.server.address) as connection:
        await engine.pause()  # gRPC rounds the deadline up to a millisecond, in which a prompt can be computed
        call = await connection.call(GENERATION + "Generate", framed(oracle_request(1)), headers=(("grpc-timeout", "1n"),))
        await call.wait_end()
        assert call.status == 4 or call.reset_code is not None
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)  # an engine behind a router hears of the end later
        await engine.unpause()
        assert engine.stats().prompt_tokens == 0


@pytest.mark.quick_cases(1)
@also_with_drafts
async def test_a_crowd_that_leaves_in_every_way_at_once() -> None:
    """Ten connections with six requests each: those that stay are whole, and nothing is left of the others."""
    async with OracleEngine(num_pages=600, max_unread_tokens=8, ahead=Ahead.DEVICE) as engine, serving(engine) as serve:

        async def client(number: int) -> None:
            async with raw_connection(serve.server.address) as connection:
                calls = []
                for i in range(6):
                    seed = number * 6 + i
                    headers = (("grpc-timeout", f"{5 + 10 * i}m"),) if number % 5 == 3 else ()
                    body = framed(oracle_request(seed, max_tokens=30))
                    calls.append(await connection.call(GENERATION + "StreamGenerate", body, headers=headers, greedy=number % 2 == 0))
                match number % 5:
                    case 0:
                        for i, call in enumerate(calls):
                            check_whole(engine, number * 6 + i, await call.events())
                    case 1:
                        for call in calls:
                            await call.event()
                            await call.reset()
                    case 2:
                        await calls[-1].event()
                        connection.abort()
                    case 3:
                        for call in calls:
                            await call.wait_end()
                    case _:
                        await calls[0].event()
                        await connection.close()

        await asyncio.gather(*map(client, range(10)))
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)
        answer = await serve.generation.Generate(GenerateRequest(spec=oracle_request(500, max_tokens=9).spec))
        assert isinstance(answer, GenerateResponse)
        assert list(answer.sequences[0].token_ids) == engine.solo(500)[0]
