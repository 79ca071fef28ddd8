"""What an output of a chat consists of: the events that a parser makes of its text, and the message that they add up to. Plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEvent:
    """`source`: the piece of the output that the event was made of. Those of all events add up to the output, whatever it is."""

    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentDelta(ChatEvent):
    """More text of the answer. Empty for markers around it."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta(ChatEvent):
    """More text of the reasoning that comes before an answer or a call. Empty for markers around it."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted(ChatEvent):
    """A call of a tool; its arguments follow."""

    index: int  # of the call in the message, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentsDelta(ChatEvent):
    """More of the arguments of a call. All deltas of a call are the beginning of a JSON object, and all of it if the call is complete."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded(ChatEvent):
    """Nothing more of a call comes."""

    index: int
    complete: bool  # whether its arguments are a whole JSON object; false where the output ended, or went on with something else


Event = ContentDelta | ReasoningDelta | CallStarted | ArgumentsDelta | CallEnded


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as far as the model wrote it."""

    id: str
    name: str
    arguments: str = ""  # a JSON object, or its beginning
    complete: bool = False  # whether it is a whole one


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """The output of a chat, in its parts."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, events: Iterable[Event]) -> ChatMessage:
        """What the events add up to."""
        builder = MessageBuilder()
        for event in events:
            builder.add(event)
        return builder.message()

    def as_dict(self) -> dict[str, Any]:
        """In the form in which chat templates take a message of the assistant. Arguments are objects, those of incomplete calls strings."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments) if call.complete else call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


@dataclass(slots=True)
class MessageBuilder:
    """Adds the events of an output up to a message."""

    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[tuple[ToolCall, list[str]]] = field(default_factory=list)  # with the deltas of their arguments

    def add(self, event: Event) -> None:
        if isinstance(event, ContentDelta):
            self._content.append(event.text)
        elif isinstance(event, ReasoningDelta):
            self._reasoning.append(event.text)
        elif isinstance(event, CallStarted):
            self._calls.append((ToolCall(event.id, event.name), []))
        elif isinstance(event, ArgumentsDelta):
            self._calls[event.index][1].append(event.text)
        else:
            call, deltas = self._calls[event.index]
            self._calls[event.index] = replace(call, complete=event.complete), deltas

    def message(self) -> ChatMessage:
        """Return the message that the events so far add up to."""
        calls = tuple(replace(call, arguments="".join(deltas)) for call, deltas in self._calls)
        return ChatMessage("".join(self._content), "".join(self._reasoning), calls)
