"""`GenerationService`: a generation is one stream of the engine, sent as events or as one response.

Leaving a stream for whatever reason (the end, a client that went away, an error) cancels the engine's request, unless it is resumable;
nothing here catches a cancellation. Exceptions become statuses in `aengine.server.grpc.interceptor`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from grpc import ServicerContext

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FieldChecks
from aengine.api.outputs import RequestState
from aengine.api.request import RequestOptions
from aengine.server.core.calls_in_flight import current_caller
from aengine.server.core.core import CHUNK_SIZE, Backend
from aengine.server.core.errors import ServiceError, clip, request_not_found
from aengine.server.core.generation import Generation
from aengine.server.core.resume import AskedAgain, Resumable, ResumableStreams
from aengine.server.grpc.generation.batch import StoredBatches, batch_responses
from aengine.server.grpc.generation.events import stream_responses, submit_message
from aengine.server.grpc.generation.session import session_responses
from aengine.v1 import generation_service_pb2 as messages
from aengine.v1.generation_service_pb2_grpc import GenerationServiceServicer
from aengine.wire.request import read_stream_options
from aengine.wire.response import write_usage

DOOR = "grpc"
MAX_CANCEL_IDS = 1024
STATES: Mapping[RequestState, messages.RequestState.ValueType] = {
    state: messages.RequestState.Value(f"REQUEST_STATE_{state.name}") for state in RequestState
}


class GenerationServicer(GenerationServiceServicer):
    """`GenerationService` on the engine of a backend. `resumables` keeps the generations that are resumable, `batches` those batches that
    are stored."""

    def __init__(self, backend: Backend, resumables: ResumableStreams, batches: StoredBatches) -> None:
        self._backend = backend
        self._batches = batches
        self._resumables = resumables
        resumables.makers[DOOR] = self._make_again

    async def Generate(self, request: messages.GenerateRequest, context: ServicerContext) -> messages.GenerateResponse:
        response = messages.GenerateResponse()
        async with await submit_message(self._backend, request, deadline_of(context)) as generation:
            await generation.complete(response, self._backend.max_message_bytes)
        return response

    # The streams are handed on as they are: another generator around them would run for every message.

    def StreamGenerate(
        self, request: messages.StreamGenerateRequest, context: ServicerContext
    ) -> AsyncGenerator[Any, None]:  # messages, or such that are already serialised
        if request.spec.stream.resumable:
            return self._resumables.read(self._start(request))
        return stream_responses(self._backend, request, deadline_of(context))

    async def CancelRequests(self, request: messages.CancelRequestsRequest, context: ServicerContext) -> messages.CancelRequestsResponse:
        if not 1 <= len(request.request_ids) <= MAX_CANCEL_IDS:
            description = f"{len(request.request_ids)} ids are not 1 to {MAX_CANCEL_IDS}"
            raise InvalidRequestError.of("request_ids", description)
        self._backend.require_model("")  # before the start there is nothing to cancel, nor a way to ask
        caller = current_caller()
        ids = tuple(dict.fromkeys(request.request_ids))
        response = messages.CancelRequestsResponse()
        for start in range(0, len(ids), CHUNK_SIZE):  # each of these leaves in one step
            some = ids[start : start + CHUNK_SIZE]
            cancelled = await asyncio.gather(*(self._backend.cancel(request_id, caller) for request_id in some))
            for request_id, was_in_flight in zip(some, cancelled, strict=True):
                (response.cancelled_request_ids if was_in_flight else response.unknown_request_ids).append(request_id)
        return response

    async def TouchSession(self, request: messages.TouchSessionRequest, context: ServicerContext) -> messages.TouchSessionResponse:
        self._backend.require_model("")
        session = RequestOptions(session=request.session, tenant=request.tenant or current_caller().tenant)
        assert session.session is not None
        return messages.TouchSessionResponse(num_tokens=await self._backend.engine.touch(session.session, session.tenant))

    def BatchGenerate(
        self, request: messages.BatchGenerateRequest, context: ServicerContext
    ) -> AsyncGenerator[Any, None]:  # messages, or such that are already serialised
        if request.batch_id:
            return self._batches.responses(request)
        return batch_responses(self._backend, request, deadline_of(context))

    async def DeleteBatch(self, request: messages.DeleteBatchRequest, context: ServicerContext) -> messages.DeleteBatchResponse:
        await self._batches.delete(request.batch_id)
        return messages.DeleteBatchResponse()

    def Session(
        self, request_iterator: AsyncIterator[messages.SessionRequest], context: ServicerContext
    ) -> AsyncGenerator[messages.SessionResponse, None]:
        return session_responses(self._backend, request_iterator, deadline_of(context))

    def ResumeGenerate(self, request: messages.ResumeGenerateRequest, context: ServicerContext) -> AsyncGenerator[Any, None]:
        check = FieldChecks()
        for name in ("request_id", "resume_token"):
            if not getattr(request, name):
                check.add_violation(name, "must not be empty")
        check.finish(InvalidRequestError)
        request_id, caller = request.request_id, current_caller()
        resumable = self._resumables.of_token(request_id, request.resume_token, caller)
        if resumable is None:
            if self._resumables.find(request_id, caller) is None and self._backend.find(request_id, caller) is not None:
                raise ServiceError("NOT_RESUMABLE", f"request {clip(request_id)!r} was not asked to be resumable")
            raise request_not_found(request_id)
        return resumable.replay.read(request.next_event_number)

    def _start(self, request: messages.StreamGenerateRequest) -> Resumable:
        """Begin a generation whose events can be read again. It counts as in flight until a reader there is was sent them."""
        retain = read_stream_options(request.spec.stream, FieldChecks()).retain_seconds  # out of range, it is refused before it matters
        return self._resumables.start(retain, partial(self._write, request))

    async def _make_again(self, resumable: Resumable, body: bytes) -> None:
        await self._write(messages.StreamGenerateRequest.FromString(body), resumable)

    async def _write(self, request: messages.StreamGenerateRequest, resumable: Resumable) -> None:
        replay, begun = resumable.replay, list[Generation]()
        generated = stream_responses(self._backend, request, resume_token=resumable.token, on_begin=begun.append)
        async with aclosing(generated) as responses:
            async for response in responses:
                if begun:
                    generation = begun.pop()
                    await self._resumables.begin(resumable, generation.request_id, partial(_asked, request), generation.stream)
                await replay.append(response.SerializeToString())
                if response.event.HasField("finished"):
                    await replay.wait_sent()

    async def GetRequest(self, request: messages.GetRequestRequest, context: ServicerContext) -> messages.GetRequestResponse:
        """How far a request has come, whether it runs or is only kept."""
        backend, caller, request_id = self._backend, current_caller(), request.request_id
        if not request_id:
            raise InvalidRequestError.of("request_id", "must not be empty")
        resumable = self._resumables.find(request_id, caller)
        streams = backend.streams.find(request_id, caller)
        if resumable is not None and streams and resumable.stream is not streams[0]:
            resumable = None  # kept of an earlier request of the same name
        info = resumable.info if resumable is not None else backend.find(request_id, caller)
        if info is None:
            raise request_not_found(request_id)
        response = messages.GetRequestResponse(request_id=request_id, state=STATES[info.state])
        write_usage(info.usage, response.usage)
        response.arrival.FromNanoseconds(round(info.arrival * 1e9))
        if resumable is not None:
            response.resumable = True
            response.next_event_number = resumable.replay.ring.end
        return response


def _asked(request: messages.StreamGenerateRequest) -> AskedAgain:
    return AskedAgain(DOOR, request.SerializeToString())


def deadline_of(context: ServicerContext) -> float | None:
    """The deadline of a call, on time.monotonic; None without one."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
