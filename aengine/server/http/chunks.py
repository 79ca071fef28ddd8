"""The chunks of a stream of completions, in OpenAI's shape. They run per token, so what does not change is written once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aengine.chat.events import ArgumentsDelta, CallStarted, ContentDelta, Event, ReasoningDelta
from aengine.server.http.errors import to_json

DONE = b"data: [DONE]\n\n"
quote = json.encoder.encode_basestring
"""A text as JSON, without escapes that it does not need."""
_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class StreamAsked:
    """What a client wants of a stream."""

    include_usage: bool = False  # in a last chunk; null in all others
    continuous_usage: bool = False  # so far, in every chunk


class Chunks:
    """Writes events of one response. `count` gives the usage so far, in OpenAI's shape."""

    def __init__(
        self, kind: str, response_id: str, created: int, model: str, asked: StreamAsked, count: Callable[[], dict[str, Any]]
    ) -> None:
        head = {"id": response_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._asked = asked
        self._count = count
        self._tail = b'],"usage":null}\n\n' if asked.include_usage else b"]}\n\n"

    def choice(
        self,
        index: int,
        body: str,
        logprobs: Any = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        ours: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with one choice. `body`: `"delta":{...}` or `"text":...`, JSON; `ours`: more fields of the choice."""
        shown = "null" if logprobs is None else _dump(logprobs)
        text = f'{{"index":{index},{body},"logprobs":{shown},"finish_reason":'
        text += "null" if finish_reason is None else f'"{finish_reason}","stop_reason":{_dump(stop_reason)}'
        if ours:
            text += "," + _dump(ours)[1:-1]
        tail = self._usage() if self._asked.continuous_usage else self._tail
        return self._head + text.encode("utf-8", "replace") + b"}" + tail

    def end(self) -> bytes:
        """The last events. The chunk with the usage has no choice."""
        return (self._head + self._usage() if self._asked.include_usage else b"") + DONE

    def _usage(self) -> bytes:
        return b'],"usage":' + to_json(self._count()) + b"}\n\n"


def delta_of(events: Sequence[Event], role: bool) -> str:
    """`"delta":{...}` of events that came together. `role`: whether it is the first of its sequence."""
    if len(events) == 1 and not role and isinstance(event := events[0], ContentDelta):
        return f'"delta":{{"content":{quote(event.text)}}}'  # most often
    content = "".join([event.text for event in events if isinstance(event, ContentDelta)])
    reasoning = "".join([event.text for event in events if isinstance(event, ReasoningDelta)])
    delta: dict[str, Any] = {"role": "assistant", "content": content} if role else {"content": content} if content else {}
    if reasoning:
        delta["reasoning_content"] = reasoning
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallStarted):
            calls.append({"index": event.index, "id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}})
        elif isinstance(event, ArgumentsDelta):
            if not calls or calls[-1]["index"] != event.index:
                calls.append({"index": event.index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += event.text
    if calls:
        delta["tool_calls"] = calls
    return f'"delta":{_dump(delta)}'
