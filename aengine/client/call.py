"""`GenerationCall`: one request on its way to the server and the events that come back.

Owns when a call is made again (no event has come yet) and when a stream is resumed (the request was marked resumable). The reader of the
events sees one sequence of them without gaps. Knows nothing of tokens.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from grpc import aio

from aengine.client.failures import Backoff, Failure
from aengine.client.link import Link
from aengine.client.prompt_ids import needs_prompt_ids, write_prompt_ids
from aengine.errors import EngineDeadError, RequestIdInUseError, ServerError
from aengine.v1.generation_pb2 import GenerationEvent
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, ResumeGenerateRequest, StreamGenerateRequest

DEADLINE_GRACE = 10.0
"""Seconds beyond the time limit of a request until its call is given up: by then the server has ended it, or is stuck."""


class GenerationCall:
    """One request. `timeout`: its time limit in seconds. `id_is_random`: nobody else can have a request with that id."""

    def __init__(self, link: Link, request: StreamGenerateRequest, *, timeout: float | None, id_is_random: bool) -> None:
        self._link = link
        self._request = request
        self._deadline = None if timeout is None else time.monotonic() + timeout + DEADLINE_GRACE
        self._id_is_random = id_is_random
        self._num_events = 0  # that came, which is the number of the next
        self._resume_token = b""
        self._backoff = Backoff()

    @property
    def request_id(self) -> str:
        return self._request.request_id

    async def prompt_ids(self) -> Sequence[int]:
        """Those of a request with logprobs of its prompt, else none. To be called before `events()`. Raises `AEngineError`."""
        spec = self._request.spec
        return await write_prompt_ids(self._link, spec) if needs_prompt_ids(spec) else ()

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Raises `AEngineError`. Closing it cancels the call."""
        call = self._submit()
        while True:
            try:
                async with aclosing(self._read(call)) as events:
                    async for event in events:
                        yield event
                return
            except aio.AioRpcError as error:
                failure = self._link.failure(error)
            call = await (self._resume(failure) if self._num_events else self._submit_again(failure))

    async def cancel(self) -> None:
        """Have the server cancel the request; returns when it has released it. Raises `AEngineError`."""
        if self._num_events or self._id_is_random:  # else the id may be that of another request
            await self._link.ask(self._link.generation.CancelRequests, CancelRequestsRequest(request_ids=[self.request_id]))

    async def _read(self, call: Any) -> AsyncGenerator[GenerationEvent, None]:
        is_last = False
        try:
            while (response := await call.read()) is not aio.EOF:
                event: GenerationEvent = response.event
                self._num_events += 1
                self._backoff.reset()
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

    def _submit(self) -> Any:
        return self._link.generation.StreamGenerate(self._request, timeout=self._remaining(), metadata=self._link.metadata)

    async def _submit_again(self, failure: Failure) -> Any:
        """Raises the failure's error unless it is safe to try again."""
        # A connection that broke before the first event may have left the request on the server.
        is_own = isinstance(failure.error, RequestIdInUseError) and self._backoff.count > 0
        if not (failure.temporary or is_own) or self._backoff.count >= self._link.config.max_retries:
            raise failure.error
        await self._backoff.wait(failure)
        if is_own:
            await self.cancel()
        return self._submit()

    async def _resume(self, failure: Failure) -> Any:
        """Raises the failure's error unless the request may still be there."""
        is_lost = failure.code is grpc.StatusCode.UNAVAILABLE and not isinstance(failure.error, EngineDeadError)
        if not (self._resume_token and is_lost) or self._backoff.seconds > self._link.config.resume_timeout:
            raise failure.error
        await self._backoff.wait(failure)
        request = ResumeGenerateRequest(request_id=self.request_id, resume_token=self._resume_token, next_event_number=self._num_events)
        return self._link.generation.ResumeGenerate(request, timeout=self._remaining(), metadata=self._link.metadata)

    def _remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
