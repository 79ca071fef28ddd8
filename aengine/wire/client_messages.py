"""Values of the engine -> messages to a server, and messages of a server -> values of the engine. Pure functions; what cannot be sent is
refused here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain, repeat
from typing import Any

from aengine.api.errors import InvalidRequestError, ServerError
from aengine.api.fields import is_not
from aengine.api.outputs import (
    NO_TOKEN,
    AdapterInfo,
    CachedPages,
    DraftUsage,
    EngineInfo,
    EngineStats,
    FinishReason,
    LayerGroup,
    LoadReport,
    MemoryUse,
    ModelInfo,
    ReplicaInfo,
    ReplicaState,
    Timing,
    Token,
    TokenLogprob,
)
from aengine.api.params import EmbeddingParams, SamplingParams, StructuredOutput
from aengine.api.request import NO_OUTPUT, ChatOptions, Prompt, RequestOptions, form_of, read_messages, read_token_ids
from aengine.v1 import admin_service_pb2, engine_service_pb2, generation_pb2, sampling_pb2
from aengine.v1.embedding_service_pb2 import EmbedRequest, Pooling
from aengine.v1.engine_service_pb2 import GetServerInfoResponse, Load, Replica, WatchLoadRequest, WatchLoadResponse
from aengine.v1.generation_service_pb2 import StreamGenerateRequest
from aengine.v1.model_service_pb2 import Adapter, Model
from aengine.wire.names import DEFAULTS, FINISH_REASONS, LIMITS, MODEL, SAMPLING, STOPPING, read_params, seconds_of, write_params

MAX_UINT32 = 2**32 - 1
MAX_TOKEN_IDS = 1 << 22
"""Of a prompt: a list of more has too many bytes for any server."""
_REASONS = {value: reason for reason, value in FINISH_REASONS.items()}
# Fields with the same name and meaning on both sides.
_LOAD = (
    *("running", "waiting", "parked", "pages_used", "pages_total", "cached_tokens", "steps", "preemptions"),
    *("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "paused", "sleep_level", "weights_version"),
    *("uncomputed_tokens", "mean_step_seconds", "prefill_tokens_per_second", "fingerprint", "weights_time"),
)


# ---- to the server -----------------------------------------------------------------------------------------------------


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
        spec.adapter = options.adapter or ""
    if options.timeout is not None:
        spec.stopping.time_limit.FromNanoseconds(max(1, round(options.timeout * 1e9)))
    spec.priority = options.priority
    for ids in options.known_outputs or ():
        spec.known_outputs.add(token_ids=ids or (), ended=ids is None)
    if params.detokenize is not None:
        output.text = params.detokenize
    output.token_ids = True
    output.skip_special_tokens = params.skip_special_tokens
    if params.logprobs is not None:
        output.logprobs.top_k = params.logprobs
    if params.prompt_logprobs is not None:
        output.prompt_logprobs.top_k = params.prompt_logprobs
    return request


def write_embedding(prompt: Prompt, params: EmbeddingParams, options: RequestOptions) -> EmbedRequest:
    """Without the timeout. Raises `InvalidRequestError` for what a message cannot hold."""
    if options.request_id is not None:
        raise InvalidRequestError.of("request_id", "an embedding has none on a server; cancel the call")
    if options.known_outputs is not None:
        raise InvalidRequestError.of("known_outputs", NO_OUTPUT)
    request = EmbedRequest(normalize=params.normalize, dimensions=params.dimensions, priority=options.priority)
    if params.pooling is not None:
        request.pooling = Pooling.Value(f"POOLING_{params.pooling.upper()}")
    write_prompt(prompt, options, request.inputs.add())
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


def write_token_ids(ids: Sequence[int], message: generation_pb2.Prompt) -> None:
    """Make `ids` the prompt, in place of what is there."""
    message.token_ids.SetInParent()
    message.token_ids.ids.extend(ids)


def write_chat(messages: Sequence[Mapping[str, Any]], options: ChatOptions, message: generation_pb2.ChatPrompt) -> None:
    """Write a chat and its options into `message`. Raises `InvalidRequestError` for what cannot be sent."""
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
                sent.parts.extend(generation_pb2.ContentPart(text=part["text"]) for part in content or ())
    with _unicode("tools", "a string"):
        message.tools.extend(map(_json, options.tools or ()))
    if options.add_generation_prompt is not None:
        message.add_generation_prompt = options.add_generation_prompt
    message.continue_final_message = options.continue_final_message
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
    else:
        write_token_ids(read_prompt_ids(prompt), message)  # type: ignore[arg-type]


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


# ---- from the server ---------------------------------------------------------------------------------------------------


def read_memory(message: admin_service_pb2.MemoryUse) -> MemoryUse:
    return MemoryUse(message.bytes_before, message.bytes_after)


def read_adapter(message: Adapter) -> AdapterInfo:
    return AdapterInfo(message.name, message.rank, tuple(message.target_modules), message.num_bytes, key=message.key)


def read_model(message: Model) -> ModelInfo:
    return ModelInfo(
        **{name: getattr(message, name) for name in MODEL},
        eos_token_ids=tuple(message.eos_token_ids),
        chat_template=message.has_chat_template,
        tokenizer=not message.without_tokenizer,
        generation_defaults=SamplingParams(**read_params(message.generation_defaults, DEFAULTS)),
        layer_groups=tuple(
            LayerGroup(group.num_layers, group.window if group.HasField("window") else None) for group in message.layer_groups
        ),
    )


def read_engine_info(message: GetServerInfoResponse) -> EngineInfo:
    found: dict[str, Any] = {name: getattr(message.limits, name) for name in LIMITS}
    if message.HasField("speculation"):
        drafts = message.speculation
        found |= {"speculative": drafts.mode, "speculative_model": drafts.model or None, "max_drafts": drafts.max_drafts}
    if message.HasField("ranks"):
        found |= {field.name: value for field, value in message.ranks.ListFields()}
    return EngineInfo(**found, fingerprint=message.fingerprint, fingerprint_parts=dict(message.fingerprint_parts))


def read_replica(message: Replica) -> ReplicaInfo:
    state = ReplicaState[engine_service_pb2.ReplicaState.Name(message.state).removeprefix("REPLICA_STATE_")]
    return ReplicaInfo(message.name, state, LoadReport(read_load(message.load), message.load.draining), message.generation, message.reason)


def read_report(message: WatchLoadResponse) -> LoadReport:
    pages = None
    if message.HasField("pages"):
        pages = CachedPages(message.pages.snapshot, tuple(message.pages.added), tuple(message.pages.removed))
    return LoadReport(read_load(message.load), message.load.draining, pages)


def read_load(message: Load) -> EngineStats:
    return EngineStats(**{name: getattr(message, name) for name in _LOAD}, drafts=tuple(read_drafts(message.drafts)))


def read_drafts(messages: Iterable[generation_pb2.DraftUsage]) -> Iterator[DraftUsage]:
    return (DraftUsage(one.drafter, one.steps, one.drafted, one.accepted) for one in messages)


def read_delta(delta: generation_pb2.GenerationDelta) -> list[Token]:
    """At least one token; the text is that of the last one. Raises `ServerError`."""
    tokens = _read_tokens(delta)
    if delta.weights_spans:
        if sum(span.num_tokens for span in delta.weights_spans) != delta.num_tokens:
            raise ServerError(f"the versions of the weights of {delta.num_tokens} tokens are of another number of tokens", "DATA_LOSS")
        versions = chain.from_iterable(repeat(span.version, span.num_tokens) for span in delta.weights_spans)
        tokens = [replace(token, weights_version=next(versions, 0)) for token in tokens]
    return tokens


def _read_tokens(delta: generation_pb2.GenerationDelta) -> list[Token]:
    index, ids = delta.sequence_index, delta.token_ids
    if len(ids) != delta.num_tokens:
        raise ServerError(f"a delta has {len(ids)} ids for {delta.num_tokens} tokens of sequence {index}", "DATA_LOSS")
    if not ids:  # text that had been held back
        return [Token(index, NO_TOKEN, delta.text)]
    if len(ids) == 1 and not delta.HasField("logprobs"):  # nearly all of them
        return [Token(index, ids[0], delta.text)]
    texts = [""] * (len(ids) - 1) + [delta.text]
    if not delta.HasField("logprobs"):
        return [Token(index, token_id, text) for token_id, text in zip(ids, texts, strict=True)]
    return [
        Token(index, token_id, text, known.logprob, known.rank, known.top_logprobs) if known else Token(index, token_id, text)
        for token_id, text, known in zip(ids, texts, read_logprobs(ids, delta.logprobs), strict=True)
    ]


def read_finish(finish: generation_pb2.Finish) -> tuple[FinishReason, int | str | None]:
    """The reason, and the stop token or stop string that matched. Raises `ServerError`."""
    reason = _REASONS.get(finish.reason)
    if reason is None:
        raise ServerError(f"finish reason {finish.reason} is not known to this client", "UNIMPLEMENTED")
    matched = finish.WhichOneof("matched")
    return reason, None if matched is None else getattr(finish, matched)


def read_logprobs(ids: Sequence[int], columns: generation_pb2.TokenLogprobs) -> list[TokenLogprob | None]:
    """The columns of the tokens `ids` by token; None for a token without a logprob. Raises `ServerError`."""
    top_k = columns.top_k
    top_lengths = (len(columns.top_token_ids), len(columns.top_logprobs))
    if not len(ids) == len(columns.logprobs) == len(columns.ranks) or top_lengths != (top_k * len(ids),) * 2:
        raise ServerError(f"columns of logprobs differ in length for {len(ids)} tokens", "DATA_LOSS")
    entries: list[TokenLogprob | None] = []
    for i, (token_id, logprob, rank) in enumerate(zip(ids, columns.logprobs, columns.ranks, strict=True)):
        top = slice(i * top_k, (i + 1) * top_k)
        alternatives = dict(zip(columns.top_token_ids[top], columns.top_logprobs[top], strict=True))
        entries.append(None if math.isnan(logprob) else TokenLogprob(token_id, logprob, rank, alternatives))
    return entries


def read_timing(message: generation_pb2.Timing) -> Timing:
    known = {field.name: value for field, value in message.ListFields()}
    return Timing(**{name: seconds_of(known[name]) for name in ("queue", "first_token", "decode") if name in known})
