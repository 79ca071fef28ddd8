"""Chats as prompts: their messages, and what the chat template is given beside them. The checks are those of engine and client alike.

Everything is plain JSON data, so that it can be sent. Knows neither templates nor messages on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypedDict

from aengine.checks import Refusal, check_fields, is_not, shown
from aengine.errors import InvalidRequestError

MAX_CHAT_MESSAGES = 4096
MAX_CHAT_CHARACTERS = 4 << 20
"""Most characters and other values in the messages of a chat. A template may leave out most of them, so the context does not bound this."""
MAX_OPTION_CHARACTERS = 1 << 18
"""Most of them in the tools, and in the template_kwargs."""
MAX_DEPTH = 64
"""Most lists and dicts within each other."""
RESERVED = frozenset(
    {"self", "conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""What `apply_chat_template` of transformers and its renderer call parameters of their own, which are no variables of a template."""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the messages. Raises `InvalidRequestError` (prompt) for what is no conversation."""
    if not messages:
        raise InvalidRequestError.of("prompt", "there are no messages")
    check_count(messages)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError.of("prompt", f"message {index} is a {type(message).__name__}, not a dict with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidRequestError.of("prompt", f"message {index} has role {shown(role)}, which is not a non-empty string")
        if isinstance(content, list | tuple) and content and all(isinstance(part, Mapping) for part in content):
            _check_parts(content, f"message {index} has a content part")
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            name = type(content).__name__
            raise InvalidRequestError.of("prompt", f"message {index} has content of type {name}, not a string or a list of parts")
    try:
        copied: list[dict[str, Any]] = _plain(messages, MAX_CHAT_CHARACTERS)
    except Refusal as refusal:
        raise InvalidRequestError.of("prompt", f"the messages hold {refusal}") from None
    return copied


def check_count(messages: Sized) -> None:
    """Raises `InvalidRequestError` (prompt) for more than MAX_CHAT_MESSAGES."""
    if len(messages) > MAX_CHAT_MESSAGES:
        raise InvalidRequestError.of("prompt", f"{len(messages)} messages are more than {MAX_CHAT_MESSAGES}")


def _check_parts(parts: Sequence[Mapping[str, Any]], what: str) -> None:
    for part in parts:
        if part.get("type") != "text":
            raise InvalidRequestError.of("prompt", f"{what} of type {shown(part.get('type'))}; only 'text' is possible")
        if len(part) != 2 or not isinstance(part.get("text"), str):
            raise InvalidRequestError.of("prompt", f"{what} {shown(dict(part))}, which is not {{'type': 'text', 'text': a string}}")


def _plain(value: Any, most: int) -> Any:
    """A copy of JSON data in plain types. Raises `Refusal` for other values, more than `most` characters and other values, and more than
    MAX_DEPTH levels."""
    left = most

    def copy(one: Any, depth: int) -> Any:
        nonlocal left
        if isinstance(one, str):
            left -= len(one)
            if left >= 0:
                return one
        left -= 1
        if left < 0:
            raise Refusal(f"more than {most} characters and other values")
        if depth > MAX_DEPTH:
            raise Refusal(f"lists and dicts in more than {MAX_DEPTH} levels")
        if one is None or (isinstance(one, int) and one.bit_length() <= 64) or (isinstance(one, float) and math.isfinite(one)):
            return one  # a bool is an int
        if isinstance(one, list | tuple):
            return [copy(item, depth + 1) for item in one]
        if isinstance(one, Mapping) and all(isinstance(key, str) for key in one):
            left -= sum(map(len, one))
            return {key: copy(item, depth + 1) for key, item in one.items()}
        raise Refusal(f"{shown(one)}, which is no JSON value")

    return copy(value, 0)


def _tools(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in value):
        raise Refusal(is_not(value, "a list of dicts, each describing a tool"))
    return _held(value) or None  # a template may take an empty list for tools


def _template_kwargs(value: Any) -> Any:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise Refusal(is_not(value, "a dict of names and values"))
    if taken := sorted(RESERVED.intersection(value)):
        raise Refusal(f"{', '.join(taken)} cannot be set here")
    return _held(value) or None


def _held(value: Any) -> Any:
    try:
        return _plain(value, MAX_OPTION_CHARACTERS)
    except Refusal as refusal:
        raise Refusal(f"it holds {refusal}") from None


class ChatFields(TypedDict, total=False):
    """The fields of `ChatOptions` as keyword arguments."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a chat template is given beside the messages. Raises `InvalidRequestError` naming every field that is out of range."""

    tools: Annotated[Sequence[Mapping[str, Any]] | None, _tools] = None
    """Chats only: the tools that the model may call, as the model's chat template takes them; mostly
    `{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`."""
    add_generation_prompt: bool | None = None
    """Chats only: whether the prompt ends with the opening of the assistant's turn. Default: true unless `continue_final_message`."""
    continue_final_message: bool = False
    """Chats only: the last message is left open, and the output continues it."""
    template_kwargs: Annotated[Mapping[str, Any] | None, _template_kwargs] = None
    """Chats only: variables for the chat template, such as `{"enable_thinking": False}`."""

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequestError)
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError.of("continue_final_message", "true cannot be combined with add_generation_prompt")

    @property
    def opens_turn(self) -> bool:
        """`add_generation_prompt` with its default."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def chat_only(self) -> list[str]:
        """The names of those that are set."""
        return [field.name for field in fields(ChatOptions) if getattr(self, field.name) != field.default]
