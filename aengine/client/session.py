"""`Sessions`: the requests of a client over few calls of Session, one message for all requests of a call per step of the engine.

Owns the calls, the tags of requests, what is still to be written, and what becomes of the requests of a call that ends. One task reads for
all requests of a call, and gives the events to them: this is paid per token. Nothing is tried again here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
from grpc import aio

from aengine.api.errors import ServerError
from aengine.client import active_request
from aengine.client.active_request import ActiveRequest, Feed
from aengine.client.call import DEADLINE_GRACE, needs_prompt_ids, write_prompt_ids
from aengine.client.link import Link, read_error
from aengine.v1.generation_service_pb2 import (
    SessionCancel,
    SessionHold,
    SessionOpen,
    SessionRequest,
    SessionResponse,
    SessionSubmit,
    StreamGenerateRequest,
)
from aengine.wire.names import MAX_SESSION_REQUESTS

MAX_SUBMIT_BYTES = 128 * 1024
"""A larger request has a call of its own: a server refuses what is too large by ending the call, and others would wait behind it."""

OnDone = Callable[[ActiveRequest], object]


class Sessions:
    """The sessions of one client, as many as its requests need. One is opened when the others are full."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sessions: list[_Session] = []

    def submit(self, message: StreamGenerateRequest, timeout: float | None, request: ActiveRequest, on_done: OnDone) -> Feed:
        """Without waiting. `timeout`: the time limit of the request in seconds. `on_done` is called with the request when the server has
        nothing of it any more, or did not say so in time."""
        self._sessions = [session for session in self._sessions if not session.closed]
        session = next((session for session in self._sessions if session.num_open < MAX_SESSION_REQUESTS), None)
        if session is None:
            session = _Session(self._link)
            self._sessions.append(session)
        return session.submit(message, timeout, request, on_done)

    async def aclose(self) -> None:
        """Ends every request that has not ended."""
        await asyncio.gather(*(session.aclose() for session in self._sessions))


class _SessionFeed(Feed):
    """One request under its tag, until the server has said the last of it."""

    def __init__(self, session: _Session, tag: int, request: ActiveRequest, on_done: OnDone) -> None:
        self.request = request
        self.wanted = True  # whether its events are
        self.timer: asyncio.TimerHandle | None = None  # gives up waiting for the server
        self.preparing: asyncio.Task[None] | None = None  # before anything of it is written
        self._session = session
        self._tag = tag
        self._on_done = on_done
        self._released = asyncio.Event()

    def hold(self, held: bool) -> None:
        if self.wanted and not self._released.is_set():
            self._session.say(SessionRequest(hold=SessionHold(tag=self._tag, held=held)))

    def cancel(self) -> None:
        if self._released.is_set() or not self.wanted:
            return
        self.wanted = False
        if self.preparing is not None:
            self.preparing.cancel()
        if self.preparing is not None or self._session.withdraw(self._tag):
            self._session.release(self._tag)
            return
        self._session.say(SessionRequest(cancel=SessionCancel(tag=self._tag)))
        self.set_timer(active_request.CLOSE_SECONDS, lambda: self._session.release(self._tag))

    @property
    def released(self) -> bool:
        return self._released.is_set()

    async def wait_released(self) -> None:
        if not self._released.is_set():
            with anyio.CancelScope(shield=True):  # the timer bounds it
                await self._released.wait()

    def set_timer(self, seconds: float, then: Callable[[], object]) -> None:
        """In place of the one before."""
        self.stop_timer()
        self.timer = asyncio.get_running_loop().call_later(seconds, then)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def end(self, error: Exception | None) -> None:
        self.request.end_stream(error)
        self.request.notify()

    def fail(self, error: Exception) -> None:
        """The request fails, and the server is told."""
        self.end(error)
        self.cancel()

    def mark_released(self) -> None:
        self.stop_timer()
        self._released.set()
        self._on_done(self.request)


class _Session:
    """One call."""

    def __init__(self, link: Link) -> None:
        self.closed = False  # it takes no further request
        self._is_cancelled = False  # by `aclose`
        self._link = link
        self._tags = itertools.count(1)
        self._feeds: dict[int, _SessionFeed] = {}  # by tag
        # What is to be written. What is said of a tag follows its submission, so only what is written is spoken of.
        self._said: deque[SessionRequest] = deque([SessionRequest(open=SessionOpen())])
        self._submits: dict[int, SessionRequest] = {}  # by tag, behind what is said
        self._changed = asyncio.Event()  # there is more to write, or nothing follows
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._on_end)

    @property
    def num_open(self) -> int:
        return len(self._feeds)

    def submit(self, message: StreamGenerateRequest, timeout: float | None, request: ActiveRequest, on_done: OnDone) -> _SessionFeed:
        tag = next(self._tags)
        feed = self._feeds[tag] = _SessionFeed(self, tag, request, on_done)
        if timeout is not None:
            late = ServerError("DEADLINE_EXCEEDED: the server did not end the request in time", "DEADLINE_EXCEEDED")
            feed.set_timer(timeout + DEADLINE_GRACE, lambda: feed.fail(late))
        if needs_prompt_ids(message.spec):
            feed.preparing = asyncio.get_running_loop().create_task(self._prepare(tag, message))
        else:
            self._submit(tag, message)
        return feed

    def say(self, message: SessionRequest) -> None:
        """Have a message written about a request whose submission was written."""
        self._said.append(message)
        self._changed.set()

    def withdraw(self, tag: int) -> bool:
        """Whether nothing of the request was written, nor will be."""
        return self._submits.pop(tag, None) is not None

    def release(self, tag: int) -> None:
        """Nothing follows under `tag`, or it is not waited for."""
        feed = self._feeds.pop(tag, None)
        if feed is not None:
            feed.mark_released()

    async def aclose(self) -> None:
        """End the call, and with it the requests under way."""
        self.closed = True
        self._changed.set()
        if not self._feeds:
            await asyncio.wait({self._task}, timeout=active_request.CLOSE_SECONDS)
        self._is_cancelled = True
        self._task.cancel()
        await asyncio.wait({self._task})

    # ---- what is written -----------------------------------------------------------------------------------------------

    async def _prepare(self, tag: int, message: StreamGenerateRequest) -> None:
        feed = self._feeds[tag]
        try:
            feed.request.prompt_ids = await write_prompt_ids(self._link, message.spec)
        except Exception as error:
            self.release(tag)
            feed.end(error)
        else:
            feed.preparing = None
            self._submit(tag, message)

    def _submit(self, tag: int, message: StreamGenerateRequest) -> None:
        self._submits[tag] = SessionRequest(submit=SessionSubmit(tag=tag, request=message))
        self._changed.set()

    async def _write(self, call: Any) -> None:
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):  # the call has ended, and who reads it learns why
            while True:
                if self._said:
                    await call.write(self._said.popleft())
                elif self._submits:
                    await call.write(self._submits.pop(next(iter(self._submits))))
                elif self.closed:
                    await call.done_writing()
                    return
                else:
                    self._changed.clear()
                    await self._changed.wait()

    # ---- what is read --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        call = self._link.generation.Session(metadata=self._link.metadata)
        writer = asyncio.create_task(self._write(call))
        try:
            while (response := await call.read()) is not aio.EOF:
                self._read(response)
        finally:
            writer.cancel()
            call.cancel()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Requests that are still open failed with the call, or are cancelled where `aclose` cancelled it."""
        self.closed = True
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()  # gRPC raises that, too, for reasons of its own
        for tag, feed in list(self._feeds.items()):
            if feed.preparing is not None:
                feed.preparing.cancel()
            self.release(tag)
            feed.end(None if self._is_cancelled else self._error(failure))

    def _error(self, failure: BaseException | None) -> Exception:
        """A new one for each request, for it gets the traceback of whoever raises it."""
        match failure:
            case aio.AioRpcError():
                return self._link.failure(failure).error
            case asyncio.CancelledError():
                return ServerError("the session was cancelled", "CANCELLED")
            case None:
                return ServerError("the session ended before the request", "DATA_LOSS")
            case _:
                return ServerError(f"the session was not read to its end: {failure!r}", "INTERNAL")

    def _read(self, response: SessionResponse) -> None:
        """Once per step, with the tokens of all requests: what is added here is paid often."""
        feeds = self._feeds
        changed: dict[ActiveRequest, None] = {}
        for entry in response.events:
            tag = entry.tag
            feed = feeds.get(tag)
            if feed is None:
                continue  # it was not waited for
            if entry.HasField("error"):
                self.release(tag)
                if feed.wanted:
                    feed.request.end_stream(read_error(entry.error, self._link.config.address))
            elif feed.wanted:
                try:
                    feed.request.add_event(entry.event)
                except Exception as error:
                    feed.fail(error)
                    continue
                if feed.request.finished:
                    self.release(tag)
            elif entry.event.HasField("finished"):
                self.release(tag)
            changed[feed.request] = None
        for request in changed:
            request.notify()
