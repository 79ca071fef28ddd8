"""`GenerationCall`: one request on its way to the server and the events that come back.

Owns when a call is made again (nothing was answered yet) and when a stream is taken up again (it was asked to be resumable). Whoever
reads the events sees one sequence of them without gaps. Knows nothing of tokens.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
from grpc import aio

from aengine.client.failures import Backoff, Failure
from aengine.client.link import Link
from aengine.errors import EngineDeadError, RequestIdInUseError, ServerError
from aengine.v1.generation_pb2 import GenerationEvent
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, ResumeGenerateRequest, StreamGenerateRequest

DEADLINE_GRACE = 10.0
"""Seconds beyond the time limit of a request until its call is given up: by then the server has ended it, or is stuck."""


class GenerationCall:
    """One request. `timeout`: its time limit in seconds. `id_is_drawn`: nobody else can have a request of that name."""

    def __init__(self, link: Link, request: StreamGenerateRequest, *, timeout: float | None, id_is_drawn: bool) -> None:
        self._link = link
        self._request = request
        self._deadline = None if timeout is None else time.monotonic() + timeout + DEADLINE_GRACE
        self._id_is_drawn = id_is_drawn
        self._num_events = 0  # that came, which is the number of the next
        self._resume_token = b""
        self._backoff = Backoff()
        self._lost_since: float | None = None  # on time.monotonic

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Raises `AEngineError`. Leaving it cancels the call."""
        call = self._submit()
        while True:
            try:
                async with aclosing(self._read(call)) as events:
                    async for event in events:
                        yield event
                return
            except aio.AioRpcError as error:
                failure = self._link.failure(error)
            if not self._num_events:
                call = await self._submit_again(failure)
            elif self._resume_token:
                call = await self._take_up_again(failure)
            else:
                raise failure.error

    async def end(self) -> None:
        """Have the server let go of the request; returns when nothing of it is left there. Raises `AEngineError`."""
        if self._num_events or self._id_is_drawn:  # else the name may be that of another request
            await self._link.ask(self._link.generation.CancelRequests, CancelRequestsRequest(request_ids=[self._request.request_id]))

    async def _read(self, call: Any) -> AsyncGenerator[GenerationEvent, None]:
        is_last = False
        try:
            while (response := await call.read()) is not aio.EOF:
                event: GenerationEvent = response.event
                if event.event_number != self._num_events or is_last:
                    raise ServerError(f"event {event.event_number} came where {self._num_events} was due", "DATA_LOSS")
                self._num_events += 1
                self._lost_since, self._backoff.count = None, 0
                if event.HasField("started"):
                    self._resume_token = event.started.resume_token
                is_last = event.HasField("finished")
                yield event
            if not is_last:
                raise ServerError("the stream ended before its last event", "DATA_LOSS")
        except aio.AioRpcError:
            if not is_last:
                raise
        finally:
            call.cancel()

    async def _submit_again(self, failure: Failure) -> Any:
        """Raises the failure's error unless it is safe to try again."""
        # A connection that broke before the answer may have left the request on the server.
        is_own = isinstance(failure.error, RequestIdInUseError) and self._backoff.count > 0
        if not (failure.temporary or is_own) or self._backoff.count >= self._link.config.max_retries:
            raise failure.error
        await self._backoff.wait(failure)
        if is_own:
            await self.end()
        return self._submit()

    async def _take_up_again(self, failure: Failure) -> Any:
        """Raises the failure's error unless the request may still be there."""
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = now
        is_lost = failure.code is grpc.StatusCode.UNAVAILABLE and not isinstance(failure.error, EngineDeadError)
        if not is_lost or now - self._lost_since > self._link.config.resume_timeout:
            raise failure.error
        await self._backoff.wait(failure)
        request = ResumeGenerateRequest(
            request_id=self._request.request_id, resume_token=self._resume_token, next_event_number=self._num_events
        )
        return self._link.generation.ResumeGenerate(request, timeout=self._remaining(), metadata=self._link.metadata)

    def _submit(self) -> Any:
        return self._link.generation.StreamGenerate(self._request, timeout=self._remaining(), metadata=self._link.metadata)

    def _remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
