"""`Conversation`: the messages of a chat, in exchanges that can be taken back and asked again. `ChatParameters`: what can be set about its
answers, by name, from what a user types; the ranges are those of the engine. Knows neither an engine nor files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

from aengine.api.dataclass import dataclass
from aengine.api.errors import AEngineError, InvalidRequestError
from aengine.api.fields import DeclaredField, check_fields, declared_fields, integer
from aengine.api.params import SamplingParams, StructuredOutput
from aengine.api.request import RequestOptions, read_messages
from aengine.server.config.settings import field_docs, nearest

Message = dict[str, Any]
"""As chat templates take them."""


class CommandError(AEngineError):
    """What the user asked for is not possible. The message is one sentence."""


class Conversation:
    """`exchanges`: each a message of the user and what followed it, up to the answer. `unanswered`: the exchange that has no answer yet."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.exchanges: list[list[Message]] = []
        self.unanswered: list[Message] = []
        self.images: list[str] = []  # of the next question, as `data:` URLs

    @property
    def messages(self) -> list[Message]:
        """All messages in order, as the model sees them: the system's, the exchanges, and the unanswered one."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [message for exchange in (*self.exchanges, self.unanswered) for message in exchange]

    @property
    def text(self) -> str:
        """For models without a chat template: what was said, one message per line."""
        return "\n".join(map(_text_of, self.messages))

    def ask(self, text: str) -> None:
        """Begin an exchange, with the images that were added. One that got no answer is dropped."""
        images = [{"type": "image", "image": image} for image in self.images]
        self.images = []
        self.unanswered = [{"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}]

    def add_calls(self, message: Message, results: Sequence[str]) -> None:
        """Add a message of the assistant that calls tools, with their results. The exchange goes on."""
        calls = message["tool_calls"]
        tools = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        self.unanswered += [message, *tools]

    def answer(self, message: Message) -> None:
        """Add the answer to the unanswered exchange, which joins the others."""
        self.exchanges.append([*self.unanswered, message])
        self.unanswered = []

    def retry(self) -> str:
        """Take the last answer back, so that its question is unanswered; returns the question."""
        if not self.unanswered:
            self.unanswered = self._last()
            self.exchanges.pop()
        del self.unanswered[1:]
        return _text_of(self.unanswered[0])

    def undo(self) -> str:
        """Take the last exchange back; returns its question."""
        question = _text_of(self._last()[0])
        self.exchanges.pop()
        self.unanswered = []
        return question

    def clear(self) -> None:
        """Forget everything but the system's message."""
        self.exchanges, self.unanswered, self.images = [], [], []

    def to_json(self) -> str:
        return json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Conversation:
        """What `to_json` wrote, or another list of messages. Raises `CommandError`, or `InvalidRequestError` for what is no message."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"this is not JSON: {error}") from None
        if not isinstance(value, list):
            raise CommandError("this is no list of messages")
        messages = value
        if value:
            read_messages(value)
            for message in messages:
                for part in message["content"] if isinstance(message["content"], list) else ():
                    if part["type"] == "image" and not str(part.get("image")).startswith("data:"):
                        raise CommandError("an image in it is no data: URL")
        found = cls()
        if messages and messages[0]["role"] == "system":
            found.system = _text_of(messages.pop(0))
        for message in messages:
            if message["role"] == "user":
                found.exchanges.append([message])
            elif not found.exchanges:
                raise CommandError(f"the first message has role {message['role']!r}, and not system or user")
            else:
                found.exchanges[-1].append(message)
        if found.exchanges and found.exchanges[-1][-1]["role"] != "assistant":
            found.unanswered = found.exchanges.pop()
        return found

    def _last(self) -> list[Message]:
        if not self.exchanges:
            raise CommandError("nothing was asked yet")
        return self.exchanges[-1]


def _text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "[image] ") for part in content or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParams:
    """What is about neither tokens nor requests."""

    max_reasoning_tokens: Annotated[int | None, integer(0)] = None
    """>= 0: the reasoning before an answer is closed when it has so many tokens. Default: no limit."""

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequestError)


_OPTIONS = ("adapter", "timeout", "priority", "cache_salt", "template_kwargs")
_NOT_HERE = ("n", "detokenize", "logprobs", "prompt_logprobs", "prompt_logprobs_from")  # a chat has one output, which is a text
_TYPED = (bool, int, float, str, tuple[str, ...], tuple[int, ...], Mapping[int, float], Mapping[str, Any], StructuredOutput)
FIELDS: dict[str, tuple[type, DeclaredField]] = {
    field.name: (owner, field)
    for owner in (SamplingParams, RequestOptions, ChatParams)
    for field in declared_fields(owner)
    if field.kind in _TYPED and field.name not in _NOT_HERE and (owner is not RequestOptions or field.name in _OPTIONS)
}
"""By name, each with the class that it is a field of."""


class ChatParameters:
    """`params`, `options` and `chat` hold what is set."""

    def __init__(self, assignments: Sequence[str] = ()) -> None:
        """Raises what `set` raises."""
        self._values: dict[str, Any] = {}
        self.set(assignments)

    def set(self, assignments: Sequence[str]) -> None:
        """Each is `name=value`; a value is JSON or text, `none` is the default. Sets all of them, or raises `InvalidRequestError`."""
        values = dict(self._values)
        for assignment in assignments:
            name, equals, text = assignment.partition("=")
            if not equals:
                raise InvalidRequestError.of(name, "has no value: write name=value")
            _, field = self.field(name)
            if text.lower() == "none":
                values.pop(name, None)
            else:
                values[name] = _read(field, text)
        made = {owner: owner(**{n: value for n, value in values.items() if FIELDS[n][0] is owner}) for owner in _OWNERS}
        self._values = values
        self.params: SamplingParams = made[SamplingParams]
        self.options: RequestOptions = made[RequestOptions]
        self.chat: ChatParams = made[ChatParams]

    @property
    def given(self) -> Mapping[str, Any]:
        """The parameters that the user set, by name."""
        return self._values

    @staticmethod
    def field(name: str) -> tuple[type, DeclaredField]:
        """Raises `InvalidRequestError` if there is no such parameter."""
        if name not in FIELDS:
            raise InvalidRequestError.of(name, f"there is no such parameter{nearest(name, FIELDS)}")
        return FIELDS[name]

    def describe(self, model: SamplingParams, *, with_unset: bool = True) -> str:
        """What is set, here or by the model, and with `with_unset` what is not."""
        lines = {name: f"{name} = {_shown(value)}" for name, value in self._values.items()}
        for name, (owner, field) in FIELDS.items():
            if owner is SamplingParams and name not in lines and (value := getattr(model, name)) != field.default:
                lines[name] = f"{name} = {_shown(value)} (the model's)"
        unset = f"Not set: {', '.join(name for name in FIELDS if name not in lines)}."
        return "\n".join([*lines.values(), *([unset] if with_unset else [])])

    def explain(self, name: str) -> str:
        """What the parameter is. Raises `InvalidRequestError` if there is no such one."""
        owner, _ = self.field(name)
        state = f"{name} = {_shown(self._values[name])}" if name in self._values else f"{name} is not set"
        return f"{state}\n{field_docs(owner)[name]}"


_OWNERS: tuple[Any, ...] = (SamplingParams, RequestOptions, ChatParams)


def _read(field: DeclaredField, text: str) -> Any:
    """The value that `text` means to the field. What means nothing stays as it is, for the field's own rule to refuse."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if field.kind is str or (field.kind == tuple[str, ...] and not isinstance(value, list)):
        return text
    if field.kind == Mapping[int, float] and isinstance(value, dict):
        return {int(key) if key.isdecimal() else key: number for key, number in value.items()}
    if field.kind is StructuredOutput and isinstance(value, dict):
        try:
            return StructuredOutput(**value)
        except TypeError as error:
            raise InvalidRequestError.of(field.name, str(error).partition("() ")[2]) from None
    return value


def _shown(value: Any) -> str:
    if isinstance(value, StructuredOutput):
        value = {field.name: given for field in fields(value) if (given := getattr(value, field.name)) != field.default}
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
