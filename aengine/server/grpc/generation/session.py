"""`Session`: many generations over one stream, with one message for all of them per step of the engine.

Owns the rules of a session's messages, who may be sent what and when, and the generations under their tags. Nothing is read from the
engine while a message waits for the client or for credit, nor from a request that the client holds, so requests park when their client
does not keep up. What becomes of one generation does not touch the others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from typing import Any

from aengine.api.errors import InvalidRequestError, QueueFullError
from aengine.api.stream_group import Reading, StreamGroup
from aengine.server.core.core import Backend, in_chunks
from aengine.server.core.generation import READ_TOKENS
from aengine.server.grpc.generation.events import EventWriter, MessageGeneration, submit_message
from aengine.server.grpc.status import to_error
from aengine.v1.error_pb2 import Error
from aengine.v1.generation_pb2 import GenerationEvent
from aengine.v1.generation_service_pb2 import SessionRequest, SessionResponse, SessionSubmit
from aengine.wire.names import MAX_SESSION_REQUESTS
from aengine.wire.request import located

MAX_UNSENT_ERRORS = 4096
"""Refused requests whose errors were not sent yet."""
MAX_CREDIT = 2**31
MESSAGE_BYTES = 512 * 1024
"""A message that is estimated to be as large is sent before more is added to it."""


async def session_responses(
    backend: Backend, requests: AsyncIterator[SessionRequest], deadline: float | None
) -> AsyncGenerator[SessionResponse, None]:
    """The messages of a session whose call ends at `deadline`, on time.monotonic. Ends when the client has closed its half and every
    request has ended; leaving cancels them.

    Raises `InvalidRequestError` when the client breaks a rule, and `QueueFullError` when it does not read what was refused.
    """
    session = _Session(backend, deadline)
    reader = asyncio.create_task(session.read(requests))
    reader.add_done_callback(lambda _: session.group.wake())
    messages = session.messages()
    try:
        while True:
            if reader.done():
                reader.result()  # raises if a rule was broken
                if session.idle:
                    break
                if session.group.num_held:
                    raise InvalidRequestError.of("hold.held", "a request is held, and nothing can follow that lets it go on")
                if not session.credit:
                    raise InvalidRequestError.of("credit.messages", "none is left for what is still to be sent, and none can follow")
            response = next(messages) if session.credit else None
            if response is None:
                await session.group.wait()
                continue
            session.credit -= 1
            yield response
            session.close_ended()
    finally:
        reader.cancel()
        await session.close_all()
        await asyncio.gather(reader, return_exceptions=True)


class _Session:
    def __init__(self, backend: Backend, deadline: float | None) -> None:
        self.credit: float = math.inf  # messages that may be sent; infinite for a client that does not count them
        self.group: StreamGroup[int] = StreamGroup()  # by tag, as everything here
        self._backend = backend
        self._deadline = deadline
        self._open: dict[int, EventWriter] = {}
        self._refused: dict[int, Error] = {}  # not sent yet
        self._ended: list[tuple[MessageGeneration, Exception | None]] = []  # their last event is in a message, which may not be sent yet
        self._gone: dict[int, Exception | None] = {}  # all but their last event is written, and what they failed with
        self._background: set[asyncio.Task[None]] = set()  # which close requests
        self._response = SessionResponse()  # the message that is being written
        self._num_bytes = 0  # of it, estimated

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be sent."""
        return not (self._open or self._refused)

    # ---- what the client says ------------------------------------------------------------------------------------------

    async def read(self, requests: AsyncIterator[SessionRequest]) -> None:
        """Do what the client asks for, until it closes its half. Raises `InvalidRequestError` when it breaks a rule."""
        is_open = False
        async for request in requests:
            kind = request.WhichOneof("request")
            if is_open != (kind != "open"):
                raise InvalidRequestError.of("open", "must be the first message, and only that")
            match kind:
                case "open":
                    is_open = True
                    if request.open.HasField("initial_credit"):
                        self.credit = 0
                        self._add_credit("open.initial_credit", request.open.initial_credit)
                case "submit":
                    await self._submit(request.submit)
                case "cancel":
                    if request.cancel.tag in self._open:
                        self._open[request.cancel.tag].generation.stream.cancel()
                        self.group.hold(request.cancel.tag, False)
                case "hold":
                    self.group.hold(request.hold.tag, request.hold.held)
                case "credit":
                    if not request.credit.messages:
                        raise InvalidRequestError.of("credit.messages", "must be at least 1")
                    self._add_credit("credit.messages", request.credit.messages)
                case _:
                    raise InvalidRequestError.of("request", "exactly one of submit, cancel, credit, hold must be set")
        if not is_open:
            raise InvalidRequestError.of("open", "must be the first message")

    def _add_credit(self, field: str, messages: int) -> None:
        if MAX_CREDIT < self.credit + messages < math.inf:
            raise InvalidRequestError.of(field, f"{messages} make more than the {MAX_CREDIT} messages that can be outstanding")
        self.credit += messages
        self.group.wake()

    async def _submit(self, message: SessionSubmit) -> None:
        tag = message.tag
        if tag in self._open or tag in self._refused:
            raise InvalidRequestError.of("submit.tag", f"{tag} is in use by a request that has not ended")

        def new_event() -> GenerationEvent:
            entry = self._response.events.add()
            entry.tag = tag
            return entry.event

        try:
            if len(self._open) >= MAX_SESSION_REQUESTS:
                raise QueueFullError(f"{MAX_SESSION_REQUESTS} requests of the session have not ended yet, which is the limit")
            if message.request.spec.stream.resumable:
                raise InvalidRequestError.of("spec.stream.resumable", "a request of a session cannot be resumed")
            generation = await submit_message(self._backend, message.request, self._deadline)
        except Exception as error:
            if len(self._refused) >= MAX_UNSENT_ERRORS:
                raise QueueFullError(f"{MAX_UNSENT_ERRORS} refused requests wait for the client to read") from error
            self._refused[tag] = to_error(error)  # not the exception, which holds the whole request
            self.group.wake()
        else:
            self._open[tag] = EventWriter(generation, new_event)
            self.group.add_stream(tag, generation.stream)

    # ---- what is sent --------------------------------------------------------------------------------------------------

    def messages(self) -> Iterator[SessionResponse | None]:
        """The messages to send; None whenever there is nothing to send for now."""
        while True:
            for tag in list(self._refused):
                yield from self._write_error(tag, self._refused.pop(tag))
            for tag in list(self._gone):
                yield from self._write_end(tag, self._gone.pop(tag))
            for reading in self.group.take_readings(READ_TOKENS):
                yield from self._write(reading)
            yield self._finish_message()

    def _write(self, reading: Reading[int]) -> Iterator[SessionResponse | None]:
        """The events of what a request brought. Yields the messages that are full with them."""
        tag, writer = reading.tag, self._open[reading.tag]
        try:
            if reading.error is not None:
                raise reading.error
            if not writer.has_begun:
                writer.begin()
            if reading.tokens:
                for _ in writer.prompt():
                    yield self._finish_message()
                writer.write(reading.tokens)
        except Exception as error:
            yield from self._finish(tag, error)
        else:
            if reading.stream.ended:
                yield from self._finish(tag, None)
            yield from self._grow(len(reading.tokens) * writer.token_bytes)

    def _finish(self, tag: int, error: Exception | None) -> Iterator[SessionResponse | None]:
        """Write the last event of a request once nothing of it is left in the engine, so that a client that has it knows that."""
        self.group.discard(tag)
        stream = self._open[tag].generation.stream
        if stream.gone:
            yield from self._write_end(tag, error)
            return

        async def finish() -> None:
            try:
                await stream.aclose()
            finally:
                self._gone[tag] = error
                self.group.wake()

        self._in_background(finish())

    def _write_end(self, tag: int, error: Exception | None) -> Iterator[SessionResponse | None]:
        """The last event of a request, of which the engine has nothing any more; its tag is free."""
        writer = self._open[tag]
        if error is None:
            writer.end_event()
        self._ended.append((self._open.pop(tag).generation, error))
        if error is not None:
            yield from self._write_error(tag, to_error(located(error, writer.generation.spec), answered=writer.has_begun))

    def _write_error(self, tag: int, error: Error) -> Iterator[SessionResponse | None]:
        self._response.events.add(tag=tag, error=error)
        yield from self._grow(error.ByteSize())

    def _grow(self, num_bytes: int) -> Iterator[SessionResponse | None]:
        self._num_bytes += num_bytes
        if self._num_bytes >= MESSAGE_BYTES:
            yield self._finish_message()

    def _finish_message(self) -> SessionResponse | None:
        """The message that was being written, unless it is empty."""
        if not self._response.events:
            return None
        response, self._response = self._response, SessionResponse()
        self._num_bytes = 0
        return response

    # ---- closing -------------------------------------------------------------------------------------------------------

    def close_ended(self) -> None:
        """Close the requests whose last event was sent. What the engine still has of them goes in the background."""
        for ended in self._ended:
            self._close(ended)
        self._ended.clear()

    async def close_all(self) -> None:
        """Close every request; returns when nothing of them is left in the engine."""
        for tag in list(self._open):
            self.group.discard(tag)
            self._ended.append((self._open.pop(tag).generation, None))
        ended, self._ended = self._ended, []
        await in_chunks(ended, self._close)
        await asyncio.gather(*self._background, return_exceptions=True)

    def _close(self, ended: tuple[MessageGeneration, Exception | None]) -> asyncio.Task[None]:
        generation, error = ended
        return self._in_background(generation.core.close(error))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
