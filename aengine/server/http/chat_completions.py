"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any

from aengine.api.dataclass import dataclass
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FLAG, Accepts, FieldChecks, integer, one_of
from aengine.api.outputs import FinishReason, Token
from aengine.api.params import MAX_CONTEXT_BYTES
from aengine.chat.preparation import ChatOutputOptions, GenerationRequest
from aengine.chat.text_source import CallStarted, ChatMessage, MessageBuilder
from aengine.server.core.calls_in_flight import current_time
from aengine.server.core.core import Core
from aengine.server.core.generation import Generation, submit
from aengine.server.http.bodies import STRING, Fields, read_generation
from aengine.server.http.body_parameters import CHAT_OPTIONS, EFFORT, OF_OTHERS, OPTIONS, PARAMS, BodyParameters
from aengine.server.http.body_parameters import IGNORED as IGNORED_EVERYWHERE
from aengine.server.http.chat_input import allowed_of, read_content, read_messages, read_response_format, read_tool_choice, read_tools
from aengine.server.http.chat_output import (
    FINISH_REASONS,
    Chunks,
    OutputReader,
    Piece,
    StreamAsked,
    TokenTexts,
    chat_logprobs,
    delta_of,
    prompt_entries,
    receipts_of,
    stop_reason_of,
    with_receipts,
    write_choices,
)
from aengine.server.http.http_exchange import HttpExchange

TAKEN: Mapping[str, str] = {
    "model": "the served model or an adapter; empty: the served model",
    "messages": "text, and images for models that take some; the role developer is system",
    "max_completion_tokens": "max_tokens; -1: no limit",
    "max_tokens": "max_tokens; -1: no limit",
    "logprobs": "with top_logprobs: logprobs",
    "top_logprobs": "logprobs",
    "response_format": "structured_output",
    "tools": "functions; others are ignored",
    "tool_choice": "auto, none, required, a function, or allowed_tools; required ones are enforced",
    "parallel_tool_calls": "false: one call at most, where calls are required",
    "reasoning_effort": "a variable of the chat template; none: enable_thinking is false",
    "stream": "server-sent events",
    "stream_options": "include_usage; vLLM's continuous_usage_stats: the usage so far, in every chunk",
    "service_tier": "priority",
    "user": "tenant",
    "prompt_cache_key": "session",
    "prediction": "draft_context",
    "modalities": "text alone",
    "max_reasoning_tokens": "ours: the reasoning is closed when it has so many",
    "receipt": "ours: `receipts` with one entry, from which every token can be derived again",
    "return_token_ids": "ours: the ids of the prompt and of the output",
    "chat_template_kwargs": "template_kwargs, by vLLM's name",
}
"""The fields beside those of ours, and what becomes of them."""
REFUSED: Mapping[str, str] = {
    "function_call": "it is tool_choice now",
    "functions": "they are tools now",
}
"""Fields of OpenAI's that would change the answer, and cannot."""
IGNORED: Mapping[str, str] = {
    **IGNORED_EVERYWHERE,
    "audio": "the model makes text alone",
    "verbosity": "the model knows none",
    "web_search_options": "nothing is searched",
}
"""Fields of OpenAI's that change nothing here, and why."""
_IGNORED_OPTIONS = ("include_obfuscation",)


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """A request to `/v1/chat/completions`, as its body was read."""

    request: GenerationRequest
    parameters: BodyParameters  # has the client's names for fields
    stream: StreamAsked | None = None
    return_token_ids: bool = False


async def chat_completions(core: Core, exchange: HttpExchange) -> None:
    check = FieldChecks()
    asked = read_request(await read_generation(exchange, check), check)
    asked.parameters.tell_ignored(core, exchange)
    with asked.parameters.located():
        async with await submit(core.backend, asked.request) as generation:
            await generation.stream.started()
            writer = _Writer(core, asked, generation)
            if not asked.stream:
                response = await writer.complete()
            else:
                await exchange.begin_events()
                async for pieces in writer.reader.pieces():
                    if chunks := b"".join([writer.chunk(piece) for piece in pieces]):
                        await exchange.send(chunks)
        if asked.stream:
            await exchange.end_events(writer.chunks.end_events(receipts_of([generation])))
        else:
            await exchange.respond(response)


def read_request(given: Fields, check: FieldChecks) -> ChatAsked:
    """Read the body of a request to `/v1/chat/completions`. Raises `InvalidRequestError` with all violations."""
    parameters = BodyParameters(given)
    parameters.names["prompt"] = "messages"
    model = given.take_field("model", STRING, "")
    messages = read_messages(given)
    tools = read_tools(given, parameters)
    choice, allowed = read_tool_choice(given)
    if tools := allowed_of(tools, allowed):
        parameters.put_field("tools", tools, "tools")
    chat = ChatOutputOptions(
        tool_choice=parameters.checked_choice(choice),
        parallel_tool_calls=given.take_field("parallel_tool_calls", FLAG, True),
        max_reasoning_tokens=given.take_field("max_reasoning_tokens", integer(0)),
    )
    if parameters.take_limit("max_completion_tokens") is not None:
        given.drop(("max_tokens",))  # its old name
    _take_logprobs(given, parameters)
    if (form := given.sub("response_format")) is not None and (structured := read_response_format(form)) is not None:
        parameters.put_field("structured_output", structured, "response_format")
        parameters.names["structured_output.json_schema"] = "response_format.json_schema.schema"
    if (prediction := given.sub("prediction")) is not None:
        prediction.need("type", one_of("content"), "content")
        content = read_content(prediction)
        if text := content if isinstance(content, str) else "".join(part.get("text", "") for part in content):
            kept = text.encode(errors="replace")[-MAX_CONTEXT_BYTES:].decode(errors="ignore")
            parameters.put_field("draft_context", (kept,), "prediction.content")
    parameters.put_effort(given.take_field("reasoning_effort", EFFORT), "reasoning_effort")
    given.take_field("modalities", Accepts(lambda value: value == ["text"], "['text'], all that the model makes"))
    stream = read_stream(given)
    return_token_ids = given.take_field("return_token_ids", FLAG, False)
    parameters.ignore(IGNORED)
    parameters.take_openai()
    parameters.take_ours((*OPTIONS, *CHAT_OPTIONS, "receipt"))
    refuse_others(given, REFUSED, (*TAKEN, *OPTIONS, *CHAT_OPTIONS))
    params, options = parameters.params(), parameters.options()
    check.finish(InvalidRequestError)
    request = GenerationRequest(prompt=messages, params=params, options=options, model=model, chat=chat)
    return ChatAsked(request, parameters, stream, return_token_ids)


def read_stream(given: Fields) -> StreamAsked | None:
    """`stream` and `stream_options`; None without a stream."""
    stream = given.take_field("stream", FLAG, False)
    options = given.sub("stream_options")
    if options is None:
        return StreamAsked() if stream else None
    asked = StreamAsked(options.take_field("include_usage", FLAG, False), options.take_field("continuous_usage_stats", FLAG, False))
    options.drop(_IGNORED_OPTIONS)
    options.refuse_rest(("include_usage", "continuous_usage_stats"))
    return asked if stream else None


def refuse_others(given: Fields, refused: Mapping[str, str], taken: Sequence[str]) -> None:
    """Violations of all fields that were not taken."""
    given.refuse_all(refused)
    given.refuse_rest((*taken, *PARAMS, *OF_OTHERS))


def _take_logprobs(given: Fields, parameters: BodyParameters) -> None:
    """OpenAI's `logprobs` is a flag, ours a number."""
    wanted = given.take_field("logprobs", Accepts(lambda value: isinstance(value, int), "true, false, or a number of alternatives"))
    top = given.take_field("top_logprobs", integer(0))
    if wanted is None or isinstance(wanted, bool):
        if wanted:
            parameters.put_field("logprobs", top or 0, "logprobs" if top is None else "top_logprobs")
        elif top:
            given.refuse("top_logprobs", "is only possible with logprobs: true")
    else:
        parameters.put_field("logprobs", wanted, "logprobs")


@dataclass(slots=True)
class _Sequence:
    """What is known of one of the sequences."""

    has_begun: bool = False
    calls: bool = False  # whether it has called a tool
    builder: MessageBuilder = field(default_factory=MessageBuilder)
    tokens: list[Token] = field(default_factory=list)


class _Writer:
    """Writes the output of one generation."""

    def __init__(self, core: Core, asked: ChatAsked, generation: Generation) -> None:
        self._asked = asked
        self._generation = generation
        self._params = asked.request.params
        self._created = current_time()
        self._id = f"chatcmpl-{generation.request_id}"
        shows = (self._params.logprobs, self._params.prompt_logprobs) != (None, None)
        self._texts = TokenTexts(core.engine) if shows else None
        self.reader = OutputReader(generation, self._texts)
        self._max_bytes = core.config.max_message_bytes
        self._sequences = [_Sequence() for _ in range(self._params.n)]
        model = generation.model
        self.chunks = Chunks("chat.completion.chunk", self._id, self._created, model, asked.stream or StreamAsked(), self.reader.usage)

    def chunk(self, piece: Piece) -> bytes:
        """The chunk of a piece; empty if there is nothing to say yet."""
        sequence, first = self._sequences[piece.index], False
        if not sequence.has_begun:
            sequence.has_begun = first = True
        reason = piece.last.finish_reason
        if not sequence.calls:
            sequence.calls = any(isinstance(event, CallStarted) for event in piece.events)
        logprobs = self._logprobs(piece.tokens)
        ours: dict[str, Any] = {}
        if self._asked.return_token_ids:
            if first:
                ours["prompt_token_ids"] = self._prompt_ids()
            ours["token_ids"] = piece.token_ids
        if first and self._params.prompt_logprobs is not None:
            ours["prompt_logprobs"] = self._prompt_logprobs()
        if reason is None:
            if not piece.events and not ours and logprobs is None and not first:
                return b""
            return self.chunks.choice(piece.index, delta_of(piece.events, first), logprobs, ours=ours)
        stop = stop_reason_of(reason, piece.last.stop_reason)
        finish = _finish(reason, sequence.calls)
        delta, before = delta_of(piece.events, first), b""
        if sequence.calls and piece.events:  # OpenAI's client takes a call for done in a chunk behind it
            before, delta = self.chunks.choice(piece.index, delta, logprobs, ours=ours), '"delta":{}'
            logprobs, ours = None, {}
        return before + self.chunks.choice(piece.index, delta, logprobs, finish, stop, ours)

    async def complete(self) -> bytes:
        """Read the output to its end; returns the whole response, as JSON."""
        async for pieces in self.reader.pieces():
            for piece in pieces:
                sequence = self._sequences[piece.index]
                sequence.tokens += piece.tokens
                for event in piece.events:
                    sequence.builder.add_event(event)
        response: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._generation.model,
            "usage": self.reader.usage(),
            **with_receipts([self._generation]),
        }
        if self._params.prompt_logprobs is not None:
            response["prompt_logprobs"] = self._prompt_logprobs()
        choices = [partial(self._choice, index, sequence) for index, sequence in enumerate(self._sequences)]
        return await write_choices(response, choices, apart=self._texts is not None, max_bytes=self._max_bytes)

    def _choice(self, index: int, sequence: _Sequence) -> dict[str, Any]:
        message, last = sequence.builder.message(), sequence.tokens[-1]
        reason = last.finish_reason or FinishReason.CANCELLED
        choice: dict[str, Any] = {
            "index": index,
            "message": _message(message),
            "logprobs": self._logprobs(sequence.tokens),
            "finish_reason": _finish(reason, bool(message.tool_calls)),
            "stop_reason": stop_reason_of(reason, last.stop_reason),
        }
        if self._asked.return_token_ids:
            choice["prompt_token_ids"] = self._prompt_ids()
            choice["token_ids"] = [token.token_id for token in sequence.tokens if token.token_id >= 0]
        return choice

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._params.logprobs is None or self._texts is None:
            return None
        return {"content": chat_logprobs(tokens, self._texts, with_ids=self._asked.return_token_ids), "refusal": None}

    def _prompt_logprobs(self) -> list[dict[str, Any] | None]:
        assert self._texts is not None
        return prompt_entries(self._generation.stream.completion().prompt_logprobs or (), self._texts)

    def _prompt_ids(self) -> list[int]:
        assert self._generation.prepared is not None
        return self._generation.prepared.prompt


def _finish(reason: FinishReason, calls: bool) -> str:
    finish = FINISH_REASONS[reason]
    return "tool_calls" if calls and finish == "stop" else finish


def _message(message: ChatMessage) -> dict[str, Any]:
    written: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["content"] = message.content or None
        written["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls
        ]
    return written
