"""`ChatParser`: the text of an output, piece by piece, to events. Knows nothing of engines, tokens or requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aengine.chat.formats import CALLS, REASONING, ChatFormat
from aengine.chat.json_calls import read_named
from aengine.chat.text_source import (
    CallFormat,
    ContentDelta,
    Event,
    Reading,
    ReasoningDelta,
    ReasoningFormat,
    Source,
    Tools,
    random_id,
    tools_of,
)

_NAME = '"name"'
_BEGINNINGS = ('{"name"', '[{"name"', '{"type":"function"')
"""How a call begins that no marker announces, without white space."""


class ChatParser:
    """Parses one output. It never raises, and loses nothing: what is no whole marker or call is content, unless the output was cut
    off within it, and the sources of all events add up to the text. How the text is cut changes the deltas, and not what they add up to.

    White space beside markers belongs to them.
    """

    def __init__(
        self,
        format: ChatFormat,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        opened: bool = False,
        structured: bool = False,
        only: str | None = None,
        make_id: Callable[[], str] = random_id,
    ) -> None:
        """`tools`: as a chat template takes them; without any, an output has no calls. `opened`: the output begins within reasoning, since
        the prompt opened it. `structured`: reasoning comes only at the start, since what follows matches a grammar. `only`: the content is
        the arguments of this tool, and nothing else. `make_id`: of a call; random by default.
        """
        known = tools_of(tools)
        calls = CALLS[format.calls]
        if only is not None:
            name = only
            calls = CallFormat(start=lambda source, _: read_named(source, name))
        elif not known and calls.whole is None:
            calls = CALLS[""]
        self._source = Source(make_id)
        self._reading: Reading[None] | None = (
            calls.whole(self._source, known)
            if calls.whole is not None
            else _read(self._source, calls, REASONING[format.reasoning], known, opened, structured)
        )

    def feed(self, text: str) -> list[Event]:
        """The events that are certain with more text."""
        self._source.feed(text)
        return self._read_on()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The events at the end of the text. `cut`: it ended before the model had ended it, so what it began to call is no content."""
        self._source.finish(cut=cut)
        return self._read_on()

    def _read_on(self) -> list[Event]:
        if self._reading is not None and next(self._reading, self) is self:
            self._reading = None
        events, self._source.events = self._source.events, []
        return events


def _read(
    source: Source, calls: CallFormat, reasoning: ReasoningFormat | None, tools: Tools, opened: bool, structured: bool
) -> Reading[None]:
    if reasoning is not None and not opened and structured:
        yield from source.space()
        opened = yield from source.accept(reasoning.opening)
        if not opened:
            source.give_up(announced=False)
    if opened and reasoning is not None:
        yield from _read_reasoning(source, reasoning)
    reasoning = None if structured else reasoning
    markers = [*calls.markers, *((reasoning.opening,) if reasoning is not None else ())]
    at_start = True
    while True:
        if at_start and calls.start is not None:
            if (yield from calls.start(source, tools)):
                yield from _skip_space(source)
            else:
                source.give_up(announced=structured or _begins_call(source.held + source.unread, tools))
        marker = yield from source.text_until(markers, ContentDelta)
        if not marker:
            return
        at_start = reasoning is not None and marker == reasoning.opening
        if reasoning is not None and at_start:
            yield from _read_reasoning(source, reasoning)
        elif (yield from calls.markers[marker](source, tools)):
            source.emit_markup()
            yield from _skip_space(source)
        else:
            source.give_up()


def _begins_call(text: str, tools: Tools) -> bool:
    """Whether a text that was cut off was to become a call, where no marker announces calls."""
    text = "".join(text.split())
    if _NAME in text or text.startswith((_BEGINNINGS[-1], *(f"[{name}(" for name in tools))):
        return True
    return len(text) > 1 and any(beginning.startswith(text) for beginning in _BEGINNINGS)


def _read_reasoning(source: Source, reasoning: ReasoningFormat) -> Reading[None]:
    yield from source.space()
    source.emit_markup(ReasoningDelta)
    if (yield from source.text_until((reasoning.closing,), ReasoningDelta)):
        yield from source.space()
        yield from source.accept(reasoning.answer)
    source.emit_markup(ReasoningDelta)
    yield from _skip_space(source)


def _skip_space(source: Source) -> Reading[None]:
    yield from source.space()
    source.emit_markup()
