"""What an engine gives and tells, in both directions: outputs -> messages, for a server; and messages -> what a client returns. The names
are those of `wire/names.py`. Pure functions.

Messages are written in place, field by field: several times cheaper than building nested messages from keywords, and some of this runs per
token.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, groupby, pairwise, repeat
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from aengine.api.errors import InvalidRequestError, ServerError
from aengine.api.outputs import (
    NO_TOKEN,
    AdapterInfo,
    CachedPages,
    Completion,
    DraftUsage,
    Embedding,
    EngineInfo,
    EngineStats,
    FinishReason,
    KVPage,
    LayerGroup,
    LoadReport,
    MemoryUse,
    ModelInfo,
    ReplicaInfo,
    ReplicaState,
    RequestInfo,
    Timing,
    Token,
    TokenLogprob,
    Usage,
)
from aengine.api.params import EmbeddingParams, SamplingParams
from aengine.chat.text_source import ArgumentsDelta, CallEnded, CallStarted, ChatMessage, ContentDelta, Event, ReasoningDelta
from aengine.v1 import admin_service_pb2, engine_service_pb2
from aengine.v1 import generation_pb2 as messages
from aengine.v1.embedding_service_pb2 import StreamHiddenStatesResponse
from aengine.v1.engine_service_pb2 import GetServerInfoResponse, Load, Replica, WatchLoadResponse
from aengine.v1.model_service_pb2 import Adapter, Model
from aengine.wire.names import DEFAULTS, FINISH_REASONS, LIMITS, MODEL, SAMPLING, STOPPING, read_params, seconds_of, write_params

_REASONS = {value: reason for reason, value in FINISH_REASONS.items()}
# Fields with the same name and meaning on both sides.
_LOAD = (
    *("running", "waiting", "parked", "pages_used", "pages_total", "cached_tokens", "steps", "preemptions"),
    *("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "paused", "sleep_level", "weights_version"),
    *("uncomputed_tokens", "mean_step_seconds", "prefill_tokens_per_second", "fingerprint", "weights_time", "role"),
    *("loaded_tokens", "saved_tokens", "host_kv_bytes", "disk_kv_bytes", "sessions", "session_tokens", "loading"),
)

_PIECE_BYTES = 1 << 20  # of a page or of hidden states in a message, at most
_MOST_KV = 1 << 30  # bytes of a page


# ---- to a client ------------------------------------------------------------------------------------------------------


def write_effective_spec(given: messages.GenerationSpec, params: SamplingParams, message: messages.GenerationSpec) -> None:
    """Write the spec in use: the given one, with the effective `params` filled in, and without prompt and known outputs."""
    message.CopyFrom(given)
    message.ClearField("prompt")
    message.ClearField("known_outputs")
    write_params(params, SAMPLING, message.sampling)
    write_params(params, STOPPING, message.stopping)


def write_usage(usage: Usage, message: messages.Usage) -> None:
    message.prompt_tokens = usage.prompt_tokens
    message.cached_prompt_tokens = usage.cached_prompt_tokens
    message.completion_tokens = usage.completion_tokens
    message.reasoning_tokens = usage.reasoning_tokens
    message.image_tokens = usage.image_tokens
    message.rewritten_tokens = usage.rewritten_tokens
    message.loaded_prompt_tokens = usage.loaded_prompt_tokens
    message.drafts.extend(draft_messages(usage.drafts))


def draft_messages(drafts: Iterable[DraftUsage]) -> list[messages.DraftUsage]:
    return [messages.DraftUsage(drafter=one.drafter, steps=one.steps, drafted=one.drafted, accepted=one.accepted) for one in drafts]


def write_timing(info: RequestInfo, total: float, message: messages.Timing) -> None:
    """`total`: seconds from the request's arrival to its end."""
    timing: Timing = info.timing
    message.arrival.FromNanoseconds(round(info.arrival * 1e9))
    if timing.queue is not None:
        _write_seconds(message.queue, timing.queue)
    if timing.first_token is not None and timing.queue is not None:
        _write_seconds(message.prefill, timing.first_token - timing.queue)
        _write_seconds(message.first_token, timing.first_token)
        _write_seconds(message.decode, timing.decode or 0.0)
    _write_seconds(message.total, total)


def write_logprobs(entries: Sequence[Token | TokenLogprob | None], top_k: int, columns: messages.TokenLogprobs) -> None:
    """Add tokens that have `top_k` alternatives each. None is a token without a logprob."""
    columns.top_k = top_k
    for entry in entries:
        if entry is None or entry.logprob is None:
            columns.logprobs.append(math.nan)
            columns.ranks.append(0)
            columns.top_token_ids.extend(repeat(0, top_k))
            columns.top_logprobs.extend(repeat(math.nan, top_k))
            continue
        columns.logprobs.append(entry.logprob)
        columns.ranks.append(entry.rank or 0)
        if entry.top_logprobs:
            columns.top_token_ids.extend(entry.top_logprobs.keys())
            columns.top_logprobs.extend(entry.top_logprobs.values())


def write_weights(versions: Iterable[int], spans: RepeatedCompositeFieldContainer[messages.WeightsSpan]) -> None:
    """Add which versions of the weights made tokens that follow each other; nothing if all were made by version 0."""
    found = [(version, len(list(run))) for version, run in groupby(versions)]
    if any(version for version, _ in found):
        for version, num_tokens in found:
            spans.add(num_tokens=num_tokens, version=version)


def most_alternatives(entries: Sequence[TokenLogprob | None]) -> int:
    return max((len(entry.top_logprobs) for entry in entries if entry is not None), default=0)


def write_finish(reason: FinishReason, stop_reason: int | str | None, message: messages.Finish) -> None:
    message.reason = FINISH_REASONS[reason]
    if isinstance(stop_reason, str):
        message.stop_string = stop_reason
    elif stop_reason is not None:
        message.stop_token_id = stop_reason


def chat_events(events: Iterable[Event]) -> list[messages.ChatEvent]:
    """Without those that only stand for markers."""
    return [_chat_event(event) for event in events if not isinstance(event, ContentDelta | ReasoningDelta) or event.text]


def _chat_event(event: Event) -> messages.ChatEvent:
    match event:
        case ContentDelta():
            return messages.ChatEvent(content=event.text)
        case ReasoningDelta():
            return messages.ChatEvent(reasoning=event.text)
        case CallStarted():
            return messages.ChatEvent(call_started=messages.ToolCallStarted(index=event.index, id=event.id, name=event.name))
        case ArgumentsDelta():
            return messages.ChatEvent(arguments=messages.ToolCallArguments(index=event.index, text=event.text))
        case CallEnded():
            return messages.ChatEvent(call_ended=messages.ToolCallEnded(index=event.index, complete=event.complete))


def write_chat_message(parsed: ChatMessage, message: messages.AssistantMessage) -> None:
    message.content, message.reasoning = parsed.content, parsed.reasoning
    for call in parsed.tool_calls:
        message.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments, complete=call.complete)


def write_sequence(
    index: int, completion: Completion, num_known: int, output: messages.OutputOptions, message: messages.GeneratedSequence
) -> None:
    """One sequence of a response, with what `output` asks for; it began with `num_known` tokens."""
    message.index = index
    message.num_tokens = num_known + len(completion.token_ids)
    if wants_text(output):
        message.text = completion.text
    if output.token_ids:
        message.token_ids.extend(completion.token_ids)
    if completion.logprobs:
        write_logprobs(completion.logprobs, most_alternatives(completion.logprobs), message.logprobs)
    write_weights(completion.weights_versions, message.weights_spans)
    if completion.finish_reason is not None:
        write_finish(completion.finish_reason, completion.stop_reason, message.finish)


def wants_text(output: messages.OutputOptions) -> bool:
    return output.text if output.HasField("text") else True


def write_hidden_states(found: Embedding) -> Iterator[StreamHiddenStatesResponse]:
    """Pieces of 1 MiB at most."""
    states, experts = found.values.astype("<f4").tobytes(), () if found.experts is None else found.experts.ravel().tolist()
    layers = 0 if found.experts is None else len(found.experts)
    yield StreamHiddenStatesResponse(num_tokens=found.num_tokens, cached_tokens=found.cached_tokens, num_expert_layers=layers)
    for first in range(0, len(states), _PIECE_BYTES):
        yield StreamHiddenStatesResponse(states=states[first : first + _PIECE_BYTES])
    for first in range(0, len(experts), _PIECE_BYTES // 4):
        yield StreamHiddenStatesResponse(experts=experts[first : first + _PIECE_BYTES // 4])


def read_hidden_states(pieces: Sequence[StreamHiddenStatesResponse], params: EmbeddingParams) -> Embedding:
    """`params`: that they were asked for with. Raises `ServerError` where there is less than it says."""
    first = pieces[0] if pieces else StreamHiddenStatesResponse()
    shape = len(params.layers), first.num_tokens - params.first_token, -1
    try:
        states = np.frombuffer(b"".join(piece.states for piece in pieces), "<f4").reshape(shape)
        experts = [np.array(piece.experts, np.int32) for piece in pieces] if params.experts else []
        chosen = np.concatenate(experts).reshape(first.num_expert_layers, *shape[1:]) if experts else None
    except ValueError as error:
        raise ServerError(f"a part of the hidden states is missing: {error}", "DATA_LOSS") from error
    return Embedding(params.finish(states), first.num_tokens, first.cached_tokens, chosen)


def write_adapter(info: AdapterInfo, message: Adapter) -> None:
    message.name, message.rank, message.num_bytes = info.name, info.rank, info.num_bytes
    message.key = info.key
    message.target_modules.extend(info.target_modules)


def write_model(info: ModelInfo, adapters: Iterable[AdapterInfo], message: Model) -> None:
    for name in MODEL:
        setattr(message, name, getattr(info, name))
    message.eos_token_ids.extend(info.eos_token_ids)
    message.labels.extend(info.labels)
    message.has_chat_template = info.chat_template
    message.without_tokenizer = not info.tokenizer
    write_params(info.generation_defaults, DEFAULTS, message.generation_defaults)
    for adapter in adapters:
        write_adapter(adapter, message.adapters.add())
    for group in info.layer_groups:
        message.layer_groups.add(num_layers=group.num_layers, window=group.window)


def _write_seconds(message: Duration, seconds: float) -> None:
    message.FromNanoseconds(max(0, round(seconds * 1e9)))


# ---- from a server ----------------------------------------------------------------------------------------------------


def read_memory(message: admin_service_pb2.MemoryUse) -> MemoryUse:
    return MemoryUse(message.bytes_before, message.bytes_after)


def read_adapter(message: Adapter) -> AdapterInfo:
    return AdapterInfo(message.name, message.rank, tuple(message.target_modules), message.num_bytes, key=message.key)


def read_model(message: Model) -> ModelInfo:
    return ModelInfo(
        **{name: getattr(message, name) for name in MODEL},
        eos_token_ids=tuple(message.eos_token_ids),
        labels=tuple(message.labels),
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


def read_drafts(messages: Iterable[messages.DraftUsage]) -> Iterator[DraftUsage]:
    return (DraftUsage(one.drafter, one.steps, one.drafted, one.accepted) for one in messages)


def write_text_lengths(texts: Sequence[str], delta: messages.GenerationDelta) -> None:
    """Write how much of the text each token brings."""
    if any(texts[:-1]):
        delta.text_lengths.extend([len(text.encode()) for text in texts])


def read_delta(delta: messages.GenerationDelta) -> list[Token]:
    """At least one token. Raises `ServerError`."""
    tokens = _read_tokens(delta)
    if delta.weights_spans:
        if sum(span.num_tokens for span in delta.weights_spans) != delta.num_tokens:
            raise ServerError(f"the versions of the weights of {delta.num_tokens} tokens are of another number of tokens", "DATA_LOSS")
        versions = chain.from_iterable(repeat(span.version, span.num_tokens) for span in delta.weights_spans)
        tokens = [replace(token, weights_version=next(versions, 0)) for token in tokens]
    return tokens


def _read_tokens(delta: messages.GenerationDelta) -> list[Token]:
    index, ids = delta.sequence_index, delta.token_ids
    if len(ids) != delta.num_tokens:
        raise ServerError(f"a delta has {len(ids)} ids for {delta.num_tokens} tokens of sequence {index}", "DATA_LOSS")
    if not ids:  # text that had been held back
        return [Token(index, NO_TOKEN, delta.text)]
    if len(ids) == 1 and not delta.HasField("logprobs"):  # nearly all of them
        return [Token(index, ids[0], delta.text)]
    texts = _texts_of(delta) if delta.text_lengths else [""] * (len(ids) - 1) + [delta.text]
    if not delta.HasField("logprobs"):
        return [Token(index, token_id, text) for token_id, text in zip(ids, texts, strict=True)]
    return [
        Token(index, token_id, text, known.logprob, known.rank, known.top_logprobs) if known else Token(index, token_id, text)
        for token_id, text, known in zip(ids, texts, read_logprobs(ids, delta.logprobs), strict=True)
    ]


def _texts_of(delta: messages.GenerationDelta) -> list[str]:
    text, ends = delta.text.encode(), list(accumulate(delta.text_lengths))
    if len(ends) != len(delta.token_ids) or ends[-1] != len(text):
        raise ServerError(f"a delta of {len(delta.token_ids)} tokens divides its {len(text)} bytes of text at {ends}", "DATA_LOSS")
    return [text[start:end].decode(errors="replace") for start, end in pairwise([0, *ends])]


def read_finish(finish: messages.Finish) -> tuple[FinishReason, int | str | None]:
    """The reason, and the stop token or stop string that matched. Raises `ServerError`."""
    reason = _REASONS.get(finish.reason)
    if reason is None:
        raise ServerError(f"finish reason {finish.reason} is not known to this client", "UNIMPLEMENTED")
    matched = finish.WhichOneof("matched")
    return reason, None if matched is None else getattr(finish, matched)


def read_logprobs(ids: Sequence[int], columns: messages.TokenLogprobs) -> list[TokenLogprob | None]:
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


def read_timing(message: messages.Timing) -> Timing:
    known = {field.name: value for field, value in message.ListFields()}
    return Timing(**{name: seconds_of(known[name]) for name in ("queue", "first_token", "decode") if name in known})


def write_kv_page(page: KVPage) -> Iterator[admin_service_pb2.KvPage]:
    """The parts of a page, small enough for a message each."""
    for begin in range(0, max(len(page.content), 1), _PIECE_BYTES):
        end = begin + _PIECE_BYTES
        digest = page.digest if end >= len(page.content) else b""
        yield admin_service_pb2.KvPage(index=page.index, state=page.is_state, content=page.content[begin:end], digest=digest)


async def read_kv_pages(parts: AsyncIterable[admin_service_pb2.KvPage]) -> AsyncGenerator[KVPage, None]:
    """Raises `InvalidRequestError` for a page that does not end."""
    content = bytearray()
    async for part in parts:
        content += part.content
        if len(content) > _MOST_KV:
            raise InvalidRequestError.of("page.content", f"a page has more than {_MOST_KV} bytes")
        if part.digest:
            yield KVPage(part.index, bytes(content), part.digest, part.state)
            content.clear()
