"""Resumable streams: readers that come and go, what is kept of a generation, in which bounds, and how it ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine, FakeStream, tokens
from grpc import aio
from grpc_harness import Failure, Serving, events_of, failure_of, serving, text_spec
from hang_guard import HANG_SECONDS, growing
from oracle_engine import OracleEngine, StepGate, idle, step_with_the_loop, until
from speculating import also_with_drafts

from aengine.api.errors import EngineDeadError, InvalidRequestError, QueueFullError
from aengine.api.outputs import FinishReason, Token
from aengine.server.core.calls_in_flight import Caller
from aengine.server.core.resume import GENERATION_BYTES, ResumableStreams, ResumeLimits
from aengine.v1.generation_pb2 import FINISH_REASON_CANCELLED, GenerationEvent, GenerationSpec, OutputOptions, StreamOptions
from aengine.v1.generation_service_pb2 import (
    REQUEST_STATE_FINISHED,
    CancelRequestsRequest,
    GenerateRequest,
    GetRequestRequest,
    ResumeGenerateRequest,
    StreamGenerateRequest,
)

pytestmark = pytest.mark.anyio

ANYONE = Caller()


def resumable(request_id: str | None = "mine", *, retain: float | None = None, **fields: Any) -> StreamGenerateRequest:
    spec = text_spec(stream=StreamOptions(resumable=True, max_tokens_per_delta=1), **fields)
    if retain is not None:
        spec.stream.retain.FromNanoseconds(round(retain * 1e9))
    return StreamGenerateRequest(spec=spec, request_id=request_id)


def rest(first: GenerationEvent, number: int, **other: Any) -> ResumeGenerateRequest:
    started = first.started
    fields = {"request_id": started.request_id, "resume_token": started.resume_token, "next_event_number": number, **other}
    return ResumeGenerateRequest(**fields)


def streams_of(serve: Serving) -> ResumableStreams:
    return serve.server.resumables


def has_reader(serve: Serving, request_id: str = "mine") -> bool:
    found = streams_of(serve).find(request_id, ANYONE)
    return found is not None and found.replay.has_reader


async def read(call: Any, count: int) -> list[GenerationEvent]:
    return [(await anext(aiter(call))).event for _ in range(count)]


async def read_all(call: Any, events: list[GenerationEvent]) -> None:
    async for response in call:
        events.append(response.event)


async def refused(call: Any) -> Failure:
    with pytest.raises(aio.AioRpcError) as caught:
        await events_of(call)
    return failure_of(caught.value)


@asynccontextmanager
async def limited(engine: Any, **limits: int) -> AsyncIterator[Serving]:
    """A server that keeps so much: `events` and `bytes` of a generation, `kept_bytes` of all."""
    async with serving(engine) as serve:
        streams_of(serve)._limits = ResumeLimits(**limits)
        yield serve


@pytest.fixture(autouse=True)
async def nothing_is_lost() -> AsyncIterator[None]:
    """What asyncio could only log, above all errors of tasks that nobody waited for, fails the test."""
    lost: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: lost.append(context))
    yield
    gc.collect()
    assert not lost


# ---- readers that come and go --------------------------------------------------------------------------------------------


async def test_a_reader_that_left_takes_the_stream_up_while_it_goes_on(engine: FakeEngine) -> None:
    script = tokens("a", "b", "c", "d", "e", "f")
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(resumable())
        stream = await engine.submitted.get()
        stream.push(script[:2])
        events = await read(call, 3)
        call.cancel()
        await until(lambda: not has_reader(serve))
        stream.push(script[2:4])  # while nobody reads
        await until(lambda: not stream.unread)
        resumed = serve.generation.ResumeGenerate(rest(events[0], 3))
        events += await read(resumed, 2)
        stream.push(script[4:])  # while it is read
        events += await events_of(resumed)
        assert [event.event_number for event in events] == list(range(9))
        assert "".join(event.delta.text for event in events) == "abcdef"
        assert events == await events_of(serve.generation.ResumeGenerate(rest(events[0], 0)))
        assert serve.server.in_flight == 0


async def test_after_the_last_event_there_is_nothing_to_resume_and_that_is_no_error(engine: FakeEngine) -> None:
    engine.script = tokens("a")
    async with serving(engine) as serve:
        events = await events_of(serve.generation.StreamGenerate(resumable()))
        assert await events_of(serve.generation.ResumeGenerate(rest(events[0], len(events)))) == []


async def test_a_token_is_given_to_those_alone_that_ask_for_it_and_never_twice(engine: FakeEngine) -> None:
    engine.script = tokens("a")
    async with serving(engine) as serve:
        plain = await events_of(serve.generation.StreamGenerate(StreamGenerateRequest(spec=text_spec())))
        given = {(await events_of(serve.generation.StreamGenerate(resumable(None))))[0].started.resume_token for _ in range(10)}
        await serve.generation.Generate(GenerateRequest(spec=resumable().spec, request_id="unary"))  # does not heed the option
        assert streams_of(serve).find("unary", ANYONE) is None
    assert plain[0].started.resume_token == b""
    assert len(given) == 10
    assert {len(token) for token in given} == {16}


async def test_a_second_reader_replaces_the_first(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        first = serve.generation.StreamGenerate(resumable())
        stream = await engine.submitted.get()
        stream.push(tokens("a", "b")[:1])
        events = await read(first, 2)
        second = serve.generation.ResumeGenerate(rest(events[0], 1))
        assert (await read(second, 1)) == events[1:]
        failure = await refused(first)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "READER_REPLACED")
        assert has_reader(serve)  # the second; that the first has left is nothing to it
        stream.push(tokens("a", "b")[1:])
        assert [event.event_number for event in await events_of(second)] == [2, 3, 4]


@pytest.mark.slow
async def test_the_deadline_of_a_call_ends_the_call_alone(engine: FakeEngine) -> None:
    for timeout in growing(0.2):
        async with serving(engine) as serve:
            call = serve.generation.StreamGenerate(resumable(), timeout=timeout)
            events: list[GenerationEvent] = []
            with pytest.raises(aio.AioRpcError) as caught:
                await read_all(call, events)
            if not events:
                continue
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            while not engine.submitted.empty():  # the last of them
                stream = engine.submitted.get_nowait()
            assert stream.call["timeout"] is None
            stream.push(tokens("a"))
            assert len(await events_of(serve.generation.ResumeGenerate(rest(events[0], 1)))) == 3
            break


async def test_who_leaves_before_the_first_event_leaves_nothing(engine: FakeEngine) -> None:
    holding = asyncio.Event()
    engine.stream = held(engine, holding)  # type: ignore[method-assign]
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(resumable())
        stream = await engine.submitted.get()
        call.cancel()
        await stream.closed.wait()
        await until(lambda: serve.server.in_flight == 0)
        assert streams_of(serve).find("mine", ANYONE) is None


def held(engine: FakeEngine, holding: asyncio.Event) -> Callable[..., FakeStream]:
    """The engine's `stream`, whose prompts are being prepared until `holding` is set."""
    submit = engine.stream

    def stream(*args: Any, **options: Any) -> FakeStream:
        made = submit(*args, **options)
        made.started = holding.wait  # type: ignore[method-assign, assignment]
        return made

    return stream


# ---- what is refused -----------------------------------------------------------------------------------------------------


async def test_who_may_resume_what(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(resumable())
        (first,) = await read(call, 1)
        plain = serve.generation.StreamGenerate(StreamGenerateRequest(spec=text_spec(), request_id="plain"))
        await read(plain, 1)
        token = first.started.resume_token
        for request, code, reason in (
            (rest(first, 0, resume_token=bytes(16)), grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND"),
            (rest(first, 0, resume_token=token[:-1]), grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND"),
            (rest(first, 0, request_id="other"), grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND"),
            (rest(first, 0, request_id="plain"), grpc.StatusCode.FAILED_PRECONDITION, "NOT_RESUMABLE"),
            (rest(first, 2), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
            (ResumeGenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        ):
            failure = await refused(serve.generation.ResumeGenerate(request))
            assert (failure.code, failure.reason) == (code, reason)
            if request == rest(first, 2):
                assert failure.fields == ["next_event_number"]
                assert "2 is not yet known; the next event is 1" in failure.message
            elif not request.request_id:
                assert failure.fields == ["request_id", "resume_token"]
        assert has_reader(serve)  # which none of these has replaced
        for other in (call, plain):
            other.cancel()


async def test_what_the_engine_refuses_is_told_and_nothing_is_kept(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        for refusal, code in (
            (InvalidRequestError.of("top_k", "is bad"), grpc.StatusCode.INVALID_ARGUMENT),
            (QueueFullError("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            engine.refusal = refusal
            failure = await refused(serve.generation.StreamGenerate(resumable()))
            assert failure.code is code
            assert streams_of(serve).find("mine", ANYONE) is None
        bad = resumable(retain=601)
        bad.spec.sampling.top_p = 2
        failure = await refused(serve.generation.StreamGenerate(bad))
        assert failure.fields == ["spec.sampling.top_p", "spec.stream.retain"]
        assert serve.server.in_flight == 0


async def test_a_generation_that_failed_ends_the_same_for_every_reader(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(engine) as serve:
        for error, code in ((EngineDeadError("gone"), grpc.StatusCode.ABORTED), (KeyError("a bug"), grpc.StatusCode.INTERNAL)):
            engine.script = [*tokens("a", "b")[:1], error]
            call = serve.generation.StreamGenerate(resumable())
            events = await read(call, 2)
            failures = [await refused(call)]
            for _ in range(2):
                resumed = serve.generation.ResumeGenerate(rest(events[0], 0))
                assert await read(resumed, 2) == events
                failures.append(await refused(resumed))
            assert failures[0].code is code
            assert [(failure.message, failure.info) for failure in failures] == [(failures[0].message, failures[0].info)] * 3
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


# ---- bounds --------------------------------------------------------------------------------------------------------------


async def test_events_that_were_sent_are_dropped_when_there_are_too_many(engine: FakeEngine) -> None:
    engine.script = tokens(*"abcdefghijklmnop")
    async with limited(engine, events=8) as serve:
        events = await events_of(serve.generation.StreamGenerate(resumable()))
        assert len(events) == 19
        failure = await refused(serve.generation.ResumeGenerate(rest(events[0], 10)))
        assert (failure.code, failure.reason) == (grpc.StatusCode.DATA_LOSS, "EVENTS_DROPPED")
        assert await events_of(serve.generation.ResumeGenerate(rest(events[0], 11))) == events[11:]


@pytest.mark.quick_cases(1)
@also_with_drafts
async def test_without_a_reader_the_request_parks_and_goes_on_when_one_comes() -> None:
    """And nothing that was not sent is lost."""
    async with OracleEngine(max_unread_tokens=16) as engine, limited(engine, events=64) as serve:
        gate = StepGate(engine)
        call = serve.generation.StreamGenerate(oracle_request())
        (first,) = await read(call, 1)
        call.cancel()
        await until(lambda: not has_reader(serve))
        step_with_the_loop(engine)
        gate.open()
        found = streams_of(serve).find("mine", ANYONE)
        assert found is not None
        # Half the ring waits to be sent. Before that the request may be parked for a moment.
        await until(lambda: found.replay.ring.end == 1 + 32 and engine.stats().parked == 1)
        events = [first, *await events_of(serve.generation.ResumeGenerate(rest(first, 1)))]
        assert [event.event_number for event in events] == list(range(len(events)))
        assert [token_id for event in events for token_id in event.delta.token_ids] == engine.solo(3)[0]
        assert found.replay.ring.end - found.replay.ring.first == 64
        assert idle(engine)


def oracle_request() -> StreamGenerateRequest:
    spec = GenerationSpec(output=OutputOptions(token_ids=True), stream=StreamOptions(resumable=True, max_tokens_per_delta=1))
    spec.prompt.token_ids.ids.extend([3, 1, 4])
    spec.sampling.seed, spec.stopping.max_tokens, spec.stopping.ignore_eos = 3, 300, True
    return StreamGenerateRequest(spec=spec, request_id="mine")


async def test_a_reader_that_does_not_read_holds_the_generation_up(engine: FakeEngine) -> None:
    """The bytes that wait are bounded, and nothing is lost when it reads on."""
    engine.script = [Token(0, 10, "x" * 10_000)] * 2000 + tokens("end")
    async with limited(engine, bytes=256 * 1024) as serve:
        call = serve.generation.StreamGenerate(resumable())
        stream = await engine.submitted.get()
        events = await read(call, 1)
        found = streams_of(serve).find("mine", ANYONE)
        assert found is not None
        ring = found.replay.ring
        await until(lambda: not ring.has_room)
        assert ring.num_bytes <= 256 * 1024
        assert stream.unread > 0
        events += await events_of(call)
        assert len(events) == 1 + 2001 + 2
        assert [event.event_number for event in events] == list(range(len(events)))
        assert ring.num_bytes <= 256 * 1024


async def test_what_is_over_is_dropped_oldest_first_when_it_takes_too_much(engine: FakeEngine) -> None:
    engine.script = [Token(0, 10, "x" * 10_000, finish_reason=FinishReason.EOS)]
    one = GENERATION_BYTES + 10_000
    async with limited(engine, kept_bytes=one * 7 // 2) as serve:
        names = [f"r{index}" for index in range(6)]
        firsts = [(await events_of(serve.generation.StreamGenerate(resumable(name))))[0] for name in names]
        assert [streams_of(serve).find(name, ANYONE) is not None for name in names] == [False] * 3 + [True] * 3
        assert 3 * one < streams_of(serve).kept_bytes < one * 7 // 2
        assert (await refused(serve.generation.ResumeGenerate(rest(firsts[2], 0)))).reason == "REQUEST_NOT_FOUND"
        assert len(await events_of(serve.generation.ResumeGenerate(rest(firsts[3], 0)))) == 4


async def test_without_a_reader_a_request_is_cancelled_after_its_time(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(resumable(retain=0.05))
        stream = await engine.submitted.get()
        (first,) = await read(call, 1)
        found = streams_of(serve).find("mine", ANYONE)
        assert found is not None
        assert found.timer is None  # no time runs while there is a reader
        call.cancel()
        await stream.closed.wait()
        await until(lambda: serve.server.in_flight == 0)
        assert (await refused(serve.generation.ResumeGenerate(rest(first, 0)))).reason == "REQUEST_NOT_FOUND"


async def test_what_is_over_is_dropped_after_its_time(engine: FakeEngine) -> None:
    engine.script = tokens("a")
    async with serving(engine) as serve:
        (first, *_) = await events_of(serve.generation.StreamGenerate(resumable(retain=0.05)))
        await until(lambda: streams_of(serve).find("mine", ANYONE) is None)
        assert streams_of(serve).kept_bytes == 0
        assert (await refused(serve.generation.ResumeGenerate(rest(first, 0)))).reason == "REQUEST_NOT_FOUND"
        (first, *_) = await events_of(serve.generation.StreamGenerate(resumable("other")))
        assert len(await events_of(serve.generation.ResumeGenerate(rest(first, 0)))) == 4  # within its minute


# ---- ends ----------------------------------------------------------------------------------------------------------------


@also_with_drafts
async def test_cancel_requests_ends_a_request_that_nobody_reads() -> None:
    async with OracleEngine() as engine, serving(engine) as serve:
        gate = StepGate(engine)
        call = serve.generation.StreamGenerate(oracle_request())
        (first,) = await read(call, 1)
        call.cancel()
        await until(lambda: not has_reader(serve))
        cancelling = serve.generation.CancelRequests(CancelRequestsRequest(request_ids=["mine"]))
        gate.open()
        assert list((await cancelling).cancelled_request_ids) == ["mine"]
        events = await events_of(serve.generation.ResumeGenerate(rest(first, 1)))
        assert events[-2].sequence_finished.finish.reason == FINISH_REASON_CANCELLED
        assert idle(engine)
        assert serve.server.in_flight == 0


async def test_a_request_of_the_same_name_takes_nothing_from_the_one_before(engine: FakeEngine) -> None:
    """Who knows the name may be a stranger; who knows the token is not."""
    engine.script = tokens("a")
    async with serving(engine) as serve:
        old = await events_of(serve.generation.StreamGenerate(resumable()))
        new = await events_of(serve.generation.StreamGenerate(resumable()))
        engine.script = []
        call = serve.generation.StreamGenerate(resumable())
        newest = await read(call, 1)
        for events in (old, new):
            assert await events_of(serve.generation.ResumeGenerate(rest(events[0], 0))) == events
        assert (await serve.generation.GetRequest(GetRequestRequest(request_id="mine"))).next_event_number == 1
        assert await read(serve.generation.ResumeGenerate(rest(newest[0], 0)), 1) == newest
        stream = engine.streams["mine"]
        call.cancel()
        stream.push(tokens("b"))
        await until(lambda: streams_of(serve).kept_bytes > 3 * GENERATION_BYTES)


async def test_a_drain_waits_for_what_nobody_reads_and_it_can_still_be_resumed(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(resumable())
        stream = await engine.submitted.get()
        (first,) = await read(call, 1)
        call.cancel()
        await until(lambda: not has_reader(serve))
        assert not await serve.server.drain(0)
        resumed = serve.generation.ResumeGenerate(rest(first, 1))
        stream.push(tokens("a"))
        assert len(await events_of(resumed)) == 3
        assert await serve.server.drain(HANG_SECONDS)


async def test_a_drain_waits_until_the_reader_was_sent_everything(engine: FakeEngine) -> None:
    """The generation is long over, and all of it in the ring."""
    engine.script = [Token(0, 10, "x" * 100_000)] * 78 + tokens("end")
    async with limited(engine, bytes=16 * 1024 * 1024) as serve:
        call = serve.generation.StreamGenerate(resumable())
        stream = await engine.submitted.get()
        await read(call, 1)
        found = streams_of(serve).find("mine", ANYONE)
        assert found is not None
        await until(lambda: stream.ended and found.replay.ring.end == 82)
        assert not await serve.server.drain(0)
        assert len(await events_of(call)) == 81
        assert await serve.server.drain(HANG_SECONDS)


async def test_the_stop_of_the_server_ends_what_nobody_reads(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        for name, script in (("endless", []), ("over", tokens("a"))):
            engine.script = script
            call = serve.generation.StreamGenerate(resumable(name))
            stream = await engine.submitted.get()
            await read(call, 1)
            call.cancel()
        await until(lambda: streams_of(serve).kept_bytes > 0)
        assert serve.server.in_flight == 1
        await serve.server.stop()
        assert serve.server.in_flight == 0
        assert not engine.streams
        assert stream.closed.is_set()
        assert (streams_of(serve).kept_bytes, streams_of(serve).find("over", ANYONE), streams_of(serve).find("endless", ANYONE)) == (
            0,
            None,
            None,
        )


async def test_get_request_knows_what_is_kept(engine: FakeEngine) -> None:
    engine.script = tokens("a", "b")
    async with serving(engine) as serve:
        await events_of(serve.generation.StreamGenerate(resumable()))
        told = await serve.generation.GetRequest(GetRequestRequest(request_id="mine"))
        assert (told.state, told.resumable, told.next_event_number) == (REQUEST_STATE_FINISHED, True, 5)
        assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (3, 2)
