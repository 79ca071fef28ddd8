"""A generation between the engine and whoever sends its output: submitted, read, recorded at its end.

Every call that generates goes through here, whichever door it came by. Leaving a `Generation` for whatever reason (the end, a client that
went away, an error) cancels the engine's request; nothing here catches a cancellation.

The embeddings that one call asks for, whichever door it came by.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, cast

from aengine.api.engine import EmbeddingFields
from aengine.api.errors import InvalidRequestError, RequestEndedError, RequestIdInUseError, refusal
from aengine.api.outputs import Completion, Embedding, FinishReason, Token
from aengine.api.request import ChatFields, ForkPoint, Prompt, RemoteImage, RequestOptions
from aengine.api.stream import TokenStream
from aengine.chat.parser import ChatParser
from aengine.chat.preparation import GenerationRequest, PreparedChat, prepare_chat
from aengine.chat.text_source import Event, random_id
from aengine.server.core.calls_in_flight import CURRENT_CALL, Caller, Decided, GenerationRecord, current_caller, notify
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
    caller: Caller
    prepared: PreparedChat | None  # of a chat whose output is parsed
    by_call: bool  # whether the deadline of the call, rather than a time limit of the request, would end it
    held: ExitStack  # of the admission
    num_open: int  # sequences whose end was not read
    waits: ExitStack  # what it holds until it has a token; closed with `held`, too
    decided: Decided | None  # of its call
    known: Sequence[Token]  # from a process before, which come again
    _last_tokens: float | None = field(default=None, init=False)  # when they came, on time.monotonic
    _num_repeated: int = field(default=0, init=False)  # of those
    _parsers: dict[int, ChatParser] = field(default_factory=dict, init=False)  # by sequence

    def note_tokens(self, tokens: Sequence[Token]) -> None:
        """Record tokens that came together. Raises `ServiceError` (DEADLINE_PASSED) when the deadline of the call ended the request."""
        now = time.monotonic()
        if self._last_tokens is not None:
            self.record.inter_token_seconds.observe(now - self._last_tokens)
        else:
            self.waits.close()
        self._last_tokens = now
        if self.decided is not None and self.decided.progress is not None:
            self.decided.progress.note_tokens(tokens)
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
            make_id = random_id if self.decided is None else self.decided.call_ids(last.index)
            parser = self._parsers[last.index] = self.prepared.parser(make_id)
        events = parser.feed(last.text if len(tokens) == 1 else "".join([token.text for token in tokens]))
        return events if last.finish_reason is None else events + parser.finish(cut=last.finish_reason.cuts)

    def reader(self) -> Callable[[int], Awaitable[Sequence[Token]]]:
        """Reads at most so many tokens of the output, those that are known from a process before included; none at its end."""
        return self._read if self.known else self.stream.read

    async def _read(self, most: int) -> Sequence[Token]:
        """The known tokens, then those of the stream."""
        if self._num_repeated == len(self.known):
            return await self.stream.read(most)
        tokens = self.known[self._num_repeated : self._num_repeated + most]
        self._num_repeated += len(tokens)
        return tokens

    @property
    def known_lengths(self) -> Sequence[int]:
        """How many tokens of each sequence the client has given, which are not read."""
        return [0] if self.known else self.stream.known_lengths

    def completion(self) -> Completion:
        """What was read so far, with `others`."""
        whole = self.stream.completion()
        if not self.known:
            return whole
        ids, text = [token.token_id for token in self.known], "".join([token.text for token in self.known])
        return replace(whole, token_ids=(*ids, *whole.token_ids), text=text + whole.text)

    def receipt(self) -> str | None:
        """The receipt of the request, which was read to its end, as a line of JSON, signed where there is a key; None where none was asked
        for."""
        receipt = self.stream.receipt
        if receipt is None:
            return None
        receipt = replace(receipt, request_id=self.request_id)
        if self.known:  # by a process before
            receipt = receipt.with_known([0])
        return (receipt if self.backend.receipt_key is None else receipt.signed(self.backend.receipt_key)).to_json()

    @property
    def most_at_once(self) -> int:
        """How many tokens may be read at a time."""
        return 1 if self.decided is not None and self.decided.one_by_one else READ_TOKENS

    async def close(self, error: BaseException | None = None) -> None:
        """Cancel what has not ended; returns when its pages are free. `error`: what it failed with. To be called once."""
        stream, record = self.stream, self.record
        with self.held:
            try:
                await stream.aclose()
            finally:
                self.backend.streams.discard(self.request_id, stream)
                self.backend.ended.note_end(self.request_id, self.caller, stream.request_id)
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
    with ExitStack() as held:
        backend = await backend.of_model(request.model, held)
        backend.require_model(request.model)
        messages = cast(Sequence[Mapping[str, Any]], request.prompt)
        messages = await backend.image_urls.resolved(messages)
        return len((await prepare_chat(backend.engine, messages, request.params, request.options, request.chat)).prompt)


async def submit(backend: Backend, request: GenerationRequest, deadline: float | None = None) -> Generation:
    """Submit `request`, whose call ends at `deadline`, on time.monotonic. Raises what `AsyncEngine.stream` and `prepare_chat` raise, and
    `ServiceError`."""
    with ExitStack() as held:
        backend = await backend.of_model(request.model, held)
        held.enter_context(backend.admission.enter_generation(len(request.options.live_sequences(request.params.n))))
        engine, caller, start = backend.engine, current_caller(), time.monotonic()
        prompt, params, options, prepared = request.prompt, request.params, request.options, None
        call = CURRENT_CALL.get()
        if (decided := None if call is None else call.decided) is not None:
            params, options = decided.of_next(params, options)
        model, adapter = backend.require_model(request.model, options.adapter)
        if adapter is not None:
            options = replace(options, adapter=adapter)
        if not options.tenant:
            options = replace(options, tenant=caller.tenant)
        if isinstance(prompt, ForkPoint):
            if decided is not None:
                decided.is_repeatable, decided.progress = False, None  # what it goes on from ends with the process
            if request.chat is not None:
                raise InvalidRequestError.of("prompt", "a fork is not possible where outputs are parsed, from their beginnings on")
            prompt = replace(prompt, request_id=backend.engine_id_of(prompt.request_id, caller))
        elif not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            prompt = await backend.image_urls.resolved(cast(Sequence[Mapping[str, Any]], prompt))
        if any(isinstance(image, RemoteImage) for image in options.images):
            options = replace(options, images=await backend.image_urls.fetched(options.images))
        if request.chat is not None:
            messages = cast(Sequence[Mapping[str, Any]], prompt)
            prepared = await prepare_chat(engine, messages, params, options, request.chat)
            prompt, params, options = prepared.prompt, prepared.params, prepared.options
        if repeated := () if decided is None or decided.progress is None else decided.progress.known:
            options = replace(options, known_outputs=[[token.token_id for token in repeated]])
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
        backend.ended.note_begin(stream.request_id)
        name, num_open = adapter or model.name, len(options.live_sequences(params.n))
        record = GenerationRecord(request_id, start, name, params)
        ends = (by_call, held.pop_all(), num_open, waits)
        generation = Generation(backend, name, request_id, stream, record, caller, prepared, *ends, decided, repeated)
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
    if isinstance(prompt, str | ForkPoint) or (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
        return None
    return len(prompt)


MAX_INPUTS = 2048
MAX_AT_ONCE = 32
"""Inputs of a call in the engine: enough to fill its steps. Tokenizing so many short ones holds up the event loop for some ten ms."""


async def embed_all(
    backend: Backend,
    model: str,
    inputs: Sequence[tuple[Prompt, RequestOptions]],
    fields: EmbeddingFields,
    deadline: float | None = None,
) -> tuple[str, list[Embedding]]:
    """The name of the model that `model` means, and the embeddings in the order of the `inputs`. No more are submitted at a time than the
    engine runs or lets wait, so that a long list is not too long for its queue. `deadline`: of the call, on time.monotonic.

    The first failure of one fails all; what is wrong with the prompt of input i is named `inputs[i]`, with its options for chats
    `inputs[i].tools` and so on. Raises what `AsyncEngine.embed` raises, and `ServiceError`.
    """
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidRequestError.of("inputs", f"{len(inputs)} inputs are not 1 to {MAX_INPUTS}")
    with ExitStack() as held:
        return await _embed_all(await backend.of_model(model, held), model, inputs, fields, deadline)


async def _embed_all(
    backend: Backend, model: str, inputs: Sequence[tuple[Prompt, RequestOptions]], fields: EmbeddingFields, deadline: float | None
) -> tuple[str, list[Embedding]]:
    engine, caller, call = backend.engine, current_caller(), CURRENT_CALL.get()
    info, adapter = backend.require_model(model)
    limits = engine.engine_info
    if 4 * len(inputs) * min(fields.get("dimensions") or info.hidden_size, info.hidden_size) > (room := backend.max_message_bytes):
        raise ServiceError("ANSWER_TOO_LARGE", f"{len(inputs)} embeddings take more than {room} bytes, which one message may have")
    left = iter(enumerate(inputs))
    found: dict[int, Embedding] = {}

    async def work() -> None:
        for index, (prompt, options) in left:
            timeouts = [options.timeout, None if deadline is None else max(1e-9, deadline - time.monotonic())]
            timeout = min((seconds for seconds in timeouts if seconds is not None), default=None)
            try:
                backend.require_model(model, options.adapter)
                engine_id = backend.engine_id(options.request_id, caller) or uuid.uuid4().hex
                request_id = options.request_id or engine_id
                options = replace(
                    options,
                    request_id=engine_id,
                    adapter=adapter or options.adapter,
                    timeout=timeout,
                    tenant=options.tenant or caller.tenant,
                )
                backend.embeddings.add_request(request_id, caller, engine_id)
                try:
                    found[index] = embedding = await engine.embed(prompt, options, **fields)
                finally:
                    backend.embeddings.discard(request_id, engine_id)
            except InvalidRequestError as error:
                raise error.moved(partial(of_input, index)) from error
            except RequestEndedError as error:
                if deadline is not None and time.monotonic() >= deadline:
                    raise ServiceError("DEADLINE_PASSED", "the deadline passed before the embeddings were done") from error
                raise
            if call is not None:
                call.prompt_tokens += embedding.num_tokens

    at_once = min(len(inputs), limits.max_num_seqs, limits.max_queued_requests or MAX_AT_ONCE, MAX_AT_ONCE)
    with backend.admission.enter_generation(at_once):
        tasks = [asyncio.create_task(work()) for _ in range(at_once)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return adapter or info.name, [found[index] for index in range(len(inputs))]


def of_input(index: int, field: str) -> str:
    """The name of a field of one of the inputs."""
    if field == "prompt":
        return f"inputs[{index}]"
    return f"inputs[{index}].{field}" if field in ChatFields.__annotations__ else field
