"""A request of a generation, in both directions: what an engine takes -> message, which a client sends; and message -> what
`ServedEngine.stream` takes, for a server. The names are those of `wire/names.py`.

Pure functions. What cannot be sent is refused here; all violations of a message are collected before it is refused, each under its path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

import numpy as np
from google.protobuf.duration_pb2 import Duration

from aengine.api.engine import ServedEngine
from aengine.api.errors import FieldError, FieldViolation, InvalidRequestError
from aengine.api.fields import FieldChecks, is_not, read_token_ids, shown
from aengine.api.params import MAX_CHOICES, EmbeddingParams, Reasoning, SamplingParams, StructuredOutput
from aengine.api.request import (
    MAX_CHAT_MESSAGES,
    MAX_OPTION_CHARACTERS,
    NO_OUTPUT,
    ChatFields,
    ChatOptions,
    ForkPoint,
    Prompt,
    RequestOptions,
    form_of,
    image_part,
    images_of,
    read_messages,
)
from aengine.chat.formats import ChatFormat
from aengine.chat.preparation import ChatOutputOptions, GenerationRequest, check_chat
from aengine.v1 import generation_pb2, generation_service_pb2, sampling_pb2
from aengine.v1.embedding_service_pb2 import EmbedRequest, Pooling, StreamHiddenStatesRequest
from aengine.v1.engine_service_pb2 import WatchLoadRequest
from aengine.v1.generation_service_pb2 import StreamGenerateRequest
from aengine.wire.names import SAMPLING, STOPPING, path_of, read_image, read_params, seconds_of, write_image, write_params

MAX_UINT32 = 2**32 - 1
MAX_TOKEN_IDS = 1 << 22
"""Of a prompt: a list of more has too many bytes for any server."""
MAX_SECONDS = 315_576_000_000
"""About 10,000 years, which is all that a google.protobuf.Duration may hold."""
MAX_NANOS, DEFAULT_DELTA_TOKENS, MAX_DELTA_TOKENS = 999_999_999, 64, 1024
MAX_DELAY_SECONDS = 1.0
MAX_RETAIN_SECONDS, DEFAULT_RETAIN_SECONDS = 600.0, 60.0
MAX_EXTRA_CHARACTERS = 1 << 20
"""Of the extra_fields of all messages of a chat."""
MAX_JSON_PLACES = 65536
"""Most commas and opening brackets in JSON of a chat. Each may be that of a value, and so many are read in some 30 ms of the event loop."""

ErrorT = TypeVar("ErrorT", bound=Exception)
MessageRequest = generation_service_pb2.GenerateRequest | generation_service_pb2.StreamGenerateRequest


# ---- to a server ------------------------------------------------------------------------------------------------------


def write_request(prompt: Prompt, params: SamplingParams, options: RequestOptions) -> StreamGenerateRequest:
    """Without the id. Raises `InvalidRequestError` for what a message cannot hold."""
    if params.logits_processors:
        raise InvalidRequestError.of("logits_processors", "custom code cannot be sent to a server")
    request = StreamGenerateRequest()
    spec, output = request.spec, request.spec.output
    write_prompt(prompt, options, spec.prompt)
    with _unicode("params", "a string"):
        write_params(params, SAMPLING, spec.sampling)
        write_params(params, STOPPING, spec.stopping)
        if params.structured_output is not None:
            _write_constraint(params.structured_output, spec.structured_output)
        if params.reasoning is not None:
            spec.reasoning.CopyFrom(sampling_pb2.Reasoning(**asdict(params.reasoning)))
        spec.tenant = options.tenant
        spec.cache.salt = options.cache_salt or ""
        spec.cache.session = options.session or ""
        spec.adapter = options.adapter or ""
    if options.timeout is not None:
        spec.stopping.time_limit.FromNanoseconds(max(1, round(options.timeout * 1e9)))
    spec.priority = options.priority
    for ids in options.known_outputs or ():
        spec.known_outputs.add(token_ids=ids or (), ended=ids is None)
    if params.detokenize is not None:
        output.text = params.detokenize
    output.token_ids = True
    output.receipt = options.receipt
    output.skip_special_tokens = params.skip_special_tokens
    for name in ("logprobs", "prompt_logprobs"):
        if (most := getattr(params, name)) is not None:
            getattr(output, name).top_k = most
    output.prompt_logprobs_from = params.prompt_logprobs_from
    return request


def write_embedding(prompt: Prompt, params: EmbeddingParams, options: RequestOptions) -> EmbedRequest | StreamHiddenStatesRequest:
    """Without the timeout. Raises `InvalidRequestError` for what a message cannot hold."""
    if options.request_id is not None:
        raise InvalidRequestError.of("request_id", "an embedding has none on a server; cancel the call")
    if options.known_outputs is not None:
        raise InvalidRequestError.of("known_outputs", NO_OUTPUT)
    request: EmbedRequest | StreamHiddenStatesRequest
    if params.pooling == "tokens":
        request = StreamHiddenStatesRequest(layers=params.layers, first_token=params.first_token, experts=params.experts)
        write_prompt(prompt, options, request.prompt)
    else:
        pooling = Pooling.Value(f"POOLING_{(params.pooling or 'unspecified').upper()}")
        request = EmbedRequest(normalize=params.normalize, dimensions=params.dimensions, pooling=pooling)
        write_prompt(prompt, options, request.inputs.add())
    request.priority = options.priority
    with _unicode("options", "a string"):
        request.tenant = options.tenant
        request.cache.salt = options.cache_salt or ""
        request.adapter = options.adapter or ""
    return request


def write_watch(min_interval: float | None, digest_salt: bytes | None) -> WatchLoadRequest:
    """Make the message that asks for load reports. Raises `InvalidRequestError` (min_interval, digest_salt)."""
    request = WatchLoadRequest()
    if min_interval is not None:
        try:
            request.min_interval.FromNanoseconds(round(min_interval * 1e9))
        except (TypeError, ValueError, OverflowError):  # of what is not a number
            raise InvalidRequestError.of("min_interval", is_not(min_interval, "a number of seconds")) from None
    if digest_salt is not None:
        if not isinstance(digest_salt, bytes):
            raise InvalidRequestError.of("digest_salt", "must be bytes")  # without the value: it is a secret
        request.page_digests.salt = digest_salt
    return request


def write_mode(modes: Any, prefix: str, field: str, name: str) -> Any:
    """The number of a mode, whose name in the schema begins with a prefix. Raises `InvalidRequestError`."""
    known = [mode.removeprefix(f"{prefix}_").lower() for mode in modes.keys()][1:]  # noqa: SIM118 - it is no mapping
    if name not in known:
        raise InvalidRequestError.of(field, f"{name!r} is none of {', '.join(known)}")
    return modes.Value(f"{prefix}_{name.upper()}")


def write_token_ids(ids: Sequence[int], message: generation_pb2.Prompt, images: Iterable[generation_pb2.Image] = ()) -> None:
    """Make `ids` and the images whose tokens they have the prompt, in place of what is there."""
    images = list(images)
    message.token_ids.SetInParent()
    message.token_ids.ids.extend(ids)
    message.token_ids.images.extend(images)


def write_chat(messages: Sequence[Mapping[str, Any]], options: ChatOptions, message: generation_pb2.ChatPrompt) -> None:
    """Write a chat and its options into `message`. Raises `InvalidRequestError` for what cannot be sent."""
    images = iter(images_of(messages))
    for index, one in enumerate(read_messages(messages)):
        content = one.get("content")
        extra = {name: value for name, value in one.items() if name not in ("role", "content")}
        if content is None:  # not the same as no text
            extra["content"] = None
        with _unicode("prompt", f"message {index}"):
            sent = message.messages.add(role=one["role"], extra_fields=_json(extra) if extra else "")
            if isinstance(content, str):
                sent.content = content
            else:
                for part in content or ():
                    if part["type"] == "text":
                        sent.parts.add(text=part["text"])
                    else:
                        sent.parts.add(image=write_image(next(images)))
    with _unicode("tools", "a string"):
        message.tools.extend(map(_json, options.tools or ()))
    if options.add_generation_prompt is not None:
        message.add_generation_prompt = options.add_generation_prompt
    message.continue_final_message = options.continue_final_message
    message.keep_history_ids = options.keep_history == "ids"
    if options.template_kwargs is not None:
        with _unicode("template_kwargs", "a string"):
            message.template_kwargs = _json(options.template_kwargs)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def write_prompt(prompt: Prompt, options: ChatOptions, message: generation_pb2.Prompt) -> None:
    form = form_of(prompt, options)
    if form == "text":
        with _unicode("prompt", "it"):
            message.text = prompt  # type: ignore[assignment]
    elif form == "chat":
        write_chat(prompt, options, message.chat)  # type: ignore[arg-type]
    elif isinstance(prompt, ForkPoint):
        ids: Any = read_token_ids(prompt.then, MAX_UINT32, "then")
        place: Any = {"request_id": prompt.request_id, "sequence_index": prompt.index, "at": prompt.at, "same_params": prompt.same_params}
        message.fork.CopyFrom(generation_pb2.ForkPoint(**place, then=ids.tolist()))
    else:
        images = options.images if isinstance(options, RequestOptions) else ()
        write_token_ids(read_prompt_ids(prompt), message, map(write_image, images))  # type: ignore[arg-type]


def read_prompt_ids(ids: Sequence[int]) -> list[int]:
    """Raises `InvalidRequestError` for what is no prompt."""
    if len(ids) > MAX_TOKEN_IDS:
        raise InvalidRequestError.of("prompt", f"{len(ids)} token ids are more than {MAX_TOKEN_IDS}, which no server takes")
    plain: list[int] = read_token_ids(ids, MAX_UINT32).tolist()
    return plain


def _write_constraint(wanted: StructuredOutput, message: sampling_pb2.StructuredOutput) -> None:
    message.strict_formats = wanted.strict_formats
    message.exact_one_of = wanted.exact_one_of
    if wanted.json_schema is not None:
        message.json_schema = str(wanted.json_schema)
    elif wanted.json_object:
        message.json_object.SetInParent()
    elif wanted.regex is not None:
        message.regex = wanted.regex
    elif wanted.grammar is not None:
        message.grammar.source = wanted.grammar
    else:
        message.choices.values.extend(wanted.choice)


@contextmanager
def _unicode(field: str, what: str) -> Iterator[None]:
    """Protobuf raises ValueError for a lone surrogate."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequestError.of(field, f"{what} is not Unicode text: {error}") from error


# ---- from a client ----------------------------------------------------------------------------------------------------


class StreamPolicy(NamedTuple):
    """How the events of a request are sent: the stream options with their defaults applied."""

    delta_tokens: int = DEFAULT_DELTA_TOKENS  # most in one delta
    delay_seconds: float = 0.0  # how long a token may wait for others
    retain_seconds: float = DEFAULT_RETAIN_SECONDS


async def read_request(request: MessageRequest, engine: ServedEngine) -> tuple[GenerationRequest, StreamPolicy]:
    """The request of a message, and how its events are to be sent. Raises `InvalidRequestError` with every violation that shows in the
    message, and then with those that `engine` finds. For what is valid here it is not asked, nor is anything waited for."""
    spec, check = request.spec, FieldChecks()
    prompt = read_prompt(spec.prompt, "spec.prompt", check)
    params = read_sampling_params(spec, check)
    if isinstance(prompt, ForkPoint) and prompt.same_params:
        params = params.only_told()
    policy = read_stream_options(spec.stream, check)
    options = read_options(request, check)
    chat = _read_chat_output(spec, check)
    if chat is not None and options is not None:
        try:
            check_chat(engine, params, options, chat)
        except InvalidRequestError as error:
            _add_located(check, error.violations, spec)
    if check.violations or options is None:
        named = {violation.field for violation in check.violations}
        _add_located(check, [one for one in await engine.violations(prompt, params) if path_of(one.field, spec) not in named], spec)
        raise InvalidRequestError(check.violations)
    return GenerationRequest(prompt=prompt, params=params, options=options, model=spec.model, chat=chat), policy


def located(error: ErrorT, spec: generation_pb2.GenerationSpec) -> ErrorT:
    """Return an error with the engine's names of fields turned into paths of the request message; other errors stay as they are."""
    return error.moved(lambda field: path_of(field, spec)) if isinstance(error, FieldError) else error


def read_seconds(
    duration: Duration, field: str, check: FieldChecks, low: float = -math.inf, high: float = math.inf, *, open_low: bool = False
) -> float | None:
    """Seconds in [`low`, `high`], or in (`low`, `high`] with `open_low`. Adds a violation and returns None for others, and for a message
    that is out of the type's range or has two signs."""
    whole, nanos = duration.seconds, duration.nanos
    if abs(whole) > MAX_SECONDS or abs(nanos) > MAX_NANOS or whole * nanos < 0:
        rule = f"seconds must be in [-{MAX_SECONDS}, {MAX_SECONDS}], nanos in [-{MAX_NANOS}, {MAX_NANOS}], and both of one sign"
        check.add_violation(field, f"{whole} s and {nanos} ns are no duration: {rule}")
        return None
    seconds = seconds_of(duration)
    if low <= seconds <= high and not (open_low and seconds == low):
        return seconds
    accepted = f"in {'(' if open_low else '['}{low:g}, {high:g}] s" if high < math.inf else f"{low:g} s or more"
    check.add_violation(field, f"{seconds:g} s is not {accepted}")
    return None


def read_stream_options(options: generation_pb2.StreamOptions, check: FieldChecks) -> StreamPolicy:
    delta_tokens = options.max_tokens_per_delta if options.HasField("max_tokens_per_delta") else DEFAULT_DELTA_TOKENS
    if not 1 <= delta_tokens <= MAX_DELTA_TOKENS:
        check.add_violation("spec.stream.max_tokens_per_delta", f"{delta_tokens} is not in [1, {MAX_DELTA_TOKENS}]")
    delay = read_seconds(options.max_delay, "spec.stream.max_delay", check, 0, MAX_DELAY_SECONDS)
    retain = None
    if options.HasField("retain"):
        retain = read_seconds(options.retain, "spec.stream.retain", check, 0, MAX_RETAIN_SECONDS, open_low=True)
    return StreamPolicy(delta_tokens, delay or 0.0, retain or DEFAULT_RETAIN_SECONDS)


def read_chat(chat: generation_pb2.ChatPrompt, path: str, check: FieldChecks) -> list[dict[str, Any]]:
    """The conversation as the tokenizer takes it. Violations have paths that begin with `path`. Whether there are messages is for the
    caller to say."""
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        check.add_violation(f"{path}.messages", f"{len(chat.messages)} messages are more than {MAX_CHAT_MESSAGES}")
    messages = chat.messages[:MAX_CHAT_MESSAGES]
    if not _check_length(f"{path}.messages", (message.extra_fields for message in messages), MAX_EXTRA_CHARACTERS, check):
        return [{}]  # as good as any: it is refused
    return [_read_message(message, f"{path}.messages[{index}]", check) for index, message in enumerate(messages)]


def _read_message(message: generation_pb2.ChatMessage, path: str, check: FieldChecks) -> dict[str, Any]:
    if not message.role:
        check.add_violation(f"{path}.role", "must not be empty")
    read: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        if message.content:
            check.add_violation(f"{path}.parts", "cannot be combined with content")
        if any(part.WhichOneof("content") is None for part in message.parts):
            check.add_violation(f"{path}.parts", "each must have text or an image")
        read["content"] = [
            image_part(read_image(part.image, f"{path}.parts[{index}].image", check))
            if part.HasField("image")
            else {"type": "text", "text": part.text}
            for index, part in enumerate(message.parts)
        ]
    if message.extra_fields:
        extra = _read_object(message.extra_fields, f"{path}.extra_fields", check)
        if "role" in extra or extra.get("content") is not None or ("content" in extra and read["content"]):
            check.add_violation(f"{path}.extra_fields", "role and content have fields of their own")
        read.update(extra)
    return read


def read_chat_fields(chat: generation_pb2.ChatPrompt, path: str, check: FieldChecks) -> ChatFields:
    """What the chat has beside its messages, as `ChatOptions` take it."""
    fields: ChatFields = {"continue_final_message": chat.continue_final_message, "keep_history": "ids" if chat.keep_history_ids else "text"}
    if chat.HasField("add_generation_prompt"):
        fields["add_generation_prompt"] = chat.add_generation_prompt
    if chat.tools and _check_length(f"{path}.tools", chat.tools, MAX_OPTION_CHARACTERS, check):
        fields["tools"] = [_read_object(tool, f"{path}.tools[{index}]", check) for index, tool in enumerate(chat.tools)]
    if chat.template_kwargs and _check_length(f"{path}.template_kwargs", [chat.template_kwargs], MAX_OPTION_CHARACTERS, check):
        fields["template_kwargs"] = _read_object(chat.template_kwargs, f"{path}.template_kwargs", check)
    return fields


def _check_length(path: str, texts: Iterable[str], most: int, check: FieldChecks) -> bool:
    """Whether the texts may be read as JSON, which is done in the event loop."""
    given = [text for text in texts if text]
    characters, places = sum(map(len, given)), sum(text.count(mark) for text in given for mark in ",[{")
    if characters > most:
        check.add_violation(path, f"{characters} characters of JSON are more than {most}")
    elif places > MAX_JSON_PLACES:
        check.add_violation(path, f"{places} commas and opening brackets of JSON are more than {MAX_JSON_PLACES}")
    return characters <= most and places <= MAX_JSON_PLACES


def _read_object(text: str, path: str, check: FieldChecks) -> dict[str, Any]:
    """Empty after a violation."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        check.add_violation(path, f"{shown(text)} is not JSON: {error}")
        return {}
    if not isinstance(value, dict):
        check.add_violation(path, f"{shown(text)} is not a JSON object")
        return {}
    return value


def _add_located(check: FieldChecks, violations: Iterable[FieldViolation], spec: generation_pb2.GenerationSpec) -> None:
    check.violations.extend(FieldViolation(path_of(violation.field, spec), violation.description) for violation in violations)


def read_prompt(prompt: generation_pb2.Prompt, path: str, check: FieldChecks) -> Prompt:
    """Violations have paths that begin with `path`."""
    form = prompt.WhichOneof("content")
    if form is None:
        check.add_violation(path, "exactly one of text, token_ids, chat, fork must be set")
        return ""
    content: Prompt
    if form == "fork":
        fork = prompt.fork
        return ForkPoint(fork.request_id, fork.at if fork.HasField("at") else None, fork.sequence_index, fork.then, fork.same_params)
    if form == "chat":
        content = read_chat(prompt.chat, f"{path}.chat", check)
    else:
        content = prompt.text if form == "text" else np.asarray(prompt.token_ids.ids)  # type: ignore[assignment] # as quick as can be
    if not len(content):  # type: ignore[arg-type]
        check.add_violation(f"{path}.{form}", "must not be empty")
    return content


def read_sampling_params(spec: generation_pb2.GenerationSpec, check: FieldChecks) -> SamplingParams:
    """The parameters, without those in which something is wrong."""
    output = spec.output
    given = {**read_params(spec.sampling, SAMPLING), **read_params(spec.stopping, STOPPING)}
    if output.HasField("text"):
        given["detokenize"] = output.text or bool(spec.stopping.stop_strings) or output.HasField("chat")
    given |= {name: getattr(output, name) for name in ("skip_special_tokens", "prompt_logprobs_from") if output.HasField(name)}
    given |= {name: getattr(output, name).top_k for name in ("logprobs", "prompt_logprobs") if output.HasField(name)}
    if spec.HasField("structured_output"):
        given["structured_output"] = _read_structured_output(spec, check)
    if spec.HasField("reasoning"):
        given["reasoning"] = _read_reasoning(spec, check)
    while True:
        try:
            return SamplingParams(**given)
        except InvalidRequestError as error:
            _add_located(check, error.violations, spec)
            for violation in error.violations:
                del given[violation.field]


def _read_structured_output(spec: generation_pb2.GenerationSpec, check: FieldChecks) -> StructuredOutput | None:
    message = spec.structured_output
    given: dict[str, Any]
    match message.WhichOneof("constraint"):
        case None:
            check.add_violation("spec.structured_output", "exactly one of json_schema, json_object, regex, choices, grammar must be set")
            return None
        case "json_object":
            given = {"json_object": True}
        case "grammar":
            given = {"grammar": message.grammar.source}
        case "choices":
            if not 1 <= len(values := message.choices.values) <= MAX_CHOICES:
                check.add_violation("spec.structured_output.choices", f"{len(values)} choices are not 1 to {MAX_CHOICES}")
                return None
            given = {"choice": tuple(values)}
        case name:
            given = {name: getattr(message, name)}
    try:
        return StructuredOutput(**given, strict_formats=message.strict_formats, exact_one_of=message.exact_one_of)
    except InvalidRequestError as error:
        _add_located(check, error.violations, spec)
    return None


def _read_reasoning(spec: generation_pb2.GenerationSpec, check: FieldChecks) -> Reasoning | None:
    message = spec.reasoning
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    try:
        return Reasoning(
            opening=message.opening, closing=message.closing, opened=message.opened, answer=message.answer, max_tokens=max_tokens
        )
    except InvalidRequestError as error:
        _add_located(check, error.violations, spec)
    return None


def _read_chat_output(spec: generation_pb2.GenerationSpec, check: FieldChecks) -> ChatOutputOptions | None:
    if not spec.output.HasField("chat"):
        return None
    chat = spec.output.chat
    if not spec.prompt.HasField("chat"):
        check.add_violation("spec.output.chat", "is only possible with spec.prompt.chat")
        return None
    try:
        return ChatOutputOptions(
            tool_choice=chat.tool_choice or "auto",
            parallel_tool_calls=chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True,
            max_reasoning_tokens=chat.max_reasoning_tokens if chat.HasField("max_reasoning_tokens") else None,
            format=ChatFormat(chat.format.calls, chat.format.reasoning) if chat.HasField("format") else None,
        )
    except InvalidRequestError as error:
        _add_located(check, error.violations, spec)
    return None


def _read_known_outputs(spec: generation_pb2.GenerationSpec, check: FieldChecks) -> list[Sequence[int] | None] | None:
    path = path_of("known_outputs", spec)
    for index, known in enumerate(spec.known_outputs):
        if known.ended and known.token_ids:
            check.add_violation(f"{path}[{index}].token_ids", "must be empty where the sequence has ended")
    return [None if known.ended else known.token_ids for known in spec.known_outputs] or None


def read_options(request: MessageRequest, check: FieldChecks) -> RequestOptions | None:
    spec, timeout = request.spec, None
    if spec.stopping.HasField("time_limit"):
        timeout = read_seconds(spec.stopping.time_limit, path_of("timeout", spec), check)
    try:
        return RequestOptions(
            request_id=request.request_id if request.HasField("request_id") else None,
            priority=spec.priority,
            tenant=spec.tenant,
            timeout=timeout,
            cache_salt=spec.cache.salt or None,
            session=spec.cache.session or None,
            adapter=spec.adapter or None,
            known_outputs=_read_known_outputs(spec, check),
            receipt=spec.output.receipt,
            images=[read_image(one, f"spec.prompt.token_ids.images[{i}]", check) for i, one in enumerate(spec.prompt.token_ids.images)],
            **(read_chat_fields(spec.prompt.chat, "spec.prompt.chat", check) if spec.prompt.HasField("chat") else {}),
        )
    except InvalidRequestError as error:
        _add_located(check, error.violations, spec)
        return None
