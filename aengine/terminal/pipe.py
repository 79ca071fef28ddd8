"""Questions from flags or stdin, answers to stdout: for pipes and scripts. Needs nothing of a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from aengine.chat import ArgumentsDelta, CallEnded, CallStarted, ContentDelta, Event
from aengine.terminal.answers import Answer, Chat, View, printable


class PlainView:
    """Writes the text of an answer as it comes, and each call of a tool as a line."""

    def __init__(self) -> None:
        self._at_start = True  # of a line
        self._is_terminal = sys.stdout.isatty()

    def add_event(self, event: Event) -> None:
        if isinstance(event, ContentDelta | ArgumentsDelta):
            self._write(event.text)
        elif isinstance(event, CallStarted):
            self.finish()
            self._write(f"{event.name} ")
        elif isinstance(event, CallEnded):
            self.finish()

    def finish(self) -> None:
        if not self._at_start:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._at_start = text.endswith("\n")
            print(printable(text) if self._is_terminal else text, end="", flush=True)


async def answer_all(chat: Chat, questions: Sequence[str], make_view: Callable[[], View] | None) -> None:
    """Ask one after the other, in one conversation. Without `make_view` each answer is a line of JSON. Raises what an answer raises, when
    what came of it is shown."""
    for question in questions:
        chat.conversation.ask(question)
        view = None if make_view is None else make_view()
        async with Answer(chat) as answer:
            try:
                async for event in answer:
                    if view is not None:
                        view.add_event(event)
            finally:
                if view is not None:
                    view.finish()
        message = answer.message.as_dict()
        chat.conversation.answer(message)
        if view is None:
            print(json.dumps({**message, **answer.facts()}, ensure_ascii=False), flush=True)
