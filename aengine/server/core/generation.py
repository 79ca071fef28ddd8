"""A generation between the engine and whoever sends its output: submitted, read, recorded at its end.

Every call that generates goes through here, whichever door it came by. Leaving a `Generation` for whatever reason (the end, a client that
went away, an error) cancels the engine's request; nothing here catches a cancellation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, cast

from aengine.api.errors import InvalidRequestError, RequestIdInUseError, refusal
from aengine.api.outputs import FinishReason, Token
from aengine.api.request import Prompt, RemoteImage
from aengine.api.stream import TokenStream
from aengine.chat.parser import ChatParser
from aengine.chat.preparation import GenerationRequest, PreparedChat, prepare_chat
from aengine.chat.text_source import Event
from aengine.server.core.calls_in_flight import CURRENT_CALL, GenerationRecord, current_caller, notify
from aengine.server.core.core import Backend
from aengine.server.core.errors import ServiceError

READ_TOKENS = 64
"""Most tokens taken from the engine at a time: what waits beyond them for a slow client counts as unread, and parks the request."""


@dataclass(eq=False, slots=True)
class Generation:
    """One request in the engine, made by `submit`. Whoever reads `stream` calls `note_tokens` with what came."""

    backend: Backend
    model: str
    request_id: str
    stream: TokenStream
    record: GenerationRecord
    prepared: PreparedChat | None  # of a chat whose output is parsed
    by_call: bool  # whether the deadline of the call, rather than a time limit of the request, would end it
    held: ExitStack  # of the admission
    num_open: int  # sequences whose end was not read
    waits: ExitStack  # what it holds until it has a token; closed with `held`, too
    _last_tokens: float | None = field(default=None, init=False)  # when they came, on time.monotonic
    _parsers: dict[int, ChatParser] = field(default_factory=dict, init=False)  # by sequence

    def note_tokens(self, tokens: Sequence[Token]) -> None:
        """Record tokens that came together. Raises `ServiceError` (DEADLINE_PASSED) when the deadline of the call ended the request."""
        now = time.monotonic()
        if self._last_tokens is not None:
            self.record.inter_token_seconds.observe(now - self._last_tokens)
        else:
            self.waits.close()
        self._last_tokens = now
        for token in tokens:  # for every token of every stream: what is added here is paid often
            if token.finish_reason is not None:
                if self.by_call and token.finish_reason is FinishReason.DEADLINE:
                    raise ServiceError("DEADLINE_PASSED", "the deadline passed before the request was done")
                self.record.finish_reason = token.finish_reason
                self.num_open -= 1

    def parse(self, tokens: Sequence[Token]) -> list[Event]:
        """What tokens of one sequence that came together say, where the output is parsed; at its end also what was held back."""
        assert self.prepared is not None
        last = tokens[-1]
        if (parser := self._parsers.get(last.index)) is None:
            parser = self._parsers[last.index] = self.prepared.parser()
        events = parser.feed(last.text if len(tokens) == 1 else "".join([token.text for token in tokens]))
        return events if last.finish_reason is None else events + parser.finish(cut=last.finish_reason.cuts)

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


async def count_prompt_tokens(backend: Backend, request: GenerationRequest) -> int:
    """How many tokens the chat of `request` has as a prompt. Raises what `prepare_chat` raises, and `ServiceError`."""
    assert request.chat is not None
    backend.require_model(request.model)
    messages = cast(Sequence[Mapping[str, Any]], request.prompt)
    messages = await backend.image_urls.resolved(messages)
    return len((await prepare_chat(backend.engine, messages, request.params, request.options, request.chat)).prompt)


async def submit(backend: Backend, request: GenerationRequest, deadline: float | None = None) -> Generation:
    """Submit `request`, whose call ends at `deadline`, on time.monotonic. Raises what `AsyncEngine.stream` and `prepare_chat` raise, and
    `ServiceError`."""
    with ExitStack() as held:
        held.enter_context(backend.admission.enter_generation(len(request.options.live_sequences(request.params.n))))
        engine, caller, start = backend.engine, current_caller(), time.monotonic()
        prompt, params, options, prepared = request.prompt, request.params, request.options, None
        model, adapter = backend.require_model(request.model, options.adapter)
        if adapter is not None:
            options = replace(options, adapter=adapter)
        if not options.tenant:
            options = replace(options, tenant=caller.tenant)
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            prompt = await backend.image_urls.resolved(cast(Sequence[Mapping[str, Any]], prompt))
        if any(isinstance(image, RemoteImage) for image in options.images):
            options = replace(options, images=await backend.image_urls.fetched(options.images))
        if request.chat is not None:
            messages = cast(Sequence[Mapping[str, Any]], prompt)
            prepared = await prepare_chat(engine, messages, params, options, request.chat)
            prompt, params, options = prepared.prompt, prepared.params, prepared.options
        waits = held.enter_context(ExitStack())
        known = _num_ids(prompt) if backend.admission.counts_tokens else None
        if known is not None:
            waits.enter_context(backend.admission.wait(known + options.num_known_tokens))
        # The engine knows the call's deadline, so that it can end the work in time even if the cancellation is late.
        now, timeout = time.monotonic(), options.timeout
        if by_call := deadline is not None and (timeout is None or deadline - now < timeout):
            timeout = deadline - now
            if timeout <= 0:
                raise ServiceError("DEADLINE_PASSED", "the deadline had passed when the request arrived")
        try:
            engine_id = backend.engine_id(options.request_id, caller)
            stream = engine.stream(prompt, params, options, request_id=engine_id, timeout=timeout)
        except RequestIdInUseError:
            raise
        except InvalidRequestError as error:
            # `stream` does not compile the grammar, so its violations are not among these.
            is_compiled = params.structured_output is not None or params.reasoning is not None
            violations = await engine.violations(prompt, params) if is_compiled else []
            raise (refusal(violations) if violations else error) from error
        request_id = options.request_id or stream.request_id
        backend.streams.add_request(request_id, caller, stream)
        record = GenerationRecord(request_id, start)
        name, num_open = adapter or model.name, len(options.live_sequences(params.n))
        generation = Generation(backend, name, request_id, stream, record, prepared, by_call, held.pop_all(), num_open, waits)
    if known is None and backend.admission.counts_tokens:
        try:
            await stream.started()
            waits.enter_context(backend.admission.wait(stream.usage.prompt_tokens + options.num_known_tokens))
        except BaseException as error:
            await generation.close(error)
            raise
    return generation


def _num_ids(prompt: Prompt) -> int | None:
    """How many tokens a prompt has, where it is ids; None: only the engine will know."""
    is_text = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))
    return None if is_text else len(prompt)
