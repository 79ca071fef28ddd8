"""Proto -> what `AsyncEngine.stream` takes. Pure functions; the names are those of `aengine.wire`.

All violations of a request are collected before it is refused, each under its path in the request message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from aengine.errors import FieldError, FieldViolation, InvalidRequestError
from aengine.params import MAX_CHOICES, SamplingParams, StructuredOutput
from aengine.requests import Prompt, RequestOptions
from aengine.server.generation.chat import read_chat
from aengine.server.generation.durations import read_seconds
from aengine.server.generation.stream_options import StreamPolicy, read_stream_options
from aengine.v1 import generation_pb2, generation_service_pb2
from aengine.wire import SAMPLING, STOPPING, path_of, read_params

ErrorT = TypeVar("ErrorT", bound=Exception)
GenerationRequest = generation_service_pb2.GenerateRequest | generation_service_pb2.StreamGenerateRequest


class EngineRequest(NamedTuple):
    """A generation as the engine takes it, and how its events are to be sent."""

    prompt: Prompt
    params: SamplingParams
    options: RequestOptions
    policy: StreamPolicy


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
    return EngineRequest(prompt, params, options, policy)


def located(error: ErrorT, spec: generation_pb2.GenerationSpec) -> ErrorT:
    """The same error; if it is about fields, the engine's names for them are turned into paths of the request message."""
    return error.moved(lambda field: path_of(field, spec)) if isinstance(error, FieldError) else error


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
