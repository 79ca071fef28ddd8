"""What an output of a chat consists of: the events that a parser makes of its text, and the message that they add up to. Plain data.

`Source`: the text that a format reads, as far as it has come, and the events that are made of it.

A format is a generator: it reads straight on, and yields where it needs more text than there is. So it gives the same result
however the text is cut. Every character that is read is held until it becomes the source of an event. `CallFormat` and
`ReasoningFormat` say how a model writes calls of tools and reasoning."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from aengine.api.dataclass import dataclass


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
            builder.add_event(event)
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

    def add_event(self, event: Event) -> None:
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


T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields for more text; returns what was read."""

MAX_SPACE = 64
"""Most white space before a marker that belongs to the marker."""

_WHITE = " \t\n\r"  # in JSON too
_SPACE = re.compile(f"[{_WHITE}]*")
Delta = type[ContentDelta] | type[ReasoningDelta]


class Source:
    """One output. `feed` and `finish` are for the parser, everything else is for formats."""

    def __init__(self, make_id: Callable[[], str]) -> None:
        """`make_id`: of a call."""
        self.events: list[Event] = []
        self._make_id = make_id
        self._text = ""  # not read, from _position on
        self._position = 0
        self._ended = False
        self._cut = False
        self._at_end = False  # whether more text was asked for when there was none
        self._held: list[str] = []  # read, and not yet the source of an event
        self._json: list[str] = []  # what stands for it in arguments
        self._streams = False  # whether what is read is arguments, which become deltas at once
        self._num_calls = 0

    def feed(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def finish(self, *, cut: bool) -> None:
        """No text will be added. `cut`: the model would have gone on."""
        self._ended = True
        self._cut = cut

    # ---- text ----------------------------------------------------------------------------------------------------------

    @property
    def unread(self) -> str:
        return self._text[self._position :]

    @property
    def held(self) -> str:
        """What was read, and is not yet the source of an event."""
        return "".join(self._held)

    def more(self) -> Reading[bool]:
        """Waits for more text. False if none comes."""
        before = len(self._text) - self._position
        while len(self._text) - self._position == before:
            if self._ended:
                self._at_end = True
                return False
            self._stream_arguments()
            yield
        return True

    def character(self) -> Reading[str]:
        """The next character, which stays unread. Empty at the end."""
        while self._position == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._position]

    def take_text(self, count: int, json: str | None = None) -> str:
        """Reads `count` characters, if there are so many. `json`: what they stand for in arguments, if it is something else."""
        text = self._text[self._position : self._position + count]
        self._position += len(text)
        self._held.append(text)
        self._json.append(json if json is not None and text else text)
        return text

    def match(self, pattern: re.Pattern[str]) -> str:
        """Reads what matches, of the text that has come."""
        found = pattern.match(self._text, self._position)
        return self.take_text(len(found.group())) if found is not None and found.group() else ""

    def replace_json(self, json: str) -> None:
        """What the piece that was read last stands for in arguments."""
        self._json[-1] = json

    def accept(self, literal: str, json: str | None = None) -> Reading[bool]:
        """Reads `literal`, if it follows, or what there is of it where the output was cut off. `json` as in `take_text`."""
        while True:
            there = self._text[self._position : self._position + len(literal)]
            if there == literal:
                self.take_text(len(literal), json)
                return True
            if not literal.startswith(there):
                return False
            if not (yield from self.more()):
                if self._cut:
                    self.take_text(len(there), "")
                return False

    def space(self) -> Reading[None]:
        """Read white space up to the next other character, or to the end of the output."""
        while True:
            self.match(_SPACE)
            if self._position < len(self._text) or not (yield from self.more()):
                return

    def until(self, stops: Sequence[str], most: int) -> Reading[str | None]:
        """Reads up to the first of `stops`, which stays unread, over `most` characters at most. None if there is none."""
        pattern = _any_of(tuple(stops))
        while True:
            found = pattern.search(self._text, self._position)
            if found is not None and found.start() - self._position <= most:
                return self.take_text(found.start() - self._position)
            if len(self._text) - self._position > most + max(map(len, stops)) or not (yield from self.more()):
                return None

    def rest(self, most: int) -> Reading[str | None]:
        """Reads everything up to the end of the text, over `most` characters at most. None if there is more."""
        while len(self._text) - self._position <= most:
            if not (yield from self.more()):
                return self.take_text(len(self._text) - self._position)
        return None

    def text_until(self, markers: Sequence[str], kind: Delta) -> Reading[str]:
        """Makes deltas of the text before the first of `markers`, and reads the marker with the white space before it. Returns the
        marker, or an empty string at the end of the text."""
        pattern, beginning = _any_of(tuple(markers)), _beginning_of(tuple(markers))
        while True:
            unread = self.unread
            found = pattern.search(unread)
            held = found or beginning.search(unread)
            end = held.start() if held is not None else len(unread)
            tail = unread[max(0, end - MAX_SPACE) : end]
            before = end - (len(tail) - len(tail.rstrip(_WHITE)))
            if before:
                text = self.take_text(before)
                self.emit(kind, text=text)
            if found is not None:
                self.take_text(found.end() - before)
                return found.group()
            if not (yield from self.more()):
                if rest := self.unread:
                    begun = rest.lstrip(_WHITE)
                    is_marker = self._cut and any(marker.startswith(begun) and 2 * len(begun) > len(marker) for marker in markers)
                    self.take_text(len(rest))
                    self.emit(kind, text="" if is_marker else rest)
                return ""

    # ---- events --------------------------------------------------------------------------------------------------------

    def json(self) -> str:
        """The JSON text that was read since the last call of this, or the last event."""
        text = "".join(self._json)
        self._json.clear()
        return text

    def emit(self, kind: Delta, text: str) -> None:
        """Add an event with `text`. Its source is all the text that is held, which is held no longer."""
        self.events.append(kind(text=text, source=self._release()))

    def emit_markup(self, kind: Delta = ContentDelta) -> None:
        """What is held, if anything, is no text."""
        if self._held:
            self.emit(kind, "")

    def give_up(self, *, announced: bool = True) -> None:
        """What is held is no call, or none that is whole. It is content; but the beginning of a call that was `announced`, and that was cut
        off with the output, is nothing that is shown."""
        if announced and self._cut and self._at_end:
            self.take_text(len(self._text) - self._position)
            self.emit_markup()
        elif text := self._release():
            self.events.append(ContentDelta(text=text, source=text))

    def settle(self) -> None:
        """What is held is content, unless it is white space."""
        if "".join(self._held).strip(_WHITE):
            self.give_up()
        self.emit_markup()

    def start_call(self, name: str, call_id: str | None = None, *, stream: bool = True) -> None:
        """What is held began a call. `stream`: the JSON text that is read from here on becomes deltas of the arguments at once."""
        self._num_calls += 1
        self.events.append(CallStarted(index=self._num_calls - 1, id=call_id or self._make_id(), name=name, source=self._release()))
        self._streams = stream

    def add_arguments(self, json: str) -> None:
        """More arguments, of what is held."""
        self.events.append(ArgumentsDelta(index=self._num_calls - 1, text=json, source=self._release()))

    def end_arguments(self) -> None:
        """What is read from here on is no part of arguments."""
        self._stream_arguments()
        self._streams = False

    def end_call(self, *, complete: bool, closed: bool = True) -> None:
        """`closed`: what is held ends the call; else it is content."""
        self.end_arguments()
        self.events.append(CallEnded(index=self._num_calls - 1, complete=complete, source=self._release() if closed else ""))
        self.give_up()

    def _stream_arguments(self) -> None:
        if self._streams and (json := self.json()):
            self.add_arguments(json)

    def _release(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        self._json.clear()
        return text


def random_id(chance: random.Random | None = None) -> str:
    """Nine letters and digits, as the templates of Mistral demand. `chance`: that of the system by default."""
    return "".join((chance or random.SystemRandom()).choices(string.ascii_letters + string.digits, k=9))


@lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)) or r"(?!)")


@lru_cache(maxsize=256)
def _beginning_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """The longest end of a text with which one of the markers could begin."""
    beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
    return re.compile(rf"(?:{'|'.join(map(re.escape, beginnings))})\Z" if beginnings else r"(?!)")


Tools = Mapping[str, Mapping[str, Any]]
"""Names of the tools that may be called, with the JSON schemas of their parameters."""
CallReader = Callable[[Source, Tools], Reading[bool]]
"""Reads what follows a marker and makes events of it. Whether it was what the marker announces; if not, what is held is content."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls of tools."""

    markers: Mapping[str, CallReader] = field(default_factory=dict)
    """What announces a call, wherever it stands. None is a part of another one."""
    start: CallReader | None = None
    """Reads the output from its start, where no marker announces a call."""
    whole: Callable[[Source, Tools], Reading[None]] | None = None
    """Reads the whole output, reasoning included, in place of all of these."""
    answer: str = ""
    """What a prompt goes on with, where the output is an answer alone."""
    special_tokens: bool = False
    """Whether markers are special tokens of the model, which are not to be left out of the text."""


class ReasoningFormat(NamedTuple):
    """The markers that a model writes around its reasoning."""

    opening: str
    closing: str
    special_tokens: bool = False  # as in `CallFormat`
    space: tuple[str, str] = ("", "")  # what models write before the closing, and behind it
    answer: str = ""
    """What comes between the closing and an answer. If there is something, a model begins every output with reasoning."""


def read_nothing(source: Source, tools: Tools) -> Reading[bool]:
    """A marker without meaning of its own."""
    return True
    yield


def tools_of(tools: object) -> dict[str, Mapping[str, Any]]:
    """The tools of a request, as chat templates take them: `{"function": {"name": ..., "parameters": ...}}`, or what is in it."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools if isinstance(tools, list | tuple) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            found[name] = parameters if isinstance(parameters, Mapping) else {}
    return found
