"""Proto -> what `AsyncEngine.stream` takes, and what it gives -> proto. Pure functions; the names are those of `aengine.wire`.

All violations of a request are collected before it is refused, each under its path in the request message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from aengine.errors import FieldErrorT, FieldViolation, InvalidRequestError
from aengine.outputs import ModelInfo, Usage
from aengine.params import MAX_CHOICES, SamplingParams, StructuredOutput
from aengine.requests import Prompt, RequestOptions
from aengine.server.generation.chat import read_chat
from aengine.server.generation.durations import read_seconds
from aengine.server.generation.stream_options import StreamPolicy, read_stream_options
from aengine.v1 import generation_pb2, generation_service_pb2, model_service_pb2
from aengine.wire import DEFAULTS, SAMPLING, STOPPING, path_of, read_params, write_params

GenerationRequest = generation_service_pb2.GenerateRequest | generation_service_pb2.StreamGenerateRequest


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A generation as the engine takes it, and which parts of the answer are wanted."""

    prompt: Prompt
    params: SamplingParams
    options: RequestOptions
    text: bool
    token_ids: bool
    effective_params: bool
    stream: StreamPolicy


async def read_request(
    request: GenerationRequest, violations_of: Callable[[Prompt, SamplingParams], Awaitable[list[FieldViolation]]]
) -> EngineRequest:
    """The engine's view of a request. Raises `InvalidRequestError` with every violation that shows in the message, and then with those
    that the engine finds: `violations_of`. For what is valid here it is not asked, nor is anything waited for."""
    spec = request.spec
    violations: list[FieldViolation] = []
    prompt = _read_prompt(spec.prompt, violations)
    params = _read_params(spec, violations)
    policy = read_stream_options(spec.stream, violations)
    options = _read_options(request, violations)
    if violations or options is None:
        named = {violation.field for violation in violations}
        others = _located(await violations_of(prompt, params), spec)
        raise InvalidRequestError([*violations, *(violation for violation in others if violation.field not in named)])
    return EngineRequest(
        prompt=prompt,
        params=params,
        options=options,
        text=_wants_text(spec.output),
        token_ids=spec.output.token_ids,
        effective_params=spec.output.effective_params,
        stream=policy,
    )


def located(error: FieldErrorT, spec: generation_pb2.GenerationSpec) -> FieldErrorT:
    """The same error with the engine's field names turned into paths of the request message."""
    return error.moved(lambda field: path_of(field, spec))


def _located(violations: Iterable[FieldViolation], spec: generation_pb2.GenerationSpec) -> list[FieldViolation]:
    return [replace(violation, field=path_of(violation.field, spec)) for violation in violations]


def _read_prompt(prompt: generation_pb2.Prompt, violations: list[FieldViolation]) -> Prompt:
    form = prompt.WhichOneof("content")
    if form is None:
        violations.append(FieldViolation("spec.prompt", "exactly one of text, token_ids, chat must be set"))
        return ""
    content: Prompt
    if form == "chat":
        content = read_chat(prompt.chat, "spec.prompt.chat", violations)
    else:
        content = prompt.text if form == "text" else np.asarray(prompt.token_ids.ids)  # type: ignore[assignment] # as quick as can be
    if not len(content):
        violations.append(FieldViolation(f"spec.prompt.{form}", "must not be empty"))
    return content


def _read_params(spec: generation_pb2.GenerationSpec, violations: list[FieldViolation]) -> SamplingParams:
    """The parameters, without those in which something is wrong."""
    output = spec.output
    found: list[FieldViolation] = []
    given = {**read_params(spec.sampling, SAMPLING, found), **read_params(spec.stopping, STOPPING, found)}
    if output.HasField("text"):
        given["detokenize"] = output.text or bool(spec.stopping.stop_strings)
    if output.HasField("skip_special_tokens"):
        given["skip_special_tokens"] = output.skip_special_tokens
    if output.HasField("logprobs"):
        given["logprobs"] = output.logprobs.top_k
    if output.HasField("prompt_logprobs"):
        given["prompt_logprobs"] = output.prompt_logprobs.top_k
    if spec.HasField("structured_output"):
        given["structured_output"] = _read_structured_output(spec, violations)
    while True:
        try:
            params = SamplingParams(**given)
        except InvalidRequestError as error:
            found.extend(error.violations)
            for violation in error.violations:
                del given[violation.field]
        else:
            violations.extend(_located(found, spec))
            return params


def _read_structured_output(spec: generation_pb2.GenerationSpec, violations: list[FieldViolation]) -> StructuredOutput | None:
    message = spec.structured_output
    kind = message.WhichOneof("constraint")
    try:
        match kind:
            case "json_object":
                return StructuredOutput(json_object=True)
            case "choices":
                values = message.choices.values
                if 1 <= len(values) <= MAX_CHOICES:
                    return StructuredOutput(choice=tuple(values))
                violations.append(FieldViolation("spec.structured_output.choices", f"{len(values)} choices are not 1 to {MAX_CHOICES}"))
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
        violations.extend(_located(error.violations, spec))
    return None


def _read_options(request: GenerationRequest, violations: list[FieldViolation]) -> RequestOptions | None:
    spec, timeout = request.spec, None
    if spec.stopping.HasField("time_limit"):
        timeout = read_seconds(spec.stopping.time_limit, path_of("timeout", spec), violations)
    try:
        return RequestOptions(
            request_id=request.request_id if request.HasField("request_id") else None,
            priority=spec.priority,
            tenant=spec.tenant,
            timeout=timeout,
            cache_salt=spec.cache.salt or None,
        )
    except InvalidRequestError as error:
        violations.extend(_located(error.violations, spec))
        return None


def _wants_text(output: generation_pb2.OutputOptions) -> bool:
    return output.text if output.HasField("text") else True


def effective_spec(given: generation_pb2.GenerationSpec, params: SamplingParams) -> generation_pb2.GenerationSpec:
    """What a request comes to: as it was given, with the effective `params` filled in, and without the prompt."""
    message = generation_pb2.GenerationSpec()
    message.CopyFrom(given)
    message.ClearField("prompt")
    write_params(params, SAMPLING, message.sampling)
    write_params(params, STOPPING, message.stopping)
    return message


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
    message.without_tokenizer = not info.tokenizer
    write_params(info.generation_defaults, DEFAULTS, message.generation_defaults)
