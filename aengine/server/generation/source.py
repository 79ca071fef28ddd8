"""A generation between the engine and whoever sends its events: opened from a request, written as events, recorded at its end.

Every RPC that generates goes through here. Leaving an `open_generation` for whatever reason (the end, a client that went away, an
error) cancels the engine's request; nothing here catches a cancellation. Exceptions become statuses elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aengine.errors import FieldError, InvalidRequestError, RequestIdInUseError, refusal
from aengine.outputs import FinishReason, ModelInfo, Token
from aengine.server.calls.errors import DeadlinePassedError
from aengine.server.calls.observers import current_caller
from aengine.server.calls.records import GenerationRecord
from aengine.server.generation.backend import Backend, require_model
from aengine.server.generation.convert import EngineRequest, GenerationRequest, effective_spec, located, read_request
from aengine.server.generation.events import EventWriter
from aengine.v1.generation_pb2 import GenerationEvent, GenerationSpec
from aengine.v1.generation_service_pb2 import StreamGenerateResponse

if TYPE_CHECKING:
    from aengine.engine.stream import TokenStream

READ_TOKENS = 64
"""Most tokens taken from the engine at a time: what waits beyond them for a slow client counts as unread, and parks the request."""


class Generation:
    """One request being answered. Made by `open_generation`."""

    def __init__(
        self,
        spec: GenerationSpec,
        wanted: EngineRequest,
        model: ModelInfo,
        request_id: str,
        stream: TokenStream,
        writer: EventWriter,
        by_call: bool,
        resume_token: bytes,
    ) -> None:
        self.stream = stream
        self.request_id = request_id
        self.policy = wanted.stream
        self._spec = spec
        self._wanted = wanted
        self._model = model
        self._writer = writer
        self._by_call = by_call
        self._resume_token = resume_token
        self.prompt_is_due = wanted.params.prompt_logprobs is not None

    def begin(self) -> None:
        """Write the first event. The stream is `started()`."""
        stream, wanted = self.stream, self._wanted
        self._writer.started(
            request_id=self.request_id,
            model=self._model.name,
            prompt_tokens=stream.usage.prompt_tokens,
            seed=stream.seed,
            effective_spec=effective_spec(self._spec, stream.effective_params) if wanted.effective_params else None,
            resume_token=self._resume_token,
        )

    def prompt(self) -> Iterator[None]:
        """Write what was asked for of the prompt, one event at a time. To be called when there are tokens, before they are written."""
        if self.prompt_is_due:
            self.prompt_is_due = False
            yield from self._writer.prompt_logprobs(self.stream.completion().prompt_logprobs or ())

    def write(self, tokens: Sequence[Token]) -> None:
        """Write the events of tokens that came together, and the last event after the last of them.

        Raises `DeadlinePassedError` when the deadline of the call, rather than a time limit of the request, ended it.
        """
        if self._by_call and any(token.finish_reason is FinishReason.DEADLINE for token in tokens):
            raise DeadlinePassedError("the deadline passed before the request was done")
        self._writer.tokens(tokens)
        if self.stream.ended:
            self._writer.finished(self.stream.usage, self.stream.timing)

    def located(self, error: Exception) -> Exception:
        """`error` in the words of the schema, where it is about the request."""
        return located(error, self._spec) if isinstance(error, FieldError) else error


@asynccontextmanager
async def open_generation(
    backend: Backend,
    request: GenerationRequest,
    new_event: Callable[[], GenerationEvent],
    *,
    remaining: float | None = None,
    resume_token: bytes = b"",
) -> AsyncIterator[Generation]:
    """Submit `request`, whose call has `remaining` seconds until its deadline. Raises what `AsyncEngine.stream` raises, located."""
    with backend.admission.enter():
        model = require_model(backend.engine, request.spec.model)
        wanted = await read_request(request, backend.engine.violations)
        # The engine hears of the call's deadline, so that it can end the work in time even if the cancellation is late.
        options = wanted.options
        by_call = remaining is not None and (options.timeout is None or remaining < options.timeout)
        if by_call and remaining is not None and remaining <= 0:
            raise DeadlinePassedError("the deadline had passed when the request arrived")
        record = GenerationRecord(options.request_id or "")
        start = time.monotonic()
        writer = EventWriter(record, new_event, text=wanted.text, token_ids=wanted.token_ids, delta_tokens=wanted.stream.delta_tokens)
        caller = current_caller()
        try:
            stream = backend.engine.stream(
                wanted.prompt,
                wanted.params,
                options,
                request_id=backend.engine_id(options.request_id, caller),
                timeout=remaining if by_call else options.timeout,
            )
        except RequestIdInUseError as error:
            raise located(error, request.spec) from error
        except InvalidRequestError as error:
            # Of a grammar it does not know yet whether it can be compiled.
            violations = [] if wanted.params.structured_output is None else await backend.engine.violations(wanted.prompt, wanted.params)
            raise located(refusal(violations) if violations else error, request.spec) from error
        record.request_id = request_id = options.request_id or stream.request_id
        backend.streams.add(request_id, caller, stream)
        try:
            async with stream:
                yield Generation(request.spec, wanted, model, request_id, stream, writer, by_call, resume_token)
        except Exception as error:
            record.finish_reasons.append(FinishReason.ERROR)
            if isinstance(error, FieldError):
                raise located(error, request.spec) from error
            raise
        finally:
            backend.streams.discard(request_id, stream)
            timing = stream.timing
            record.usage, record.queue_seconds, record.first_token_seconds = stream.usage, timing.queue, timing.first_token
            record.total_seconds = time.monotonic() - start
            if len(record.finish_reasons) < wanted.params.n:  # the client left before the end
                record.finish_reasons.append(FinishReason.CANCELLED)
            for observer in backend.observers:
                observer.on_generation_end(record)


async def stream_responses(
    backend: Backend,
    request: GenerationRequest,
    *,
    remaining: float | None = None,
    resume_token: bytes = b"",
    on_begin: Callable[[Generation], None] | None = None,
) -> AsyncGenerator[StreamGenerateResponse, None]:
    """A generation as the messages of a stream of its own. `on_begin` is called before the first."""
    ready: list[StreamGenerateResponse] = []

    def new_event() -> GenerationEvent:
        response = StreamGenerateResponse()
        ready.append(response)
        return response.event

    async with open_generation(backend, request, new_event, remaining=remaining, resume_token=resume_token) as generation:
        stream, policy = generation.stream, generation.policy
        most = max(READ_TOKENS, policy.delta_tokens)
        await stream.started()
        generation.begin()
        if on_begin is not None:
            on_begin(generation)
        yield ready.pop()
        delay = 0.0  # the first token does not wait
        while tokens := await stream.read(most):  # once per token: what is added here is paid often
            if delay and (missing := policy.delta_tokens - len(tokens)) > 0 and not stream.ended:
                await stream.linger(missing, delay)
                tokens += stream.take(missing) if stream.unread else []
            delay = policy.delay_seconds
            if generation.prompt_is_due:
                for _ in generation.prompt():
                    yield ready.pop()
            generation.write(tokens)
            # gRPC's own thread wakes for a write that stands alone, and takes the processor from the loop. When all streams that a step
            # feeds have written their events before the first of them is sent, their writes come together: a fifth less CPU time.
            await asyncio.sleep(0)
            for response in ready:
                yield response
            ready.clear()
