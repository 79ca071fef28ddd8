"""Proto -> what `AsyncEngine.stream` takes, and what it gives -> proto. Pure functions; owns the paths of fields in the schema.

All violations of a request are collected before it is refused, each under its path in the request message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration

from aengine.engine.prompts import Prompt, check_options
from aengine.errors import FieldViolation, InvalidRequestError
from aengine.outputs import FinishReason, ModelInfo, Usage
from aengine.params import SamplingParams
from aengine.v1 import generation_pb2, generation_service_pb2, model_service_pb2

GenerationRequest = generation_service_pb2.GenerateRequest | generation_service_pb2.StreamGenerateRequest

# Where the engine's names are found in the schema. The prompt's path depends on its form.
_PATHS = {
    **{name: f"spec.sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
    **{name: f"spec.stopping.{name}" for name in ("max_tokens", "stop_token_ids", "ignore_eos")},
    "timeout": "spec.stopping.time_limit",
    "cache_salt": "spec.cache.salt",
    "priority": "spec.priority",
    "tenant": "spec.tenant",
}

# ERROR has no counterpart: a request that fails ends its call with a status.
FINISH_REASONS: Mapping[FinishReason, generation_pb2.FinishReason.ValueType] = {
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: generation_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.MAX_TOKENS: generation_pb2.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_LENGTH: generation_pb2.FINISH_REASON_CONTEXT_LENGTH,
    FinishReason.DEADLINE: generation_pb2.FINISH_REASON_DEADLINE,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
}


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A generation as the engine takes it, and which parts of the answer are wanted."""

    prompt: Prompt
    params: SamplingParams
    request_id: str | None
    priority: int
    tenant: str
    timeout: float | None  # seconds
    cache_salt: str | None
    text: bool
    token_ids: bool


def read_request(request: GenerationRequest) -> EngineRequest:
    """The engine's view of a request. Raises `InvalidRequestError` with every violation that shows without the model."""
    spec = request.spec
    violations: list[FieldViolation] = []
    prompt = _read_prompt(spec.prompt, violations)
    params = _read_params(spec, violations)
    options: dict[str, Any] = {
        "request_id": request.request_id if request.HasField("request_id") else None,
        "priority": spec.priority,
        "tenant": spec.tenant,
        "timeout": _seconds(spec.stopping.time_limit) if spec.stopping.HasField("time_limit") else None,
        "cache_salt": spec.cache.salt or None,
    }
    try:
        check_options(**options, now=0.0)
    except InvalidRequestError as error:
        violations.extend(located(error, spec).violations)
    if violations:
        raise InvalidRequestError(violations)
    return EngineRequest(
        prompt=prompt,
        params=params,
        **options,
        text=spec.output.text if spec.output.HasField("text") else True,
        token_ids=spec.output.token_ids,
    )


def located(error: InvalidRequestError, spec: generation_pb2.GenerationSpec) -> InvalidRequestError:
    """The same error with the engine's field names turned into paths of the request message."""
    return type(error)([FieldViolation(_path(violation.field, spec), violation.description) for violation in error.violations])


def _path(field: str, spec: generation_pb2.GenerationSpec) -> str:
    if field == "prompt":
        return f"spec.prompt.{spec.prompt.WhichOneof('content')}"
    return _PATHS.get(field, field)


def _read_prompt(prompt: generation_pb2.Prompt, violations: list[FieldViolation]) -> Prompt:
    form = prompt.WhichOneof("content")
    if form is None:
        violations.append(FieldViolation("spec.prompt", "exactly one of text, token_ids, chat must be set"))
        return ""
    if form == "chat":
        messages: list[dict[str, Any]] = [{"role": message.role, "content": message.content} for message in prompt.chat.messages]
        for index, message in enumerate(prompt.chat.messages):
            if not message.role:
                violations.append(FieldViolation(f"spec.prompt.chat.messages[{index}].role", "must not be empty"))
        content: Prompt = messages
    else:
        content = prompt.text if form == "text" else list(prompt.token_ids.ids)
    if not content:
        violations.append(FieldViolation(f"spec.prompt.{form}", "must not be empty"))
    return content


def _read_params(spec: generation_pb2.GenerationSpec, violations: list[FieldViolation]) -> SamplingParams:
    stopping = spec.stopping
    given: dict[str, Any] = {
        field.name: _shortest(value) if isinstance(value, float) else value for field, value in spec.sampling.ListFields()
    }
    given.update(stop_token_ids=tuple(stopping.stop_token_ids), ignore_eos=stopping.ignore_eos)
    if stopping.HasField("max_tokens"):
        given["max_tokens"] = stopping.max_tokens
    try:
        return SamplingParams(**given)
    except InvalidRequestError as error:
        violations.extend(located(error, spec).violations)
        return SamplingParams()


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32, so that 0.7 on the wire is the 0.7 of a caller in process."""
    return float(str(np.float32(value)))


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def write_usage(usage: Usage, message: generation_pb2.Usage) -> None:
    message.prompt_tokens = usage.prompt_tokens
    message.cached_prompt_tokens = usage.cached_prompt_tokens
    message.completion_tokens = usage.completion_tokens


def write_model(info: ModelInfo, message: model_service_pb2.Model) -> None:
    message.name = info.name
    message.architecture = info.architecture
    message.max_model_len = info.max_model_len
    message.vocab_size = info.vocab_size
    message.eos_token_ids.extend(info.eos_token_ids)
    message.dtype = info.dtype
    message.num_parameters = info.num_parameters
    message.has_chat_template = info.chat_template
    defaults = info.generation_defaults
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        if getattr(defaults, name) is not None:
            setattr(message.generation_defaults, name, getattr(defaults, name))
