"""Outputs of the engine -> proto. Pure functions; the names are those of `aengine.wire`.

Fields are set in place, one by one: several times cheaper than building nested messages from keywords, and some of this runs per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat

from google.protobuf.duration_pb2 import Duration

from aengine.outputs import Completion, DraftUsage, FinishReason, ModelInfo, RequestInfo, Timing, Token, TokenLogprob, Usage
from aengine.params import SamplingParams
from aengine.v1 import generation_pb2 as messages
from aengine.v1.model_service_pb2 import Model
from aengine.wire import DEFAULTS, FINISH_REASONS, MODEL, SAMPLING, STOPPING, write_params


def write_effective_spec(given: messages.GenerationSpec, params: SamplingParams, message: messages.GenerationSpec) -> None:
    """Write the spec in use: the given one, with the effective `params` filled in, and without the prompt."""
    message.CopyFrom(given)
    message.ClearField("prompt")
    write_params(params, SAMPLING, message.sampling)
    write_params(params, STOPPING, message.stopping)


def write_usage(usage: Usage, message: messages.Usage) -> None:
    message.prompt_tokens = usage.prompt_tokens
    message.cached_prompt_tokens = usage.cached_prompt_tokens
    message.completion_tokens = usage.completion_tokens
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


def most_alternatives(entries: Sequence[TokenLogprob | None]) -> int:
    return max((len(entry.top_logprobs) for entry in entries if entry is not None), default=0)


def write_finish(reason: FinishReason, stop_reason: int | str | None, message: messages.Finish) -> None:
    message.reason = FINISH_REASONS[reason]
    if isinstance(stop_reason, str):
        message.stop_string = stop_reason
    elif stop_reason is not None:
        message.stop_token_id = stop_reason


def write_sequence(index: int, completion: Completion, output: messages.OutputOptions, message: messages.GeneratedSequence) -> None:
    """One sequence of a response, with what `output` asks for."""
    message.index = index
    message.num_tokens = len(completion.token_ids)
    if wants_text(output):
        message.text = completion.text
    if output.token_ids:
        message.token_ids.extend(completion.token_ids)
    if completion.logprobs:
        write_logprobs(completion.logprobs, most_alternatives(completion.logprobs), message.logprobs)
    if completion.finish_reason is not None:
        write_finish(completion.finish_reason, completion.stop_reason, message.finish)


def wants_text(output: messages.OutputOptions) -> bool:
    return output.text if output.HasField("text") else True


def write_model(info: ModelInfo, message: Model) -> None:
    for name in MODEL:
        setattr(message, name, getattr(info, name))
    message.eos_token_ids.extend(info.eos_token_ids)
    message.has_chat_template = info.chat_template
    message.without_tokenizer = not info.tokenizer
    write_params(info.generation_defaults, DEFAULTS, message.generation_defaults)
    for group in info.layer_groups:
        message.layer_groups.add(num_layers=group.num_layers, window=group.window)


def _write_seconds(message: Duration, seconds: float) -> None:
    message.FromNanoseconds(max(0, round(seconds * 1e9)))
