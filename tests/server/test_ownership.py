"""Requests belong to who made them: others neither see them, nor end them, nor meet their ids, nor drop what is kept of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine, FakeStream, tokens
from grpc import aio
from grpc_harness import Serving, events_of, failure_of, serving, stream_request, text_spec
from oracle_engine import until

from aengine import SamplingParams
from aengine.api.outputs import FinishReason, Token
from aengine.server.core.resume import GENERATION_BYTES, ResumeLimits
from aengine.v1.generation_pb2 import GenerationEvent, StreamOptions
from aengine.v1.generation_service_pb2 import (
    REQUEST_STATE_FINISHED,
    REQUEST_STATE_RUNNING,
    BatchGenerateRequest,
    CancelRequestsRequest,
    GenerateRequest,
    GetRequestRequest,
    ResumeGenerateRequest,
    SessionOpen,
    SessionRequest,
    SessionSubmit,
    StreamGenerateRequest,
)

pytestmark = pytest.mark.anyio

NOT_FOUND = (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
IN_USE = (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")


class Client:
    """One who holds a token."""

    def __init__(self, serve: Serving, name: str | None) -> None:
        self._stub = serve.generation
        self._metadata = () if name is None else (("authorization", f"Bearer token-of-{name}"),)

    def stream(self, request_id: str, *, resumable: bool = False) -> Any:
        request = stream_request(request_id=request_id, stream=StreamOptions(resumable=resumable))
        return self._stub.StreamGenerate(request, metadata=self._metadata)

    def resume(self, first: GenerationEvent) -> Any:
        request = ResumeGenerateRequest(request_id=first.started.request_id, resume_token=first.started.resume_token)
        return self._stub.ResumeGenerate(request, metadata=self._metadata)

    async def get(self, request_id: str) -> Any:
        return await self._stub.GetRequest(GetRequestRequest(request_id=request_id), metadata=self._metadata)

    async def cancel(self, *ids: str) -> list[str]:
        """Those that were ended."""
        response = await self._stub.CancelRequests(CancelRequestsRequest(request_ids=ids), metadata=self._metadata)
        return list(response.cancelled_request_ids)

    async def batch(self, *ids: str) -> list[str]:
        """The reasons of those that failed."""
        requests = [GenerateRequest(spec=text_spec(), request_id=request_id) for request_id in ids]
        call = self._stub.BatchGenerate(BatchGenerateRequest(requests=requests), metadata=self._metadata)
        return [response.error.reason async for response in call if response.HasField("error")]

    async def session(self, request_id: str) -> str:
        """The reason of its failure."""
        submit = SessionSubmit(tag=1, request=StreamGenerateRequest(spec=text_spec(), request_id=request_id))
        said = [SessionRequest(open=SessionOpen()), SessionRequest(submit=submit)]
        call = self._stub.Session(iter(said), metadata=self._metadata)
        return "".join([entry.error.reason async for response in call for entry in response.events])


async def fate(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    failure = failure_of(caught.value)
    return failure.code, failure.reason


@asynccontextmanager
async def tenants(engine: FakeEngine, directory: Path, *, everyone: bool = True) -> AsyncIterator[Serving]:
    """A server of alice, bob and, as its administrator, root. `everyone` needs a token, or root alone."""
    (directory / "tokens").write_text("alice token-of-alice\nbob token-of-bob\n")
    (directory / "admins").write_text("root token-of-root\n")
    files = {"admin_token_file": str(directory / "admins")} | ({"token_file": str(directory / "tokens")} if everyone else {})
    async with serving(engine, **files) as serve:
        yield serve


async def begun(engine: FakeEngine, call: Any) -> tuple[FakeStream, GenerationEvent]:
    stream = await engine.submitted.get()
    return stream, (await anext(aiter(call))).event


async def test_nobody_else_sees_or_ends_a_request(engine: FakeEngine, tmp_path: Path) -> None:
    async with tenants(engine, tmp_path) as serve:
        alice, bob = Client(serve, "alice"), Client(serve, "bob")
        call = alice.stream("mine", resumable=True)
        stream, first = await begun(engine, call)
        assert await fate(bob.get("mine")) == NOT_FOUND
        assert await bob.cancel("mine") == []
        assert await fate(events_of(bob.resume(first))) == NOT_FOUND  # though it has the token
        assert (await alice.get("mine")).state == REQUEST_STATE_RUNNING
        plain = alice.stream("plain")
        await begun(engine, plain)
        assert await fate(events_of(bob.resume(GenerationEvent(started={"request_id": "plain", "resume_token": b"x"})))) == NOT_FOUND
        assert await alice.cancel("plain") == ["plain"]
        stream.push(tokens("a"))
        assert len(await events_of(call)) == 3
        assert await fate(bob.get("mine")) == NOT_FOUND  # which is kept


async def test_an_id_is_in_use_for_its_own_caller_alone(engine: FakeEngine, tmp_path: Path) -> None:
    async with tenants(engine, tmp_path) as serve:
        alice, bob = Client(serve, "alice"), Client(serve, "bob")
        calls, streams = [], []
        for client in (alice, bob):
            calls.append(client.stream("mine"))
            stream, first = await begun(engine, calls[-1])
            streams.append(stream)
            assert first.started.request_id == "mine"
        assert len({stream.request_id for stream in streams}) == 2  # in the engine they differ
        for client in (alice, bob):
            assert await fate(events_of(client.stream("mine"))) == IN_USE
            assert await client.batch("mine") == ["REQUEST_ID_IN_USE"]
            assert await client.session("mine") == "REQUEST_ID_IN_USE"
        streams[0].push(tokens("a"))
        assert len(await events_of(calls[0])) == 3
        assert await fate(alice.get("mine")) == NOT_FOUND
        assert (await bob.get("mine")).state == REQUEST_STATE_RUNNING
        assert await bob.cancel("mine", "mine") == ["mine"]
        assert len(await events_of(calls[1])) == 2


async def test_what_has_left_its_id_to_another_ends_nothing_of_that(engine: FakeEngine, tmp_path: Path) -> None:
    """Alice's is over in the engine, where bob's has its id now, but still being sent."""
    engine.script = [*[Token(0, 10, "x" * 100_000)] * 200, *tokens("end")]
    async with tenants(engine, tmp_path) as serve:
        alice, bob = Client(serve, "alice"), Client(serve, "bob")
        call = alice.stream("mine")
        stream, _ = await begun(engine, call)
        del engine.streams["mine"]
        stream._ended = True  # as it is once all is generated
        engine.script = []
        other = bob.stream("mine")
        theirs, _ = await begun(engine, other)
        assert theirs.request_id == "mine"
        assert await alice.cancel("mine") == []
        assert (await bob.get("mine")).state == REQUEST_STATE_RUNNING
        again = alice.stream("mine")
        await begun(engine, again)
        for pending in (call, other, again):
            pending.cancel()


async def test_administrators_see_all(engine: FakeEngine, tmp_path: Path) -> None:
    async with tenants(engine, tmp_path) as serve:
        alice, bob, root = (Client(serve, name) for name in ("alice", "bob", "root"))
        calls = [alice.stream("mine"), bob.stream("mine"), bob.stream("other", resumable=True)]
        firsts = [(await begun(engine, call))[1] for call in calls]
        assert (await root.get("mine")).state == REQUEST_STATE_RUNNING
        assert await fate(events_of(root.stream("mine"))) == IN_USE
        assert await root.cancel("mine", "nobody") == ["mine"]  # both of them
        assert [len(await events_of(call)) for call in calls[:2]] == [2, 2]
        assert (await anext(aiter(root.resume(firsts[2])))).event == firsts[2]
        engine.stream("x", SamplingParams(), request_id="of-the-program")
        assert (await root.get("of-the-program")).state == REQUEST_STATE_RUNNING
        assert await fate(alice.get("of-the-program")) == NOT_FOUND
        assert await alice.cancel("of-the-program") == []


async def test_those_without_a_token_are_one(engine: FakeEngine, tmp_path: Path) -> None:
    async with tenants(engine, tmp_path, everyone=False) as serve:
        one, other, root = Client(serve, None), Client(serve, "a-token-nobody-asks-for"), Client(serve, "root")
        calls = [one.stream("mine"), root.stream("of-root")]
        for call in calls:
            await begun(engine, call)
        assert (await other.get("mine")).state == REQUEST_STATE_RUNNING
        assert await fate(other.get("of-root")) == NOT_FOUND
        assert (await root.get("mine")).state == REQUEST_STATE_RUNNING
        assert await other.cancel("mine", "of-root") == ["mine"]
        calls[1].cancel()


async def test_nobody_drops_what_is_kept_for_another(engine: FakeEngine, tmp_path: Path) -> None:
    """Not by the same id, and not by keeping much."""
    engine.script = [Token(0, 10, "x" * 10_000, finish_reason=FinishReason.EOS)]
    one = GENERATION_BYTES + 10_000
    async with tenants(engine, tmp_path) as serve:
        resumables = serve.server.resumables
        resumables._limits = ResumeLimits(kept_bytes=one * 9 // 2)
        alice, bob = Client(serve, "alice"), Client(serve, "bob")
        events = await events_of(alice.stream("mine", resumable=True))
        theirs = [await events_of(bob.stream(name, resumable=True)) for name in ("mine", "b", "c", "d", "e", "f")]
        assert resumables.kept_bytes < one * 9 // 2
        assert await events_of(alice.resume(events[0])) == events
        assert (await alice.get("mine")).state == REQUEST_STATE_FINISHED
        assert await fate(events_of(bob.resume(theirs[0][0]))) == NOT_FOUND  # its own oldest went
        assert await events_of(bob.resume(theirs[-1][0])) == theirs[-1]


async def test_cancellations_wait_for_one_step_and_not_for_each(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        client = Client(serve, None)
        calls = [client.stream(f"r{number}") for number in range(20)]
        for call in calls:
            await begun(engine, call)
        leaving = asyncio.Semaphore(0)
        for stream in engine.streams.values():
            stream.closed.wait = leaving.acquire  # type: ignore[method-assign]
        cancelling = asyncio.ensure_future(client.cancel(*(f"r{number}" for number in range(20))))
        await until(lambda: len(leaving._waiters or ()) == 20)
        for _ in calls:
            leaving.release()
        assert len(await cancelling) == 20
