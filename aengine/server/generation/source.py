"""A generation between the engine and whoever sends its output: submitted from a request message, read, recorded at its end.

Every RPC that generates goes through here. Leaving a `Generation` for whatever reason (the end, a client that went away, an error)
cancels the engine's request; nothing here catches a cancellation. Exceptions become statuses elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

from aengine.engine.stream import TokenStream
from aengine.errors import FieldError, InvalidRequestError, RequestIdInUseError, refusal
from aengine.outputs import FinishReason, Token
from aengine.server.calls.errors import StatusError
from aengine.server.calls.records import CURRENT_CALL, GenerationRecord, current_caller, notify
from aengine.server.generation.backend import Backend, require_model
from aengine.server.generation.convert import GenerationRequest, StreamPolicy, located, read_request
from aengine.server.generation.responses import (
    most_alternatives,
    wants_text,
    write_effective_spec,
    write_logprobs,
    write_sequence,
    write_timing,
    write_usage,
)
from aengine.v1.generation_pb2 import GenerationFinished, GenerationSpec, GenerationStarted
from aengine.v1.generation_service_pb2 import GenerateResponse


@dataclass(eq=False, slots=True)
class Generation:
    """One request in the engine, made by `submit`. Whoever reads `stream` calls `note` with what came."""

    backend: Backend
    spec: GenerationSpec
    policy: StreamPolicy
    model: str
    request_id: str
    stream: TokenStream
    record: GenerationRecord
    by_call: bool  # whether the deadline of the call, rather than a time limit of the request, would end it
    held: ExitStack  # of the admission
    num_open: int  # sequences whose end was not read
    _last_tokens: float | None = field(default=None, init=False)  # when they came, on time.monotonic

    def note(self, tokens: Sequence[Token]) -> None:
        """Record tokens that came together. Raises `StatusError` (DEADLINE_PASSED) when the deadline of the call ended the request."""
        now = time.monotonic()
        if self._last_tokens is not None:
            self.record.inter_token_seconds.observe(now - self._last_tokens)
        self._last_tokens = now
        for token in tokens:  # for every token of every stream: what is added here is paid often
            if token.finish_reason is not None:
                if self.by_call and token.finish_reason is FinishReason.DEADLINE:
                    raise StatusError("DEADLINE_PASSED", "the deadline passed before the request was done")
                self.record.finish_reason = token.finish_reason
                self.num_open -= 1

    def write_beginning(self, message: GenerationStarted | GenerateResponse) -> None:
        """Write the fields that are known once the stream is `started()`."""
        message.request_id = self.request_id
        message.model = self.model
        message.prompt.num_tokens = self.stream.usage.prompt_tokens
        message.seed = self.stream.seed
        if self.spec.output.effective_params:
            write_effective_spec(self.spec, self.stream.effective_params, message.effective_spec)

    def write_end(self, message: GenerationFinished | GenerateResponse) -> None:
        """Write the fields that are known once everything was read."""
        write_usage(self.stream.usage, message.usage)
        write_timing(self.stream.info(), time.monotonic() - self.record.start, message.timing)

    async def complete(self, response: GenerateResponse, max_bytes: int, may_read: asyncio.Event | None = None) -> None:
        """Read the whole output into `response`; nothing more is read while `may_read` is not set. Raises `StatusError`
        (ANSWER_TOO_LARGE) as soon as the response cannot but take more than `max_bytes`, and what the stream raises."""
        stream, output, text = self.stream, self.spec.output, wants_text(self.spec.output)
        token_bytes = int(output.token_ids) + (4 * (1 + output.logprobs.top_k) if output.HasField("logprobs") else 0)
        await stream.started()
        num_bytes = 4 * stream.usage.prompt_tokens * (1 + output.prompt_logprobs.top_k) if output.HasField("prompt_logprobs") else 0
        while tokens := await stream.read():
            self.note(tokens)
            num_bytes += len(tokens) * token_bytes + (sum(len(token.text) for token in tokens) if text else 0)
            _check_size(num_bytes, max_bytes)
            while may_read is not None and not may_read.is_set():  # one of many that wait may clear it again
                await may_read.wait()
        completion = stream.completion()
        self.write_beginning(response)
        if output.HasField("prompt_logprobs") and completion.prompt_logprobs:
            write_logprobs(completion.prompt_logprobs, most_alternatives(completion.prompt_logprobs), response.prompt_logprobs)
        for index, sequence in enumerate((completion, *completion.others)):
            write_sequence(index, sequence, output, response.sequences.add())
        self.write_end(response)
        _check_size(response.ByteSize(), max_bytes)

    async def close(self, error: BaseException | None = None) -> None:
        """Cancel what has not ended; returns when its pages are free. `error`: what it failed with. To be called once."""
        stream, record = self.stream, self.record
        with self.held:
            try:
                await stream.aclose()
            finally:
                self.backend.streams.discard(self.request_id, stream)
                record.usage, record.timing = stream.usage, stream.timing
                record.total_seconds = time.monotonic() - record.start
                if isinstance(error, Exception):
                    record.finish_reason = FinishReason.ERROR
                elif self.num_open:  # the client left before the end
                    record.finish_reason = FinishReason.CANCELLED
                if (call := CURRENT_CALL.get()) is not None:
                    call.prompt_tokens += record.usage.prompt_tokens
                    call.completion_tokens += record.usage.completion_tokens
                    call.draft_tokens += record.usage.draft_tokens
                    call.accepted_draft_tokens += record.usage.accepted_draft_tokens
                notify(self.backend.observers.on_generation_end, record)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.close(error)
        if isinstance(error, FieldError):
            raise located(error, self.spec) from error


async def submit(backend: Backend, request: GenerationRequest, deadline: float | None = None) -> Generation:
    """Submit `request`, whose call ends at `deadline`, on time.monotonic. Raises what `AsyncEngine.stream` raises, located."""
    with ExitStack() as held:
        held.enter_context(backend.admission.enter())
        model, spec, caller = require_model(backend.engine, request.spec.model), request.spec, current_caller()
        prompt, params, options, policy = await read_request(request, backend.engine.violations)
        # The engine knows the call's deadline, so that it can end the work in time even if the cancellation is late.
        start, timeout = time.monotonic(), options.timeout
        if by_call := deadline is not None and (timeout is None or deadline - start < timeout):
            timeout = deadline - start
            if timeout <= 0:
                raise StatusError("DEADLINE_PASSED", "the deadline had passed when the request arrived")
        try:
            engine_id = backend.engine_id(options.request_id, caller)
            stream = backend.engine.stream(prompt, params, options, request_id=engine_id, timeout=timeout)
        except RequestIdInUseError as error:
            raise located(error, spec) from error
        except InvalidRequestError as error:
            # `stream` does not compile the grammar, so its violations are not among these.
            violations = [] if params.structured_output is None else await backend.engine.violations(prompt, params)
            raise located(refusal(violations) if violations else error, spec) from error
        request_id = options.request_id or stream.request_id
        backend.streams.add(request_id, caller, stream)
        record = GenerationRecord(request_id, start)
        return Generation(backend, spec, policy, model.name, request_id, stream, record, by_call, held.pop_all(), params.n)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise StatusError("ANSWER_TOO_LARGE", f"the answer takes more than {max_bytes} bytes in one message")
