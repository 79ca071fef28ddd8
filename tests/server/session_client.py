"""A client of a session: what it says, and the messages that come back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from fake_engine import FakeEngine, FakeStream
from grpc import aio
from grpc_harness import Serving, stream_request

from aengine.v1.error_pb2 import Error
from aengine.v1.generation_pb2 import GenerationEvent
from aengine.v1.generation_service_pb2 import (
    SessionCancel,
    SessionCredit,
    SessionHold,
    SessionOpen,
    SessionRequest,
    SessionResponse,
    SessionSubmit,
    StreamGenerateRequest,
)


def opening(credit: int | None = None) -> SessionRequest:
    return SessionRequest(open=SessionOpen(initial_credit=credit))


def submission(tag: int, request: StreamGenerateRequest) -> SessionRequest:
    return SessionRequest(submit=SessionSubmit(tag=tag, request=request))


def cancellation(tag: int) -> SessionRequest:
    return SessionRequest(cancel=SessionCancel(tag=tag))


def more_credit(messages: int) -> SessionRequest:
    return SessionRequest(credit=SessionCredit(messages=messages))


def hold(tag: int, held: bool = True) -> SessionRequest:
    return SessionRequest(hold=SessionHold(tag=tag, held=held))


class SessionClient:
    """One session; `said` is sent at once."""

    def __init__(self, serve: Serving, *, timeout: float | None = None) -> None:
        """`timeout`: seconds until the deadline of the call."""
        self.call = serve.generation.Session(timeout=timeout)
        self.events: defaultdict[int, list[GenerationEvent]] = defaultdict(list)  # that came, by tag
        self.errors: dict[int, Error] = {}

    async def say(self, *requests: SessionRequest) -> None:
        for request in requests:
            await self.call.write(request)

    async def read(self) -> SessionResponse | None:
        """The next message; None at the end of the session."""
        response = await self.call.read()
        if response is aio.EOF:
            return None
        assert response.events
        for entry in response.events:
            assert entry.tag not in self.errors, "nothing follows an error"
            if entry.HasField("error"):
                self.errors[entry.tag] = entry.error
            else:
                self.events[entry.tag].append(entry.event)
        return response  # type: ignore[no-any-return]

    async def read_until(self, tag: int, kind: str) -> None:
        """Until an event of this kind has come."""
        while not any(event.HasField(kind) for event in self.events[tag]):  # type: ignore[arg-type]
            assert await self.read() is not None

    async def read_error(self, tag: int) -> Error:
        while tag not in self.errors:
            assert await self.read() is not None
        return self.errors.pop(tag)

    async def finish(self) -> Mapping[int, list[GenerationEvent]]:
        """Close the client's half and read to the end."""
        await self.call.done_writing()
        await self.read_to_the_end()
        return self.events

    async def read_to_the_end(self) -> None:
        while await self.read() is not None:
            pass


def kinds(response: SessionResponse | None) -> list[tuple[int, Any]]:
    """Tag and kind of each event."""
    assert response is not None
    return [(entry.tag, entry.event.WhichOneof("event") if entry.HasField("event") else "error") for entry in response.events]


async def begin(client: SessionClient, engine: FakeEngine, *tags: int, credit: int | None = None) -> list[FakeStream]:
    """Open a session with a request under each tag; returns their streams once all have started."""
    await client.say(opening(credit), *(submission(tag, stream_request(request_id=f"r{tag}")) for tag in tags))
    streams = [await engine.submitted.get() for _ in tags]
    if credit is None:
        for tag in tags:
            await client.read_until(tag, "started")
    return streams
