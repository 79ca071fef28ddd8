"""Generations of request messages: submitted, and their output written into responses. Errors name the fields of the messages.

The events of a generation: built from its tokens, numbered, and sent as the messages of a stream.

Fields are set in place, one by one: several times cheaper than building nested messages from keywords, and this runs per token.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from aengine.api.errors import FieldError
from aengine.api.outputs import FinishReason, Token
from aengine.api.stream import TokenStream
from aengine.chat.text_source import MessageBuilder
from aengine.server.core.core import Backend
from aengine.server.core.errors import ServiceError
from aengine.server.core.generation import READ_TOKENS, Generation, submit
from aengine.v1.generation_pb2 import GenerationEvent, GenerationFinished, GenerationSpec, GenerationStarted
from aengine.v1.generation_service_pb2 import (
    GenerateResponse,
    StreamGenerateResponse,
)
from aengine.wire.request import MessageRequest, StreamPolicy, located, read_request
from aengine.wire.response import (
    chat_events,
    most_alternatives,
    wants_text,
    write_chat_message,
    write_effective_spec,
    write_finish,
    write_logprobs,
    write_sequence,
    write_text_lengths,
    write_timing,
    write_usage,
    write_weights,
)


@dataclass(frozen=True, eq=False, slots=True)
class MessageGeneration:
    """A generation, with the spec that asks for it."""

    core: Generation  # knows no messages
    spec: GenerationSpec
    policy: StreamPolicy

    @property
    def stream(self) -> TokenStream:
        return self.core.stream

    def write_beginning(self, message: GenerationStarted | GenerateResponse) -> None:
        """Write the fields that are known once the stream is `started()`."""
        message.request_id = self.core.request_id
        message.model = self.core.model
        message.prompt.num_tokens = self.stream.usage.prompt_tokens
        message.seed = self.stream.seed
        if isinstance(message, GenerationStarted) and self.spec.prompt.HasField("fork"):
            message.num_known_tokens = self.stream.known_lengths[0]
        if self.spec.output.effective_params:
            write_effective_spec(self.spec, self.stream.effective_params, message.effective_spec)

    def write_end(self, message: GenerationFinished | GenerateResponse) -> None:
        """Write the fields that are known once everything was read."""
        write_usage(self.stream.usage, message.usage)
        write_timing(self.stream.info(), time.monotonic() - self.core.record.start, message.timing)
        message.receipt = self.core.receipt() or ""

    async def complete(self, response: GenerateResponse, max_bytes: int, may_read: asyncio.Event | None = None) -> None:
        """Read the whole output into `response`; nothing more is read while `may_read` is not set. Raises `ServiceError`
        (ANSWER_TOO_LARGE) as soon as the response cannot but take more than `max_bytes`, and what the stream raises."""
        stream, output, text = self.stream, self.spec.output, wants_text(self.spec.output)
        token_bytes = int(output.token_ids) + (4 * (1 + output.logprobs.top_k) if output.HasField("logprobs") else 0)
        await stream.started()
        num_bytes = 4 * stream.usage.prompt_tokens * (1 + output.prompt_logprobs.top_k) if output.HasField("prompt_logprobs") else 0
        built: defaultdict[int, MessageBuilder] = defaultdict(MessageBuilder)  # of an output that is parsed
        read = self.core.reader()
        while tokens := await read(READ_TOKENS):
            self.core.note_tokens(tokens)
            if self.core.prepared is not None:
                for token in tokens:
                    for event in self.core.parse((token,)):
                        built[token.index].add_event(event)
            num_bytes += len(tokens) * token_bytes + (sum(len(token.text) for token in tokens) if text else 0)
            _check_size(num_bytes, max_bytes)
            while may_read is not None and not may_read.is_set():  # one of many that wait may clear it again
                await may_read.wait()
        completion, num_known = self.core.completion(), Counter(dict(enumerate(self.core.known_lengths)))
        self.write_beginning(response)
        if output.HasField("prompt_logprobs") and completion.prompt_logprobs:
            write_logprobs(completion.prompt_logprobs, most_alternatives(completion.prompt_logprobs), response.prompt_logprobs)
        for index, sequence in enumerate((completion, *completion.others)):
            message = response.sequences.add()
            write_sequence(index, sequence, num_known[index], output, message)
            if index in built:
                write_chat_message(built[index].message(), message.message)
        self.write_end(response)
        _check_size(response.ByteSize(), max_bytes)

    async def __aenter__(self) -> MessageGeneration:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.core.close(error)
        if isinstance(error, FieldError):
            raise located(error, self.spec) from error


async def submit_message(backend: Backend, message: MessageRequest, deadline: float | None = None) -> MessageGeneration:
    """Submit what `message` asks for; its call ends at `deadline`, on time.monotonic. Raises what `submit` raises, located."""
    with ExitStack() as held:
        backend = await backend.of_model(message.spec.model, held)
        request, policy = await read_request(message, backend.engine)
        try:
            return MessageGeneration(await submit(backend, request, deadline), message.spec, policy)
        except FieldError as error:
            raise located(error, message.spec) from error


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ServiceError("ANSWER_TOO_LARGE", f"the answer takes more than {max_bytes} bytes in one message")


PROGRESS_SECONDS = 1.0
"""Between two events of a request whose model is loaded."""
MAX_PROMPT_LOGPROBS_BYTES = 512 * 1024
"""Largest event with logprobs of the prompt. A larger one would hold up other streams of the same connection."""
_TOKEN_BYTES = 64  # a token with its text and its part of the events around it, usually
_ENTRY_BYTES = 9  # a float and a varint of 32 bits, at most
_OTHER_BYTES = 128  # more than what frames the columns


class EventWriter:
    """Writes the events of one generation, numbered.

    `new_event` gives the empty message of the next event, wherever the caller wants it; an event is whole when a method returns.
    """

    def __init__(self, generation: MessageGeneration, new_event: Callable[[], GenerationEvent], num_events: int = 0) -> None:
        """`num_events`: that were sent before."""
        output = generation.spec.output
        self.generation = generation
        self._note = generation.core.note_tokens
        self._parse = generation.core.parse if output.HasField("chat") else None
        self._new_event = new_event
        self._text = wants_text(output)
        self._token_ids = output.token_ids
        self._delta_tokens = generation.policy.delta_tokens
        self._num_events = num_events
        self._num_tokens = Counter(dict(enumerate(generation.core.known_lengths)))  # of each sequence, with those that are written
        self.prompt_is_due = output.HasField("prompt_logprobs")
        entries = 2 * (1 + output.logprobs.top_k) if output.HasField("logprobs") else 0
        texts = 2 if self._parse is not None else 1
        self.token_bytes = texts * _TOKEN_BYTES + entries * _ENTRY_BYTES  # of the events of a token, estimated

    @property
    def has_begun(self) -> bool:
        return self._num_events > 0

    def begin(self, resume_token: bytes = b"") -> None:
        """The first event. The stream is `started()`."""
        started = self._next().started
        self.generation.write_beginning(started)
        if resume_token:
            started.resume_token = resume_token

    def prompt(self) -> Iterator[None]:
        """The events of the prompt's logprobs, if they were asked for; each is written when it is asked for. To be called when there
        are tokens, before they are written. A sequence that was preempted may lag behind another of its request: then they come later."""
        if not self.prompt_is_due:
            return
        stream = self.generation.stream
        entries = stream.completion().prompt_logprobs or ()
        if len(entries) < stream.usage.prompt_tokens and not stream.ended:
            return
        self.prompt_is_due = False
        top_k = most_alternatives(entries)
        step = max(1, (MAX_PROMPT_LOGPROBS_BYTES - _OTHER_BYTES) // (_ENTRY_BYTES * (1 + top_k)))
        for offset in range(0, len(entries), step):
            piece = self._next().prompt_logprobs
            piece.token_offset = offset
            write_logprobs(entries[offset : offset + step], top_k, piece.logprobs)
            yield

    def write(self, tokens: Sequence[Token]) -> None:
        """The deltas of tokens that came together, and the ends of the sequences that end with them. Raises what `Generation.note_tokens`
        raises."""
        self._note(tokens)
        if self._delta_tokens == 1 or len(tokens) == 1:
            for token in tokens:
                self._run((token,))
        else:
            for run in _runs(tokens, self._delta_tokens):
                self._run(run)

    def end_event(self) -> None:
        """The last event. Everything was read and written."""
        self.generation.write_end(self._next().finished)

    def _run(self, run: Sequence[Token]) -> None:
        """The delta of tokens of one sequence, of which only the last may end it; and that end."""
        last = run[-1]
        index, reason = last.index, last.finish_reason
        num_tokens = len(run) if last.token_id >= 0 else 0  # a closing token brings nothing but the end and text that was held back
        text = ("".join([token.text for token in run]) if len(run) > 1 else last.text) if self._text else ""
        parsed = chat_events(self._parse(run)) if self._parse is not None else None
        if num_tokens or text or parsed:
            delta = self._next().delta
            if index:
                delta.sequence_index = index
            offset = self._num_tokens[index]
            delta.token_offset = offset
            delta.num_tokens = num_tokens
            self._num_tokens[index] = offset + num_tokens
            if self._token_ids:
                delta.token_ids.extend([token.token_id for token in run[:num_tokens]])
            if text:
                delta.text = text
                if num_tokens > 1 and self._token_ids:
                    write_text_lengths([token.text for token in run], delta)
            if parsed:
                delta.chat_events.extend(parsed)
            if run[0].logprob is not None:
                write_logprobs(run[:num_tokens], len(run[0].top_logprobs or ()), delta.logprobs)
            if reason is not None:
                delta.last = True
            if last.weights_version:  # it only grows
                write_weights([token.weights_version for token in run[:num_tokens]], delta.weights_spans)
        if reason is not None and reason is not FinishReason.ERROR:
            finished = self._next().sequence_finished
            finished.sequence_index = index
            finished.num_tokens = self._num_tokens[index]
            write_finish(reason, last.stop_reason, finished.finish)

    def _next(self) -> GenerationEvent:
        event = self._new_event()
        event.event_number = self._num_events
        self._num_events += 1
        return event


async def stream_responses(
    backend: Backend,
    request: MessageRequest,
    deadline: float | None = None,
    *,
    resume_token: bytes = b"",
    on_begin: Callable[[Generation], None] | None = None,
) -> AsyncGenerator[StreamGenerateResponse, None]:
    """A generation as the messages of a stream of its own. `deadline`: of the call, on time.monotonic. `on_begin` is called before
    the first."""
    ready: list[StreamGenerateResponse] = []

    def new_event() -> GenerationEvent:
        response = StreamGenerateResponse()
        ready.append(response)
        return response.event

    submitting, num_loading = submit_message(backend, request, deadline), 0
    if backend.models is not None and not resume_token:  # whose events are numbered from the first that it has
        task = asyncio.create_task(submitting)
        try:
            while not (await asyncio.wait((task,), timeout=PROGRESS_SECONDS))[0]:
                new_event().event_number = num_loading
                ready[-1].event.loading.SetInParent()
                num_loading += 1
                yield ready.pop()
        except BaseException:
            await _leave(task)
            raise
        submitting = _result_of(task)
    async with await submitting as generation:
        stream, policy, writer = generation.stream, generation.policy, EventWriter(generation, new_event, num_loading)
        is_alone, read = generation.core.most_at_once == 1, generation.core.reader()
        most = 1 if is_alone else max(READ_TOKENS, policy.delta_tokens)
        await stream.started()
        writer.begin(resume_token)
        if on_begin is not None:
            on_begin(generation.core)
        yield ready.pop()
        delay = 0.0  # the first token does not wait
        while tokens := await read(most):  # once per token: what is added here is paid often
            if delay and (missing := policy.delta_tokens - len(tokens)) > 0 and not stream.ended:
                await stream.linger(missing, delay)
                tokens = [*tokens, *(stream.take_tokens(missing) if stream.unread else ())]
            delay = 0.0 if is_alone else policy.delay_seconds
            if writer.prompt_is_due:
                for _ in writer.prompt():
                    yield ready.pop()
            writer.write(tokens)
            if stream.ended:
                writer.end_event()
            # gRPC's own thread wakes for a write that stands alone, and takes the processor from the loop. When all streams that a step
            # feeds have written their events before the first of them is sent, their writes come together: a fifth less CPU time.
            await asyncio.sleep(0)
            for response in ready:
                yield response
            ready.clear()


async def _result_of(task: asyncio.Task[MessageGeneration]) -> MessageGeneration:
    return task.result()


async def _leave(task: asyncio.Task[MessageGeneration]) -> None:
    """Nobody reads what the task submits."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and task.exception() is None:
        await task.result().core.close()


def _runs(tokens: Sequence[Token], most: int) -> Iterator[list[Token]]:
    """The tokens of each sequence together, at most so many, in an order in which nothing is late."""
    runs: dict[int, list[Token]] = {}
    for token in tokens:
        if token.token_id < 0 and token.index in runs:  # the end from outside is none of the tokens
            yield runs.pop(token.index)
        run = runs.setdefault(token.index, [])
        run.append(token)
        if len(run) == most or token.finish_reason is not None:
            yield runs.pop(token.index)
    yield from runs.values()
