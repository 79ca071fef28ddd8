"""Session: who is told what, in which message; the engine is a script."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from event_fold import EventFold
from fake_engine import FakeEngine, tokens
from grpc import aio
from grpc_harness import serving, stream_request
from hang_guard import HANG_SECONDS, growing
from oracle_engine import until
from session_client import SessionClient, begin, cancellation, hold, kinds, more_credit, opening, submission

from aengine.api.outputs import FinishReason, Token, TokenLogprob
from aengine.server.core.calls_in_flight import Admission, GenerationRecord, Observers
from aengine.server.core.core import Backend
from aengine.server.grpc.generation import session
from aengine.server.grpc.generation.events import MAX_PROMPT_LOGPROBS_BYTES
from aengine.server.grpc.generation.session import session_responses
from aengine.v1.generation_pb2 import FINISH_REASON_CANCELLED, LogprobOptions, OutputOptions, StreamOptions
from aengine.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.anyio

A_TOKEN = [Token(0, 10, "a")]


class TestMessages:
    async def test_what_comes_at_once_is_one_message(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            first, second, third = await begin(client, engine, 7, 8, 2**64 - 1)
            for stream in (first, second, third):
                stream.push(A_TOKEN)
            assert kinds(await client.read()) == [(7, "delta"), (8, "delta"), (2**64 - 1, "delta")]
            third.push(tokens("b"))
            second.push(A_TOKEN * 2)
            ending = [(2**64 - 1, kind) for kind in ("delta", "sequence_finished", "finished")]
            assert kinds(await client.read()) == [*ending, (8, "delta"), (8, "delta")]
            client.call.cancel()

    async def test_the_events_of_a_tag_are_those_of_a_stream(self, engine: FakeEngine) -> None:
        engine.script = [
            Token(1, 5, "x", logprob=-1.5, rank=2, top_logprobs={6: -0.5, 5: -1.5}),
            Token(0, 6, "y", logprob=-0.5, rank=1, top_logprobs={6: -0.5, 5: -1.5}, finish_reason=FinishReason.EOS),
            Token(1, 7, "z", logprob=-2.5, rank=9, top_logprobs={1: -0.25, 2: -0.5}, finish_reason=FinishReason.STOP_STRING),
        ]
        engine.prompt_logprobs = (None, TokenLogprob(0, -0.5, 2, {1: -0.25}))
        output = OutputOptions(token_ids=True, prompt_logprobs=LogprobOptions(top_k=1), effective_params=True)
        async with serving(engine) as serve:
            request = stream_request(request_id="r", output=output)
            streamed = [response.event async for response in serve.generation.StreamGenerate(request)]
            unary = await serve.generation.Generate(GenerateRequest(spec=request.spec, request_id="r"))
            client = SessionClient(serve)
            await client.say(opening(), submission(3, request))
            events = (await client.finish())[3]
            assert serve.server.in_flight == 0
        assert [event.event_number for event in events] == list(range(8))
        fold = EventFold()
        for event in events:
            fold.add(event)
        folded = fold.response()
        for told in (*events, *streamed):
            told.finished.ClearField("timing")
        assert [told.SerializeToString() for told in events] == [told.SerializeToString() for told in streamed]
        for response in (folded, unary):
            response.ClearField("timing")
        assert folded.SerializeToString() == unary.SerializeToString()  # bytes, for the NaN equals itself

    async def test_tokens_that_are_there_share_a_delta_if_asked(self, engine: FakeEngine) -> None:
        engine.script = tokens(*"abcde")
        async with serving(engine) as serve:
            client = SessionClient(serve)
            await client.say(opening(), submission(1, stream_request(stream=StreamOptions(max_tokens_per_delta=3))))
            events = (await client.finish())[1]
        assert [event.delta.text for event in events if event.HasField("delta")] == ["abc", "de"]

    async def test_large_messages_are_split(self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session, "MESSAGE_BYTES", 1000)
        engine.script = tokens(*["x"] * 50)
        async with serving(engine) as serve:
            client = SessionClient(serve)
            await client.say(opening(), *(submission(tag, stream_request(request_id=f"r{tag}")) for tag in range(10)))
            sizes = []
            await client.call.done_writing()
            while (response := await client.read()) is not None:
                sizes.append(len({entry.tag for entry in response.events}))
            assert sizes == [1] * 10
        for events in client.events.values():
            assert [event.event_number for event in events] == list(range(53))

    async def test_logprobs_count_for_the_size(self, engine: FakeEngine) -> None:
        top = {2**31 - i: -0.5 for i in range(20)}
        engine.script = [Token(0, 10, "", logprob=-1.5, rank=2, top_logprobs=top)] * 63 + tokens("a")
        output = OutputOptions(logprobs=LogprobOptions(top_k=20))
        async with serving(engine) as serve:
            client = SessionClient(serve)
            requests = (stream_request(request_id=f"r{tag}", output=output) for tag in range(200))
            await client.say(opening(0), *(submission(tag, request) for tag, request in enumerate(requests)))
            await until(lambda: len(engine.streams) == 200)
            await client.say(more_credit(1000))
            await client.call.done_writing()
            while (response := await client.read()) is not None:
                assert response.ByteSize() < 1024 * 1024
        assert {len(events) for events in client.events.values()} == {67}

    async def test_logprobs_of_a_prompt_are_messages_of_their_own(self, engine: FakeEngine) -> None:
        count = 3 * MAX_PROMPT_LOGPROBS_BYTES // 9
        engine.prompt_logprobs = (None, *(TokenLogprob(0, -0.5, 2**31 - 1, {}) for _ in range(1, count)))
        engine.script = tokens("a")
        request = stream_request(output=OutputOptions(prompt_logprobs=LogprobOptions()))
        async with serving(engine) as serve:
            client = SessionClient(serve)
            await client.say(opening(1), submission(1, request), submission(2, request))
            while not all(client.events[tag] and client.events[tag][-1].HasField("finished") for tag in (1, 2)):
                response = await client.read()
                assert response is not None
                assert sum(entry.event.HasField("prompt_logprobs") for entry in response.events) <= 1
                assert response.ByteSize() < 2 * MAX_PROMPT_LOGPROBS_BYTES
                await client.say(more_credit(1))  # each of them needs it
            await client.finish()
        for tag in (1, 2):
            names = [event.WhichOneof("event") for event in client.events[tag]]
            assert names == ["started", *["prompt_logprobs"] * 4, "delta", "sequence_finished", "finished"]


class TestCourse:
    async def test_nothing_is_asked(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            await client.say(opening())
            assert await client.finish() == {}
            assert await client.call.code() is grpc.StatusCode.OK

    async def test_closing_the_half_lets_requests_finish(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            first, second = await begin(client, engine, 1, 2)
            await client.call.done_writing()
            for stream in (second, first):
                stream.push(tokens("a"))
                await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)
            assert {tag: len(events) for tag, events in (await client.finish()).items()} == {1: 4, 2: 4}
            assert await client.call.code() is grpc.StatusCode.OK
            assert serve.server.in_flight == 0

    async def test_a_cancelled_request_ends_with_it(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            cancelled, other = await begin(client, engine, 1, 2)
            await client.say(cancellation(99), cancellation(1))
            await client.read_until(1, "finished")
            assert client.events[1][-2].sequence_finished.finish.reason == FINISH_REASON_CANCELLED
            await client.say(cancellation(1))  # which has just ended
            await asyncio.wait_for(cancelled.closed.wait(), HANG_SECONDS)
            other.push(tokens("a"))
            assert len((await client.finish())[2]) == 4

    async def test_nothing_is_read_without_credit(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            first, second = await begin(client, engine, 1, 2, credit=0)
            for stream in (first, second):
                stream.push(A_TOKEN)
            await client.say(cancellation(99), submission(3, stream_request()))
            third = await engine.submitted.get()  # so that all of this has arrived
            assert [stream.unread for stream in (first, second)] == [1, 1]
            await client.say(more_credit(1))
            assert [(tag, kind) for tag, kind in kinds(await client.read()) if tag < 3] == [
                (1, "started"), (1, "delta"), (2, "started"), (2, "delta"),
            ]  # fmt: skip
            for stream in (first, second, third):
                stream.push(tokens("b"))
            await client.say(submission(4, stream_request()))
            await engine.submitted.get()
            assert [stream.unread for stream in (first, second, third)] == [1, 1, 1]
            await client.say(cancellation(4), more_credit(10))
            assert [len(events) for _, events in sorted((await client.finish()).items())] == [5, 5, 4, 3]

    async def test_nothing_is_read_from_what_is_held(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            first, second = await begin(client, engine, 1, 2)
            await client.say(hold(1), hold(1), hold(99), hold(99, False), submission(3, stream_request()))
            await client.read_until(3, "started")  # so that all of this has arrived
            for stream in (first, second):
                stream.push(A_TOKEN)
            assert kinds(await client.read()) == [(2, "delta")]
            assert first.unread == 1
            await client.say(hold(1, False), hold(1, False))
            assert kinds(await client.read()) == [(1, "delta")]
            first.push(A_TOKEN)
            assert kinds(await client.read()) == [(1, "delta")]
            client.call.cancel()

    async def test_what_is_held_can_be_cancelled(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            (stream,) = await begin(client, engine, 1)
            await client.say(hold(1), submission(2, stream_request()))
            await client.read_until(2, "started")
            stream.push(A_TOKEN)
            await client.say(cancellation(1), cancellation(2))
            assert [event.WhichOneof("event") for event in (await client.finish())[1]] == [
                "started", "delta", "sequence_finished", "finished",
            ]  # fmt: skip

    async def test_a_client_that_does_not_read_is_noticed_when_it_leaves(self, engine: FakeEngine) -> None:
        engine.script = [Token(0, 10, "x" * 1000)] * 20_000
        async with serving(engine) as serve:
            client = SessionClient(serve)
            await client.say(opening(), submission(1, stream_request()), submission(2, stream_request()))
            streams = [await engine.submitted.get() for _ in range(2)]
            while max(stream.unread for stream in streams) > 15_000:
                await client.read()
            client.call.cancel()
            for stream in streams:
                await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)
            assert min(stream.unread for stream in streams) > 0

    @pytest.mark.parametrize("whole_channel", [False, True])
    async def test_a_client_that_leaves_cancels_its_requests(self, engine: FakeEngine, whole_channel: bool) -> None:
        async with serving(engine) as serve, aio.insecure_channel(serve.server.address) as channel:
            client = SessionClient(type(serve)(serve.server, channel))
            streams = await begin(client, engine, *range(20))
            if whole_channel:
                await channel.close()
            else:
                client.call.cancel()
            for stream in streams:
                await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)
            await until(lambda: not serve.server.in_flight)

    async def test_the_deadline_holds_for_every_request(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve, timeout=1000)
            short = stream_request(request_id="short")
            short.spec.stopping.time_limit.seconds = 5
            await client.say(opening(), submission(1, stream_request()), submission(2, short))
            whole, limited = await engine.submitted.get(), await engine.submitted.get()
            assert (whole.call["timeout"], limited.call["timeout"]) == (pytest.approx(1000, abs=100), 5)
            ended = Token(0, -1, "", finish_reason=FinishReason.DEADLINE)
            whole.push([ended, Token(1, 10, "a")])
            assert (await client.read_error(1)).code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
            whole.push([Token(1, 11, "b")])  # nobody reads it any more
            limited.push([ended])
            assert (await client.finish())[2][-1].HasField("finished")

    async def test_the_deadline_ends_the_session(self, engine: FakeEngine) -> None:
        for timeout in growing(0.2):
            async with serving(engine) as serve:
                client = SessionClient(serve, timeout=timeout)
                with contextlib.suppress(asyncio.InvalidStateError, aio.AioRpcError):  # the call may have ended
                    await client.say(opening(), submission(1, stream_request()))
                with pytest.raises(aio.AioRpcError) as caught:
                    await client.finish()
                if engine.submitted.empty():
                    continue
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                await asyncio.wait_for(engine.submitted.get_nowait().closed.wait(), HANG_SECONDS)
                break

    async def test_every_request_is_recorded_once(self, engine: FakeEngine) -> None:
        class Observer:
            def __init__(self) -> None:
                self.reasons: dict[str, FinishReason] = {}

            def on_call_end(self, record: Any) -> None: ...

            def on_generation_end(self, record: GenerationRecord) -> None:
                assert record.request_id not in self.reasons
                self.reasons[record.request_id] = record.finish_reason

        async def requests() -> Any:
            yield opening()
            for tag, name in enumerate(("done", "failed", "left")):
                yield submission(tag, stream_request(request_id=name))
            await asyncio.Event().wait()

        observer, observers = Observer(), Observers()
        observers.on_generation_end.append(observer.on_generation_end)
        backend = Backend(engine, Admission(), observers)  # type: ignore[arg-type]
        async with aclosing(session_responses(backend, requests(), None)) as responses:
            async for response in responses:
                names = dict(kinds(response))
                if len(engine.streams) == 3 and names == {0: "started", 1: "started", 2: "started"}:
                    engine.streams["done"].push(tokens("a"))
                    engine.streams["failed"].push([*A_TOKEN, RuntimeError("bug")])
                if names.get(1) == "error":
                    break
            assert backend.admission.in_flight == 2  # one until its last event was sent
        assert observer.reasons == {"done": FinishReason.MAX_TOKENS, "failed": FinishReason.ERROR, "left": FinishReason.CANCELLED}
        assert backend.admission.in_flight == 0
