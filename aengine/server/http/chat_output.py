"""Outputs of generations for all APIs: what is read together of a sequence, why it ended, and how many tokens there were; the choices of a
whole response as JSON, one by one, since with logprobs all of them can take seconds, and more bytes than may be sent; and the chunks of a
stream of completions, in OpenAI's shape. These run per token, so what does not change is written once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aengine.api.outputs import FinishReason, Token, Usage
from aengine.chat.events import ArgumentsDelta, CallStarted, ContentDelta, Event, ReasoningDelta
from aengine.server.core.errors import ServiceError
from aengine.server.core.generation import READ_TOKENS, Generation
from aengine.server.http.errors import to_json
from aengine.server.http.logprobs import TokenTexts

FINISH_REASONS: Mapping[FinishReason, str] = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.DEADLINE: "length",
    FinishReason.CANCELLED: "stop",
    FinishReason.ERROR: "stop",
}
"""In OpenAI's words."""
_OURS = (FinishReason.DEADLINE, FinishReason.CANCELLED)


@dataclass(slots=True)
class Piece:
    """What was read together of one sequence."""

    index: int
    tokens: Sequence[Token]  # a closing one has the id -1
    events: Sequence[Event]  # of an output that is parsed
    last: Token  # has the finish reason, if the sequence has ended

    @property
    def text(self) -> str:
        return "".join([token.text for token in self.tokens])

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens if token.token_id >= 0]


class OutputReader:
    """Reads a generation, and parses its output if it is to be. `texts` learns its tokens, where their bytes are shown."""

    def __init__(self, generation: Generation, texts: TokenTexts | None = None) -> None:
        self.generation = generation
        self._texts = texts
        self._knows_prompt = False

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What there is to read, whenever there is something; a piece for each sequence that brought something."""
        generation = self.generation
        read, note = generation.stream.read, generation.note
        while tokens := await read(READ_TOKENS):  # for every token of every stream: what is added here is paid often
            note(tokens)
            if self._texts is not None:
                await self._learn(self._texts, tokens)
            if len(tokens) == 1:
                yield [self._piece(tokens)]
                continue
            runs: dict[int, list[Token]] = {}
            for token in tokens:
                runs.setdefault(token.index, []).append(token)
            yield [self._piece(run) for run in runs.values()]

    async def _learn(self, texts: TokenTexts, tokens: Sequence[Token]) -> None:
        if not self._knows_prompt:
            self._knows_prompt = True
            await texts.learn(self.generation.stream.completion().prompt_logprobs or ())
        await texts.learn(tokens)

    def _piece(self, run: Sequence[Token]) -> Piece:
        last = run[-1]
        return Piece(last.index, run, self.generation.parse(run) if self.generation.prepared is not None else (), last)

    def usage(self) -> dict[str, Any]:
        """The token counts so far, in the shape of OpenAI's `usage`."""
        return usage_of(self.generation.stream.usage)


def usage_of(usage: Usage) -> dict[str, Any]:
    """Token counts in the shape of OpenAI's `usage`."""
    details: dict[str, Any] = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.drafts:
        details["accepted_prediction_tokens"] = usage.accepted_draft_tokens
        details["rejected_prediction_tokens"] = usage.draft_tokens - usage.accepted_draft_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        "completion_tokens_details": details,
    }


def stop_reason_of(reason: FinishReason | None, matched: int | str | None) -> int | str | None:
    """The stop string or token that matched, or our own name for an end that OpenAI has no word for."""
    return reason.value if reason in _OURS else matched


async def write_choices(
    response: Mapping[str, Any], choices: Iterable[Callable[[], dict[str, Any]]], *, apart: bool, max_bytes: int
) -> bytes:
    """`response`, with what `choices` give. `apart`: they are built in a thread, since they are large. Raises `ServiceError`
    (ANSWER_TOO_LARGE)."""
    written, num_bytes = [], 0
    for build in choices:
        choice = await asyncio.to_thread(lambda build=build: to_json(build())) if apart else to_json(build())  # type: ignore[misc]
        num_bytes += len(choice)
        if num_bytes > max_bytes:
            raise ServiceError("ANSWER_TOO_LARGE", f"the answer takes more than {max_bytes} bytes in one message")
        written.append(choice)
    return to_json(response)[:-1] + b',"choices":[' + b",".join(written) + b"]}"


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
