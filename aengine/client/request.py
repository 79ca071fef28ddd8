"""A request as the engine takes it -> the message that the server takes. Pure functions; what cannot travel is refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aengine.errors import InvalidRequestError
from aengine.params import SamplingParams, StructuredOutput
from aengine.requests import MAX_CHAT_MESSAGES, Prompt, RequestOptions, is_chat
from aengine.token_ids import read_token_ids
from aengine.v1 import generation_pb2, sampling_pb2
from aengine.v1.generation_service_pb2 import StreamGenerateRequest
from aengine.wire import SAMPLING, STOPPING, write_params

MAX_UINT32 = 2**32 - 1
MAX_TOKEN_IDS = 1 << 22
"""Of a prompt: a list of more has too many bytes for any server."""
_MESSAGE_KEYS = {"role", "content"}


def write_request(
    prompt: Prompt,
    params: SamplingParams,
    options: RequestOptions,
) -> StreamGenerateRequest:
    """Without the id. Raises `InvalidRequestError` for what cannot be said in a message."""
    if params.logits_processors:
        raise InvalidRequestError.of("logits_processors", "custom code cannot travel to a server")
    request = StreamGenerateRequest()
    spec = request.spec
    _write_prompt(prompt, spec.prompt)
    try:
        write_params(params, SAMPLING, spec.sampling)
        write_params(params, STOPPING, spec.stopping)
        if params.structured_output is not None:
            _write_constraint(params.structured_output, spec.structured_output)
        spec.tenant = options.tenant
        spec.cache.salt = options.cache_salt or ""
    except ValueError as error:  # a lone surrogate
        raise InvalidRequestError.of("params", f"a string is not Unicode text: {error}") from error
    if options.timeout is not None:
        spec.stopping.time_limit.FromNanoseconds(max(1, round(options.timeout * 1e9)))
    spec.priority = options.priority
    output = spec.output
    if params.detokenize is not None:
        output.text = params.detokenize
    output.token_ids = True
    output.skip_special_tokens = params.skip_special_tokens
    if params.logprobs is not None:
        output.logprobs.top_k = params.logprobs
    if params.prompt_logprobs is not None:
        output.prompt_logprobs.top_k = params.prompt_logprobs
    return request


def write_token_ids(ids: Sequence[int], message: generation_pb2.Prompt) -> None:
    """Make `ids` the prompt, in place of what is there."""
    message.token_ids.SetInParent()
    message.token_ids.ids.extend(ids)


def write_chat(messages: Sequence[Mapping[str, Any]], message: generation_pb2.ChatPrompt) -> None:
    """Raises `InvalidRequestError`."""
    if len(messages) > MAX_CHAT_MESSAGES:
        raise InvalidRequestError.of("prompt", f"{len(messages)} messages are more than {MAX_CHAT_MESSAGES}")
    for index, one in enumerate(messages):
        if not isinstance(one, Mapping) or set(one) != _MESSAGE_KEYS or not all(isinstance(value, str) for value in one.values()):
            raise InvalidRequestError.of(
                "prompt", f"message {index} is not a mapping of role and content to text, which is all that can travel"
            )
        try:
            message.messages.add(role=one["role"], content=one["content"])
        except ValueError as error:
            raise InvalidRequestError.of("prompt", f"message {index} is not Unicode text: {error}") from error


def write_text(text: str, message: generation_pb2.Prompt) -> None:
    """Raises `InvalidRequestError`."""
    try:
        message.text = text
    except ValueError as error:
        raise InvalidRequestError.of("prompt", f"is not Unicode text: {error}") from error


def _write_prompt(prompt: Prompt, message: generation_pb2.Prompt) -> None:
    if isinstance(prompt, str):
        write_text(prompt, message)
    elif isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Sequence | np.ndarray):
        raise InvalidRequestError.of("prompt", f"a {type(prompt).__name__} is not a string, a list of token ids or a list of chat messages")
    elif is_chat(prompt):
        write_chat(prompt, message.chat)  # type: ignore[arg-type]
    else:
        if len(prompt) > MAX_TOKEN_IDS:
            raise InvalidRequestError.of("prompt", f"{len(prompt)} token ids are more than {MAX_TOKEN_IDS}, which no server takes")
        write_token_ids(read_token_ids(prompt, MAX_UINT32).tolist(), message)  # type: ignore[arg-type]


def _write_constraint(wanted: StructuredOutput, message: sampling_pb2.StructuredOutput) -> None:
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
