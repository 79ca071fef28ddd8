"""`GenerationService`: a generation is one stream of the engine, sent as events or folded into one answer.

Leaving the stream for whatever reason (the end, a client that went away, an error) is leaving its `async with`, which cancels
the engine's request; nothing here catches a cancellation. Exceptions become statuses in `aengine.server.calls`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from aengine.errors import FieldViolation, InvalidRequestError
from aengine.outputs import FinishReason
from aengine.server.admission import Admission
from aengine.server.convert import GenerationRequest, effective_spec, located, read_request
from aengine.server.errors import DeadlinePassedError
from aengine.server.events import EventFold, EventWriter
from aengine.server.model import require_model
from aengine.v1 import generation_service_pb2 as messages
from aengine.v1.generation_service_pb2_grpc import GenerationServiceServicer

if TYPE_CHECKING:
    import grpc

    from aengine.engine.async_engine import AsyncEngine

MAX_CANCEL_IDS = 1024


class GenerationServicer(GenerationServiceServicer):
    """Answers with the tokens of `engine`; `admission` closes when the server drains."""

    def __init__(self, engine: AsyncEngine, admission: Admission) -> None:
        self._engine = engine
        self._admission = admission

    async def Generate(self, request: messages.GenerateRequest, context: grpc.ServicerContext) -> messages.GenerateResponse:
        answer = EventFold()
        async with aclosing(self._events(request, context)) as responses:
            async for response in responses:
                answer.add(response.event)
        return answer.response()

    async def StreamGenerate(
        self, request: messages.StreamGenerateRequest, context: grpc.ServicerContext
    ) -> AsyncGenerator[messages.StreamGenerateResponse, None]:
        async with aclosing(self._events(request, context)) as responses:
            async for response in responses:
                yield response

    async def CancelRequests(
        self, request: messages.CancelRequestsRequest, context: grpc.ServicerContext
    ) -> messages.CancelRequestsResponse:
        if not 1 <= len(request.request_ids) <= MAX_CANCEL_IDS:
            description = f"{len(request.request_ids)} ids are not 1 to {MAX_CANCEL_IDS}"
            raise InvalidRequestError([FieldViolation("request_ids", description)])
        require_model(self._engine, "")  # before the start there is nothing to cancel, nor a way to ask
        response = messages.CancelRequestsResponse()
        for request_id in request.request_ids:
            was_in_flight = await self._engine.cancel(request_id)
            (response.cancelled_request_ids if was_in_flight else response.unknown_request_ids).append(request_id)
        return response

    async def _events(
        self, request: GenerationRequest, context: grpc.ServicerContext
    ) -> AsyncGenerator[messages.StreamGenerateResponse, None]:
        with self._admission.enter():
            wanted = read_request(request)
            model = require_model(self._engine, request.spec.model)
            writer = EventWriter(text=wanted.text, token_ids=wanted.token_ids)
            # The engine hears of the call's deadline, so that it can end the work in time even if the cancellation is late.
            remaining = context.time_remaining()
            by_call = remaining is not None and (wanted.timeout is None or remaining < wanted.timeout)
            if by_call and remaining <= 0:
                raise DeadlinePassedError("the deadline had passed when the request arrived")
            try:
                async with self._engine.stream(
                    wanted.prompt,
                    wanted.params,
                    request_id=wanted.request_id,
                    priority=wanted.priority,
                    tenant=wanted.tenant,
                    timeout=remaining if by_call else wanted.timeout,
                    cache_salt=wanted.cache_salt,
                ) as stream:
                    await stream.started()
                    yield writer.started(
                        request_id=stream.request_id,
                        model=model.name,
                        prompt_tokens=stream.usage.prompt_tokens,
                        seed=stream.seed,
                        effective_spec=effective_spec(request.spec, stream.effective_params) if wanted.effective_params else None,
                    )
                    prompt_is_due = wanted.params.prompt_logprobs is not None
                    async for token in stream:
                        if prompt_is_due:  # known by the first token
                            prompt_is_due = False
                            for piece in writer.prompt_logprobs(stream.completion().prompt_logprobs or ()):
                                yield piece
                        reason = token.finish_reason
                        if reason is FinishReason.DEADLINE and by_call:
                            raise DeadlinePassedError("the deadline passed before the request was done")
                        delta = writer.delta(token)
                        if delta is not None:
                            yield delta
                        if reason is not None and reason is not FinishReason.ERROR:
                            yield writer.sequence_finished(token, reason)
                    yield writer.finished(stream.usage)
            except InvalidRequestError as error:
                raise located(error, request.spec) from error
