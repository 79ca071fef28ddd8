"""Session: requests that fail under their tags, and clients that break a rule; the engine is a script."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_engine import FakeEngine, tokens
from grpc import aio
from grpc_harness import Failure, failure_of, serving, stream_request
from hang_guard import HANG_SECONDS
from oracle_engine import until
from session_client import SessionClient, begin, hold, more_credit, opening, submission

from aengine.api.errors import EngineDeadError, QueueFullError
from aengine.api.outputs import Token
from aengine.server.grpc.generation import session
from aengine.v1.generation_pb2 import StreamOptions
from aengine.v1.generation_service_pb2 import SessionRequest

pytestmark = pytest.mark.anyio

REFUSED = stream_request(stream=StreamOptions(resumable=True))
A_TOKEN = [Token(0, 10, "a")]


async def failure_of_session(client: SessionClient) -> Failure:
    with pytest.raises(aio.AioRpcError) as caught:
        await client.read_to_the_end()
    return failure_of(caught.value)


class TestErrors:
    async def test_a_request_that_is_refused_fails_alone(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            (good,) = await begin(client, engine, 1)
            bad = stream_request()
            bad.spec.sampling.top_p = 7
            await client.say(submission(2, bad), submission(3, stream_request(request_id="r1")))
            error = await client.read_error(2)
            assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], "INVALID_FIELD")
            assert [violation.field for violation in error.field_violations] == ["spec.sampling.top_p"]
            assert (await client.read_error(3)).reason == "REQUEST_ID_IN_USE"
            engine.refusal = QueueFullError("full")
            await client.say(submission(2, stream_request()))  # the tag is free again
            error = await client.read_error(2)
            assert (error.reason, error.HasField("retry_delay")) == ("QUEUE_FULL", True)
            good.push(tokens("a"))
            assert [event.WhichOneof("event") for event in (await client.finish())[1]][-1] == "finished"

    async def test_a_request_that_fails_fails_alone(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            bad, good = await begin(client, engine, 1, 2)
            bad.push([*A_TOKEN, EngineDeadError("why")])
            error = await client.read_error(1)
            assert (error.code, error.reason) == (grpc.StatusCode.ABORTED.value[0], "ENGINE_DEAD")  # after its first event
            assert [event.WhichOneof("event") for event in client.events[1]] == ["started", "delta"]
            await asyncio.wait_for(bad.closed.wait(), HANG_SECONDS)
            engine.script = tokens("b")
            await client.say(submission(1, stream_request()))
            good.push(tokens("a"))
            events = await client.finish()
            assert [events[1][-1].HasField("finished"), events[2][-1].HasField("finished")] == [True, True]
            assert serve.server.in_flight == 0

    async def test_a_request_that_fails_before_its_first_event(self, engine: FakeEngine) -> None:
        engine.script = [EngineDeadError("why")]
        async with serving(engine) as serve:
            client = SessionClient(serve)
            await client.say(opening(), submission(1, stream_request()))
            assert (await client.read_error(1)).code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert await client.finish() == {}

    async def test_a_resumable_request_is_refused(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            await client.say(opening(), submission(1, REFUSED))
            error = await client.read_error(1)
            assert [violation.field for violation in error.field_violations] == ["spec.stream.resumable"]
            assert engine.submitted.empty()
            assert await client.finish() == {}

    async def test_a_session_has_a_limit_of_requests(self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session, "MAX_SESSION_REQUESTS", 2)
        async with serving(engine) as serve:
            client = SessionClient(serve)
            first, second = await begin(client, engine, 1, 2)
            await client.say(submission(3, stream_request()))
            error = await client.read_error(3)
            assert (error.code, "2 requests of the session" in error.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], True)
            first.push(tokens("a"))
            await client.read_until(1, "finished")
            await client.say(submission(3, stream_request()))
            for stream in (second, await engine.submitted.get()):
                stream.push(tokens("a"))
            assert [events[-1].HasField("finished") for events in (await client.finish()).values()] == [True] * 3

    async def test_no_more_is_refused_than_the_client_reads(self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session, "MAX_UNSENT_ERRORS", 2)
        engine.refusal = QueueFullError("full")
        async with serving(engine) as serve:
            client = SessionClient(serve)
            await client.say(opening(0), *(submission(tag, stream_request()) for tag in range(3)))
            assert (await failure_of_session(client)).code is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def test_draining_refuses_requests_and_waits_for_those_under_way(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            (stream,) = await begin(client, engine, 1)
            draining = asyncio.create_task(serve.server.drain(HANG_SECONDS))
            await until(lambda: serve.server.core.admission.closed)
            await client.say(submission(2, stream_request()))
            assert (await client.read_error(2)).reason == "DRAINING"
            assert not draining.done()
            stream.push(tokens("a"))
            await client.read_until(1, "finished")
            assert await draining


class TestRules:
    @pytest.mark.parametrize(
        ("said", "field"),
        [
            ([submission(1, stream_request())], "open"),
            ([more_credit(1)], "open"),
            ([SessionRequest()], "open"),
            ([], "open"),
            ([opening(), opening()], "open"),
            ([opening(), SessionRequest()], "request"),
            ([opening(), submission(5, stream_request()), submission(5, stream_request())], "submit.tag"),
            ([opening(0), submission(5, REFUSED), submission(5, stream_request())], "submit.tag"),
            ([opening(1), more_credit(0)], "credit.messages"),
            ([opening(), more_credit(0)], "credit.messages"),
            ([opening(2**31 + 1)], "open.initial_credit"),
            ([opening(2**31), more_credit(1)], "credit.messages"),
            ([opening(0), submission(5, stream_request())], "credit.messages"),  # and the end of the client's half
            ([opening(), submission(5, stream_request()), hold(5)], "hold.held"),  # and that end
            ([hold(5)], "open"),
        ],
    )  # fmt: skip
    async def test_breaking_one_ends_the_session(self, engine: FakeEngine, said: list[SessionRequest], field: str) -> None:
        async with serving(engine) as serve:
            client = SessionClient(serve)
            await client.say(*said)
            await client.call.done_writing()
            failure = await failure_of_session(client)
            assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
            assert (engine.streams, serve.server.in_flight) == ({}, 0)

    async def test_credit_beside_none_that_is_counted(self, engine: FakeEngine) -> None:
        engine.script = tokens("a")
        async with serving(engine) as serve:
            client = SessionClient(serve)
            await client.say(opening(), more_credit(2**32 - 1), more_credit(1), submission(1, stream_request()))
            assert len((await client.finish())[1]) == 4

    async def test_as_much_credit_as_there_can_be(self, engine: FakeEngine) -> None:
        engine.script = tokens("a")
        async with serving(engine) as serve:
            client = SessionClient(serve)
            await client.say(opening(2**31 - 1), more_credit(1), submission(1, stream_request()))
            assert len((await client.finish())[1]) == 4
