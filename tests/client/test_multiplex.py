"""Streams that share a call: what becomes of them when the call ends, when one of them lags or fails, and what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import grpc
import pytest
from both_sides import SHARED, reached
from cutting_proxy import cutting_proxy
from grpc_harness import serving
from hang_guard import HANG_SECONDS
from oracle_engine import Ahead, OracleEngine, StepGate, idle, step_with_the_loop, until
from scripted_server import ScriptedServer, fails, scripted, whole_answer
from slow_cases import slow_but

from aengine import ConnectionLostError, EngineStateError, FinishReason, InvalidRequestError, SamplingParams, ServerError
from aengine.client import AsyncClient
from aengine.client.active_request import ActiveRequest
from aengine.v1.generation_pb2 import GenerationEvent
from aengine.v1.generation_service_pb2 import SessionRequest, SessionResponse

pytestmark = pytest.mark.anyio

ENDLESS = SamplingParams(seed=1, ignore_eos=True)
IDS = [10, 11, 12]


def params(seed: int, max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)


async def ids_of(stream: Any) -> list[int]:
    with anyio.fail_after(HANG_SECONDS):
        return [token.token_id async for token in stream]


@asynccontextmanager
async def shared(**options: Any) -> AsyncIterator[tuple[OracleEngine, AsyncClient]]:
    async with OracleEngine(**options) as oracle, reached(SHARED, oracle) as client:
        assert isinstance(client, AsyncClient)
        yield oracle, client


class Sessions:
    """What clients said in the sessions with a `ScriptedServer`, and what it says to them."""

    def __init__(self) -> None:
        self.said: list[list[SessionRequest]] = []  # by session
        self.ends: list[asyncio.Event] = []  # the clients have closed their halves
        self._unsent: asyncio.Queue[SessionResponse | None] = asyncio.Queue()

    async def __call__(self, requests: AsyncIterator[SessionRequest], context: Any) -> AsyncIterator[SessionResponse]:
        said: list[SessionRequest] = []
        end = asyncio.Event()
        self.said.append(said)
        self.ends.append(end)

        async def read() -> None:
            async for request in requests:
                said.append(request)
            end.set()
            self._unsent.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (response := await self._unsent.get()) is not None:
                yield response
        finally:
            reading.cancel()

    def tell(self, *events: tuple[int, GenerationEvent]) -> None:
        """In one message."""
        response = SessionResponse()
        for tag, event in events:
            response.events.add(tag=tag, event=event)
        self._unsent.put_nowait(response)

    def finish(self) -> None:
        self._unsent.put_nowait(None)

    def kinds(self) -> list[tuple[str | None, int]]:
        """Of what was said in the last session, with the tags."""
        kinds = [(request.WhichOneof("request"), request) for request in self.said[-1]]
        return [(kind, getattr(getattr(request, kind or ""), "tag", 0)) for kind, request in kinds]


@asynccontextmanager
async def scripted_sessions(number: int = 1) -> AsyncIterator[tuple[Sessions, AsyncClient, ScriptedServer]]:
    sessions = Sessions()
    async with scripted(*[sessions] * number) as script, AsyncClient(script.address, multiplex=True) as client:
        yield sessions, client, script


async def test_one_call_for_all() -> None:
    async with shared(max_num_seqs=64, num_pages=4000) as (oracle, client):
        streams = [client.stream([1, 2], params(seed)) for seed in range(64)]
        for seed, stream in enumerate(streams):
            assert await ids_of(stream) == oracle.solo(seed)[0]
        assert len(client._running().sessions._sessions) == 1


async def test_a_waiter_is_called_once_for_a_message() -> None:
    async with scripted_sessions() as (sessions, client, _):
        requests = [client.open("x", params(1)) for _ in range(2)]
        calls: list[int] = []
        for index, request in enumerate(requests):
            request.waiter = lambda index=index: calls.append(index)  # type: ignore[misc]
        await until(lambda: bool(sessions.said) and len(sessions.said[0]) == 3)
        started, *tokens, end, finished = whole_answer(IDS)
        assert not any(request.acknowledged for request in requests)
        sessions.tell((1, started), (2, started))
        await until(lambda: len(calls) == 2)
        assert all(request.acknowledged and not request.unread for request in requests)
        sessions.tell((2, tokens[0]), (2, tokens[1]), (1, tokens[0]))
        await until(lambda: len(calls) == 4)
        assert [request.unread for request in requests] == [1, 2]
        sessions.tell(*((2, event) for event in (tokens[2], end, finished)))
        await until(lambda: requests[1].finished)
        assert sorted(calls) == [0, 0, 1, 1, 1]
        assert [pop(requests[1]) for _ in range(4)] == [*IDS, None]
        requests[0].cancel()
        assert sorted(calls) == [0, 0, 0, 1, 1, 1]
        sessions.tell((1, finished))  # the answer to that


@pytest.mark.slow
@pytest.mark.parametrize("ahead", slow_but([Ahead.HOST], Ahead))
async def test_a_day_of_many_requests(monkeypatch: pytest.MonkeyPatch, ahead: Ahead) -> None:
    """Some are read at once, some late, some left in the middle or before they begin; what is read is right, and nothing is left."""
    monkeypatch.setattr("aengine.client.active_request.MAX_UNREAD_TOKENS", 16)
    monkeypatch.setattr("aengine.client.session.MAX_SESSION_REQUESTS", 9)
    random = Random(3)
    async with shared(ahead=ahead, max_unread_tokens=8, num_pages=4000, max_queued_requests=1000) as (oracle, client):

        async def read(seed: int) -> None:
            for _ in range(random.randrange(20)):
                await anyio.lowlevel.checkpoint()
            length = random.choice([1, 5, 60])
            left_at = random.choice([None, None, 0, 1, length // 2])
            ids = []
            async with client.stream([1, 2], params(seed, length)) as stream:
                if random.random() < 0.3:
                    await stream.started()
                for _ in range(random.choice([0, 0, 500])):
                    await anyio.lowlevel.checkpoint()
                if left_at != 0:
                    async for token in stream:
                        ids.append(token.token_id)
                        if len(ids) == left_at:
                            break
            if ids:
                assert ids == oracle.solo(seed)[0][: len(ids)]
            assert left_at is not None or len(ids) == length

        with anyio.fail_after(HANG_SECONDS):
            async with anyio.create_task_group() as tasks:
                for seed in range(200):
                    tasks.start_soon(read, seed)
        assert idle(oracle)
        assert client._requests == {}
        assert all(session.num_open == 0 for session in client._running().sessions._sessions)


def pop(request: ActiveRequest) -> int | None:
    token = request.pop()
    return None if token is None else token.token_id


class TestTheCallEnds:
    async def test_a_lost_connection_ends_every_stream_and_the_next_finds_another(self) -> None:
        async with OracleEngine() as oracle, serving(oracle) as serve, cutting_proxy(serve.server.address) as proxy:
            client = AsyncClient(proxy.address, multiplex=True)
            async with client:
                gate = StepGate(oracle, at=9)
                await oracle.pause()
                streams = [client.stream([1], params(seed, 300)) for seed in range(8)]
                for stream in streams:
                    await stream.started()
                await oracle.unpause()
                for stream in streams:
                    assert (await stream.__anext__()).token_id >= 0
                proxy.cut()
                gate.open()
                for stream in streams:
                    with pytest.raises(ConnectionLostError, match=f"no connection to {proxy.address}"):
                        await ids_of(stream)
                    assert stream.completion().finish_reason is FinishReason.ERROR
                    assert stream.completion().token_ids
                await until(lambda: client.healthy)
                found = None
                with anyio.fail_after(HANG_SECONDS):
                    while found is None:  # requests may reach the connection that was cut until the client has noticed
                        with suppress(ConnectionLostError):
                            found = await ids_of(client.stream([1], params(99)))
                assert found == oracle.solo(99)[0]
                await until(lambda: idle(oracle))

    async def test_the_status_is_that_of_each_stream(self) -> None:
        def failing(**status: Any) -> Any:
            async def answer(requests: Any, context: Any) -> AsyncIterator[SessionResponse]:
                async for request in requests:
                    if request.HasField("submit") and request.submit.tag == 2:
                        break
                await fails(**status)(context)
                yield SessionResponse()

            return answer

        answers = [failing(reason="DRAINING"), failing(code=grpc.StatusCode.UNAUTHENTICATED, reason="NO_CREDENTIALS"), failing()]
        async with scripted(*answers) as script, AsyncClient(script.address, multiplex=True) as client:
            for kind in (EngineStateError, ServerError, ConnectionLostError):
                streams = [client.stream("x") for _ in range(2)]
                for stream in streams:
                    with pytest.raises(kind, match="as told"):
                        await ids_of(stream)

    async def test_a_session_that_just_ends(self) -> None:
        async with scripted_sessions() as (sessions, client, _):
            stream = client.stream("x")
            sessions.tell((1, whole_answer(IDS)[0]))
            await stream.started()
            sessions.finish()
            with pytest.raises(ServerError, match="the session ended before the request") as caught:
                await ids_of(stream)
            assert caught.value.code == "DATA_LOSS"

    async def test_nobody_is_left_to_wait_where_the_task_is_cancelled(self) -> None:
        """As gRPC does by an error of its own, and a loop that is closed, before the first turn of the task or later: it has failed,
        for it has not ended, and nobody cancelled it."""
        async with shared() as (oracle, client):
            for begun in (False, True):
                stream = client.stream([1], ENDLESS)
                if begun:
                    await stream.__anext__()
                client._running().sessions._sessions[0]._task.cancel()
                with pytest.raises(ServerError, match="the session was cancelled"):
                    await ids_of(stream)
            await until(lambda: idle(oracle))

    async def test_the_client_closes_it_in_order(self) -> None:
        async with scripted_sessions() as (sessions, client, script):
            stream = client.stream("x", params(1))
            sessions.tell(*((1, event) for event in whole_answer(IDS)))
            assert await ids_of(stream) == IDS
            await client.aclose()
            assert sessions.ends[0].is_set()
            assert not script.left.is_set()


class TestOneAmongOthers:
    async def test_a_reader_that_lags_parks_its_request_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aengine.client.active_request.MAX_UNREAD_TOKENS", 8)
        monkeypatch.setattr("aengine.client.active_request.CLOSE_SECONDS", 2 * HANG_SECONDS)  # given to a server that does not answer
        async with shared(max_unread_tokens=4, num_pages=4000) as (oracle, client):
            step_with_the_loop(oracle)
            slow, quick = (client.stream([1], params(seed, 390)) for seed in (1, 2))
            await slow.started()
            assert await ids_of(quick) == oracle.solo(2)[0]
            await until(lambda: oracle.stats().parked == 1)
            assert slow._source.unread < 390
            assert await ids_of(slow) == oracle.solo(1)[0]
            lagging = client.stream([1], params(1, 390))
            await until(lambda: oracle.stats().parked == 1)
            with anyio.fail_after(HANG_SECONDS):
                await lagging.aclose()
            assert idle(oracle)

    async def test_what_no_server_should_send_fails_alone(self) -> None:
        async with scripted_sessions() as (sessions, client, _):
            bad, good = (client.stream("x", params(1)) for _ in range(2))
            started, *events = whole_answer(IDS)
            sessions.tell((1, started), (2, started), (1, events[1]), (2, events[0]), (77, started))
            with pytest.raises(ServerError, match="event 2 came where 1 was due"):
                await ids_of(bad)
            sessions.tell((1, events[0]), *((2, event) for event in events[1:]))
            assert await ids_of(good) == IDS
            await until(lambda: ("cancel", 1) in sessions.kinds())
            sessions.tell((1, events[-1]))  # the answer to that
            await bad.aclose()

    async def test_an_error_under_a_tag(self) -> None:
        async with shared() as (oracle, client):
            await oracle.pause()
            good = client.stream([1], params(1))
            for _ in range(2):  # the tag is of no matter
                with pytest.raises(InvalidRequestError) as caught:
                    await ids_of(client.stream([50]))
                assert caught.value.field == "prompt"
            await oracle.unpause()
            assert await ids_of(good) == oracle.solo(1)[0]

    async def test_a_large_request_has_a_call_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aengine.client.client.MAX_SUBMIT_BYTES", 200)
        async with shared() as (oracle, client):
            assert await ids_of(client.stream([1] * 200, params(1))) == oracle.solo(1)[0]
            assert client._running().sessions._sessions == []
            assert await ids_of(client.stream([1] * 20, params(1))) == oracle.solo(1)[0]
            assert len(client._running().sessions._sessions) == 1

    async def test_a_session_holds_only_so_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for side in ("client.session", "server.grpc.generation.session"):
            monkeypatch.setattr(f"aengine.{side}.MAX_SESSION_REQUESTS", 3)
        async with shared() as (oracle, client):
            gate = StepGate(oracle, at=3)
            streams = [client.stream([1], params(seed)) for seed in range(10)]
            for stream in streams:
                await stream.started()
            assert [session.num_open for session in client._running().sessions._sessions] == [3, 3, 3, 1]
            gate.open()
            for seed, stream in enumerate(streams):
                assert await ids_of(stream) == oracle.solo(seed)[0]
            assert await ids_of(client.stream([1], params(5))) == oracle.solo(5)[0]
            assert len(client._running().sessions._sessions) == 4

    async def test_a_server_that_does_not_heed_the_time_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aengine.client.session.DEADLINE_GRACE", 0.05)
        async with scripted_sessions() as (sessions, client, _):
            stream = client.stream("x", timeout=0.05)
            with pytest.raises(ServerError) as caught:
                await ids_of(stream)
            assert caught.value.code == "DEADLINE_EXCEEDED"
            await until(lambda: sessions.kinds() == [("open", 0), ("submit", 1), ("cancel", 1)])
            assert sessions.said[0][1].submit.request.spec.stopping.time_limit.ToMilliseconds() == 50
            sessions.tell((1, whole_answer([])[-1]))


class TestLeaving:
    async def test_what_was_not_written_never_is(self) -> None:
        async with shared() as (oracle, client):
            assert await ids_of(client.stream([1], params(1))) == oracle.solo(1)[0]
            submitted = oracle._core.serving.registry.num_submitted
            streams = [client.stream([1], ENDLESS) for _ in range(5)]
            for stream in streams:
                await stream.aclose()
                assert [token.finish_reason async for token in stream] == [FinishReason.CANCELLED]
            assert client._requests == {}
            assert await ids_of(client.stream([1], params(1))) == oracle.solo(1)[0]
            assert oracle._core.serving.registry.num_submitted == submitted + 1

    async def test_before_the_prompt_has_ids(self) -> None:
        """Which a request with logprobs of it needs first."""
        async with shared() as (oracle, client):
            wanted = SamplingParams(max_tokens=3, prompt_logprobs=1)
            stream = client.stream("a", wanted)
            (session,) = client._running().sessions._sessions
            await stream.aclose()
            assert (session.num_open, client._requests) == (0, {})
            with pytest.raises(InvalidRequestError) as caught:
                await ids_of(client.stream("", wanted))
            assert caught.value.field == "prompt"
            assert (session.num_open, client._requests) == (0, {})
            assert oracle._core.serving.registry.num_submitted == 0

    async def test_a_server_that_does_not_answer_is_not_waited_for_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aengine.client.active_request.CLOSE_SECONDS", 0.05)
        async with scripted_sessions() as (sessions, client, _):
            streams = [client.stream("x", params(1)) for _ in range(3)]
            events = whole_answer(IDS)
            sessions.tell(*((tag, events[0]) for tag in (1, 2, 3)))
            for stream in streams:
                await stream.started()
            with anyio.fail_after(HANG_SECONDS):
                await streams[0].aclose()
            await until(lambda: ("cancel", 1) in sessions.kinds())
            sessions.tell((1, events[1]), *((2, event) for event in events[1:]))  # too late, and in time
            assert await ids_of(streams[1]) == IDS
            with anyio.fail_after(HANG_SECONDS):
                await client.aclose()
            assert [token.finish_reason async for token in streams[2]] == [FinishReason.CANCELLED]

    async def test_many_at_once(self) -> None:
        """No call for each of them."""
        async with shared(max_num_seqs=64, num_pages=4000, max_queued_requests=1000) as (oracle, client):
            streams = [client.stream([1], ENDLESS) for _ in range(300)]
            await streams[0].__anext__()
            await client.aclose()
            assert idle(oracle)
            for stream in streams:
                assert [token.finish_reason async for token in stream][-1] is FinishReason.CANCELLED
