"""One answer, as events, and what is said about it at its end; and answers to questions from flags or stdin, for pipes and scripts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aengine.api.outputs import FinishReason, Usage
from aengine.chat import ArgumentsDelta, CallEnded, CallStarted, ChatMessage, ContentDelta, Event
from aengine.terminal.conversation import ChatParameters, Conversation
from aengine.terminal.partners import Partner

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


@dataclass
class Chat:
    """A conversation, the partner that answers it, the parameters of its answers, and the tools that they may call."""

    partner: Partner
    conversation: Conversation
    parameters: ChatParameters
    tools: Sequence[Mapping[str, Any]] | None = None


class View(Protocol):
    """Where the events of an answer are shown."""

    def add_event(self, event: Event) -> None: ...

    def finish(self) -> None:
        """Show what is not shown yet. Nothing more comes."""


class Answer:
    """The answer to the unanswered exchange of a conversation; the request is submitted when it is first read. An async context manager,
    which cancels what still runs."""

    def __init__(self, chat: Chat) -> None:
        """Raises what `Partner.ask` raises."""
        self._output = chat.partner.ask(chat.conversation, chat.parameters, chat.tools)
        self._submitted = time.monotonic()
        self._first: float | None = None  # when the first event came
        self._latest = 0.0

    @property
    def message(self) -> ChatMessage:
        """The message of the assistant, as far as it came."""
        return self._output.message

    @property
    def finish_reason(self) -> FinishReason | None:
        """None for an answer that was stopped."""
        return self._output.finish_reason

    @property
    def usage(self) -> Usage:
        return self._output.usage

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._output:
            self._latest = time.monotonic()
            self._first = self._first or self._latest
            yield event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self._output.aclose()

    def facts(self) -> dict[str, Any]:
        """For programs: seconds, counts of tokens, and why it ended."""
        usage = self.usage
        facts: dict[str, Any] = {
            "finish_reason": self.finish_reason.value if self.finish_reason is not None else None,
            "prompt_tokens": usage.prompt_tokens,
            "cached_prompt_tokens": usage.cached_prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
        }
        if usage.drafts:
            facts |= {"draft_tokens": usage.draft_tokens, "accepted_draft_tokens": usage.accepted_draft_tokens}
        if self._first is not None:
            facts |= {"first_token_seconds": self._first - self._submitted, "decode_seconds": self._decode_seconds}
        return facts

    @property
    def _decode_seconds(self) -> float:
        """From the first token to the latest: where the engine says it, without the time of showing them."""
        seconds = self._output.timing.decode
        return seconds if seconds is not None else self._latest - (self._first or self._latest)

    def describe(self) -> str:
        """Describes the answer in one line for people: tokens, speed, time to the first token, and why it ended if that is unusual."""
        usage, reason = self.usage, self.finish_reason
        parts = [f"{usage.completion_tokens} token{'' if usage.completion_tokens == 1 else 's'}"]
        if usage.reasoning_tokens:
            parts[0] += f" ({usage.reasoning_tokens} of reasoning)"
        if self._first is not None:
            if usage.completion_tokens > 1 and self._decode_seconds > 0:
                parts.append(f"{(usage.completion_tokens - 1) / self._decode_seconds:.0f}/s")
            parts.append(f"first after {(self._first - self._submitted) * 1000:.0f} ms")
        if usage.prompt_tokens:
            parts.append(
                f"prompt {usage.prompt_tokens}" + (f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else "")
            )
        if usage.drafts:
            parts.append(f"{usage.accepted_draft_tokens} of {usage.draft_tokens} drafts accepted")
        if reason is None:
            parts.append("stopped")
        elif reason not in _ORDINARY:
            parts.append(f"ended by {reason.value}")
        return ", ".join(parts)


def printable(text: str) -> str:
    """Without what a model must not send to a terminal, such as the beginnings of escape sequences."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: None if code == 0x0D else 0xFFFD for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}
_ORDINARY = (FinishReason.EOS, FinishReason.STOP_STRING, FinishReason.STOP_TOKEN)


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
