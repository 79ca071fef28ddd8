"""Generations of request messages: submitted, and their output written into responses. Errors name the fields of the messages."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from types import TracebackType

from aengine.api.errors import FieldError
from aengine.api.stream import TokenStream
from aengine.chat.events import MessageBuilder
from aengine.server.core.backend import Backend
from aengine.server.core.errors import ServiceError
from aengine.server.core.generation import Generation, submit
from aengine.v1.generation_pb2 import GenerationFinished, GenerationSpec, GenerationStarted
from aengine.v1.generation_service_pb2 import GenerateResponse
from aengine.wire.server_request import MessageRequest, StreamPolicy, located, read_request
from aengine.wire.server_response import (
    most_alternatives,
    num_known_tokens,
    wants_text,
    write_chat_message,
    write_effective_spec,
    write_logprobs,
    write_sequence,
    write_timing,
    write_usage,
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
        if self.spec.output.effective_params:
            write_effective_spec(self.spec, self.stream.effective_params, message.effective_spec)

    def write_end(self, message: GenerationFinished | GenerateResponse) -> None:
        """Write the fields that are known once everything was read."""
        write_usage(self.stream.usage, message.usage)
        write_timing(self.stream.info(), time.monotonic() - self.core.record.start, message.timing)

    async def complete(self, response: GenerateResponse, max_bytes: int, may_read: asyncio.Event | None = None) -> None:
        """Read the whole output into `response`; nothing more is read while `may_read` is not set. Raises `ServiceError`
        (ANSWER_TOO_LARGE) as soon as the response cannot but take more than `max_bytes`, and what the stream raises."""
        stream, output, text = self.stream, self.spec.output, wants_text(self.spec.output)
        token_bytes = int(output.token_ids) + (4 * (1 + output.logprobs.top_k) if output.HasField("logprobs") else 0)
        await stream.started()
        num_bytes = 4 * stream.usage.prompt_tokens * (1 + output.prompt_logprobs.top_k) if output.HasField("prompt_logprobs") else 0
        built: defaultdict[int, MessageBuilder] = defaultdict(MessageBuilder)  # of an output that is parsed
        while tokens := await stream.read():
            self.core.note(tokens)
            if self.core.prepared is not None:
                for token in tokens:
                    for event in self.core.parse((token,)):
                        built[token.index].add(event)
            num_bytes += len(tokens) * token_bytes + (sum(len(token.text) for token in tokens) if text else 0)
            _check_size(num_bytes, max_bytes)
            while may_read is not None and not may_read.is_set():  # one of many that wait may clear it again
                await may_read.wait()
        completion, num_known = stream.completion(), num_known_tokens(self.spec)
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
    request, policy = await read_request(message, backend.engine)
    try:
        return MessageGeneration(await submit(backend, request, deadline), message.spec, policy)
    except FieldError as error:
        raise located(error, message.spec) from error


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ServiceError("ANSWER_TOO_LARGE", f"the answer takes more than {max_bytes} bytes in one message")
