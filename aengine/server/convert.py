"""Proto -> what `AsyncEngine.stream` takes, and what it gives -> proto. Pure functions; owns the paths of fields in the schema.

All violations of a request are collected before it is refused, each under its path in the request message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message

from aengine.engine.prompts import Prompt, check_options
from aengine.errors import FieldViolation, InvalidRequestError
from aengine.outputs import FinishReason, ModelInfo, Usage
from aengine.params import SamplingParams, StructuredOutput
from aengine.server.stream_options import StreamPolicy, read_stream_options, seconds_of
from aengine.v1 import generation_pb2, generation_service_pb2, model_service_pb2

GenerationRequest = generation_service_pb2.GenerateRequest | generation_service_pb2.StreamGenerateRequest

# Parameters of the engine by the message that carries them, with their names there.
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "n", "presence_penalty", "frequency_penalty")},
    **{name: name for name in ("repetition_penalty", "logit_bias", "allowed_token_ids", "banned_token_ids")},
    "bad_words": "banned_strings",
}
_STOPPING = {
    **{name: name for name in ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")},
    "stop": "stop_strings",
    "include_stop_str_in_output": "include_stop_in_output",
}
_CONSTRAINTS = {
    **{name: name for name in ("json_schema", "json_object", "regex", "grammar")},
    "choice": "choices",
}

# Where the engine's names are found in the schema. The prompt's path depends on its form.
_PATHS = {
    **{name: f"spec.sampling.{ours}" for name, ours in _SAMPLING.items()},
    **{name: f"spec.stopping.{ours}" for name, ours in _STOPPING.items()},
    **{f"structured_output.{name}": f"spec.structured_output.{ours}" for name, ours in _CONSTRAINTS.items()},
    "structured_output": "spec.structured_output",
    "detokenize": "spec.output.text",
    "skip_special_tokens": "spec.output.skip_special_tokens",
    "logprobs": "spec.output.logprobs.top_k",
    "prompt_logprobs": "spec.output.prompt_logprobs.top_k",
    "timeout": "spec.stopping.time_limit",
    "cache_salt": "spec.cache.salt",
    "priority": "spec.priority",
    "tenant": "spec.tenant",
}

# ERROR has no counterpart: a request that fails ends its call with a status.
FINISH_REASONS: Mapping[FinishReason, generation_pb2.FinishReason.ValueType] = {
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_STRING: generation_pb2.FINISH_REASON_STOP_STRING,
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
    effective_params: bool
    stream: StreamPolicy


def read_request(request: GenerationRequest) -> EngineRequest:
    """The engine's view of a request. Raises `InvalidRequestError` with every violation that shows without the model."""
    spec = request.spec
    violations: list[FieldViolation] = []
    prompt = _read_prompt(spec.prompt, violations)
    params = _read_params(spec, violations)
    policy = read_stream_options(spec.stream, violations)
    options: dict[str, Any] = {
        "request_id": request.request_id if request.HasField("request_id") else None,
        "priority": spec.priority,
        "tenant": spec.tenant,
        "timeout": seconds_of(spec.stopping.time_limit) if spec.stopping.HasField("time_limit") else None,
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
        text=_wants_text(spec.output),
        token_ids=spec.output.token_ids,
        effective_params=spec.output.effective_params,
        stream=policy,
    )


def located(error: InvalidRequestError, spec: generation_pb2.GenerationSpec) -> InvalidRequestError:
    """The same error with the engine's field names turned into paths of the request message."""
    return error.moved(lambda field: _path(field, spec))


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
    output = spec.output
    given = {**_given(spec.sampling, _SAMPLING), **_given(spec.stopping, _STOPPING)}
    given["detokenize"] = _wants_text(output) or bool(spec.stopping.stop_strings)
    if output.HasField("skip_special_tokens"):
        given["skip_special_tokens"] = output.skip_special_tokens
    if output.HasField("logprobs"):
        given["logprobs"] = output.logprobs.top_k
    if output.HasField("prompt_logprobs"):
        given["prompt_logprobs"] = output.prompt_logprobs.top_k
    if spec.HasField("structured_output"):
        given["structured_output"] = _read_structured_output(spec, violations)
    try:
        return SamplingParams(**given)
    except InvalidRequestError as error:
        violations.extend(located(error, spec).violations)
        return SamplingParams()


def _given(message: Message, names: Mapping[str, str]) -> dict[str, Any]:
    """Those of the engine's parameters `names` that are set in `message`, which calls them by the values."""
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    return {name: _plain(values[ours]) for name, ours in names.items() if ours in values}


def _plain(value: Any) -> Any:
    match value:
        case float():
            return _shortest(value)
        case Mapping():
            return {key: _shortest(number) for key, number in value.items()}
        case bool() | int():
            return value
    return tuple(value)


def _read_structured_output(spec: generation_pb2.GenerationSpec, violations: list[FieldViolation]) -> StructuredOutput | None:
    message = spec.structured_output
    kind = message.WhichOneof("constraint")
    try:
        match kind:
            case "json_object":
                return StructuredOutput(json_object=True)
            case "choices":
                if message.choices.values:
                    return StructuredOutput(choice=tuple(message.choices.values))
                violations.append(FieldViolation("spec.structured_output.choices", "must not be empty"))
            case "grammar":
                return StructuredOutput(grammar=message.grammar.source)
            case "json_schema":
                return StructuredOutput(json_schema=message.json_schema)
            case "regex":
                return StructuredOutput(regex=message.regex)
            case None:
                description = "exactly one of json_schema, json_object, regex, choices, grammar must be set"
                violations.append(FieldViolation("spec.structured_output", description))
    except InvalidRequestError as error:
        violations.extend(located(error, spec).violations)
    return None


def _wants_text(output: generation_pb2.OutputOptions) -> bool:
    return output.text if output.HasField("text") else True


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32, so that 0.7 on the wire is the 0.7 of a caller in process."""
    return float(str(np.float32(value)))


def effective_spec(given: generation_pb2.GenerationSpec, params: SamplingParams) -> generation_pb2.GenerationSpec:
    """What a request comes to: as it was given, with the effective `params` filled in, and without the prompt."""
    message = generation_pb2.GenerationSpec()
    message.CopyFrom(given)
    message.ClearField("prompt")
    _write_numbers(params, _SAMPLING, message.sampling)
    _write_numbers(params, _STOPPING, message.stopping)
    return message


def _write_numbers(params: SamplingParams, names: Mapping[str, str], message: Message) -> None:
    """Set the numbers and flags among the parameters `names` where they are known."""
    for name, ours in names.items():
        value = getattr(params, name)
        if isinstance(value, int | float):
            setattr(message, ours, value)


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
    _write_numbers(info.generation_defaults, {name: name for name in _SAMPLING if name != "n"}, message.generation_defaults)
