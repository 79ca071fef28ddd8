"""Outputs of the engine -> proto. Pure functions; the names are those of `aengine.wire.names`.

Fields are set in place, one by one: several times cheaper than building nested messages from keywords, and some of this runs per token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, repeat

from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from aengine.api.outputs import (
    AdapterInfo,
    Completion,
    DraftUsage,
    FinishReason,
    ModelInfo,
    RequestInfo,
    Timing,
    Token,
    TokenLogprob,
    Usage,
)
from aengine.api.params import SamplingParams
from aengine.chat.text_source import ArgumentsDelta, CallEnded, CallStarted, ChatMessage, ContentDelta, Event, ReasoningDelta
from aengine.v1 import generation_pb2 as messages
from aengine.v1.model_service_pb2 import Adapter, Model
from aengine.wire.names import DEFAULTS, FINISH_REASONS, MODEL, SAMPLING, STOPPING, write_params


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


def num_known_tokens(spec: messages.GenerationSpec) -> Counter[int]:
    """How many tokens the sequences begin with, by index."""
    return Counter({index: len(known.token_ids) for index, known in enumerate(spec.known_outputs)})


def wants_text(output: messages.OutputOptions) -> bool:
    return output.text if output.HasField("text") else True


def write_adapter(info: AdapterInfo, message: Adapter) -> None:
    message.name, message.rank, message.num_bytes = info.name, info.rank, info.num_bytes
    message.key = info.key
    message.target_modules.extend(info.target_modules)


def write_model(info: ModelInfo, adapters: Iterable[AdapterInfo], message: Model) -> None:
    for name in MODEL:
        setattr(message, name, getattr(info, name))
    message.eos_token_ids.extend(info.eos_token_ids)
    message.has_chat_template = info.chat_template
    message.without_tokenizer = not info.tokenizer
    write_params(info.generation_defaults, DEFAULTS, message.generation_defaults)
    for adapter in adapters:
        write_adapter(adapter, message.adapters.add())
    for group in info.layer_groups:
        message.layer_groups.add(num_layers=group.num_layers, window=group.window)


def _write_seconds(message: Duration, seconds: float) -> None:
    message.FromNanoseconds(max(0, round(seconds * 1e9)))
