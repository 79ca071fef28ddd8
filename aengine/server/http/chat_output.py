"""The parts of an output, one behind the other: reasoning, texts and calls of tools, each opened, added to and closed.

For APIs whose streams number them. Knows none of those.

Outputs of generations for all APIs: what is read together of a sequence, why it ended, and how many tokens there were; the choices of a
whole response as JSON, one by one, since with logprobs all of them can take seconds, and more bytes than may be sent; and the chunks of a
stream of completions, in OpenAI's shape. These run per token, so what does not change is written once.

Logprobs in the two shapes of OpenAI's, and the bytes of single tokens, which both show.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple

from aengine.api.dataclass import dataclass
from aengine.api.engine import ServedEngine
from aengine.api.outputs import FinishReason, Token, TokenLogprob, Usage
from aengine.chat.text_source import ArgumentsDelta, CallEnded, CallStarted, ContentDelta, Event, ReasoningDelta
from aengine.server.core.errors import ServiceError
from aengine.server.core.generation import Generation
from aengine.server.http.http_errors import to_json


class TokenTexts:
    """The bytes that tokens stand for, each by itself. They must be learned before they are asked for."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._known: dict[int, bytes] = {}

    async def learn(self, tokens: Iterable[Token | TokenLogprob | None]) -> None:
        """Ask the engine for the bytes of tokens and of their alternatives that are not known yet."""
        ids: set[int] = set()
        for token in tokens:
            if token is not None:
                ids.update((token.token_id,) if token.token_id >= 0 else (), token.top_logprobs or ())
        await self.learn_ids(ids)

    async def learn_ids(self, token_ids: Iterable[int]) -> None:
        missing = set(token_ids) - self._known.keys()
        if missing:
            self._known |= await self._engine.token_bytes(missing)

    def bytes_of(self, token_id: int) -> bytes:
        return self._known[token_id]

    def text_of(self, token_id: int) -> str:
        """What is no character by itself becomes U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        """The text, or `bytes:\\xe2\\x80` for a token that is no character by itself, so that tokens stay apart."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokens: Iterable[Token | TokenLogprob], texts: TokenTexts, *, with_ids: bool) -> list[dict[str, Any]]:
    """Logprobs in the shape of OpenAI's chat completions: an entry for each token that has one. `with_ids`: whether entries have the
    token's id beside its text, which is ours."""
    entries = []
    for token in tokens:
        if token.logprob is None or token.token_id < 0:
            continue
        entry = _chat_entry(token.token_id, token.logprob, texts, with_ids)
        entry["top_logprobs"] = [_chat_entry(*one, texts, with_ids) for one in (token.top_logprobs or {}).items()]
        entries.append(entry)
    return entries


def _chat_entry(token_id: int, logprob: float, texts: TokenTexts, with_ids: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"token": texts.text_of(token_id), "logprob": _finite(logprob), "bytes": list(texts.bytes_of(token_id))}
    if with_ids:
        entry["token_id"] = token_id
    return entry


class CompletionLogprobs:
    """The columns of completions, piece by piece: `text_offset` counts the characters of one sequence from its start."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0

    def columns(self, tokens: Sequence[Token | TokenLogprob | tuple[int]], top: int) -> dict[str, Any]:
        """The logprobs of the next tokens, in the shape of OpenAI's completions. A tuple is a token without logprobs. With `top`
        alternatives asked for, the token itself is among them."""
        names: list[str] = []
        logprobs: list[float | None] = []
        alternatives: list[Mapping[str, float] | None] = []
        offsets: list[int] = []
        for token in tokens:
            token_id = token[0] if isinstance(token, tuple) else token.token_id
            if token_id < 0:
                continue
            logprob = None if isinstance(token, tuple) or token.logprob is None else _finite(token.logprob)
            name = self._texts.name_of(token_id)
            names.append(name)
            offsets.append(self._offset)
            self._offset += len(self._texts.text_of(token_id))
            logprobs.append(logprob)
            if isinstance(token, tuple) or logprob is None:
                alternatives.append(None)
                continue
            found: dict[str, float] = {}
            for one, value in (token.top_logprobs or {}).items():
                found.setdefault(self._texts.name_of(one), _finite(value))  # of equal names the likeliest
            if top:
                found.setdefault(name, logprob)
            alternatives.append(found)
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": alternatives if top else None, "text_offset": offsets}


def prompt_entries(entries: Sequence[TokenLogprob | None], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """Ours, those of a prompt; the first token has none."""
    return [None if entry is None else chat_logprobs((entry,), texts, with_ids=True)[0] for entry in entries]


def _finite(logprob: float) -> float:
    """JSON has no infinity. OpenAI writes so for what is impossible."""
    return logprob if logprob > -9999.0 else -9999.0


@dataclass(eq=False, slots=True)
class Block:
    """One part of the output, as far as it is known."""

    kind: Literal["reasoning", "text", "call"]
    index: int  # in the output
    call_id: str = ""
    name: str = ""  # of the tool that is called
    is_whole: bool | None = None  # whether nothing of it is missing; None as long as it is open
    tokens: list[Token] = field(default_factory=list)  # that made its text, where they are wanted
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; of a call its arguments, as JSON."""
        return "".join(self._texts)

    def add_text(self, text: str) -> None:
        self._texts.append(text)


class Change(NamedTuple):
    """What has happened to a block: it was opened, got more text, or was closed."""

    kind: Literal["opened", "added", "closed"]
    block: Block
    text: str = ""  # that was added
    tokens: Sequence[Token] = ()  # that made it


class ContentBlocks:
    """The blocks of one sequence. `with_tokens`: whether they are to know their tokens."""

    def __init__(self, *, with_tokens: bool = False) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._with_tokens = with_tokens
        self._tokens: deque[tuple[int, Token]] = deque()  # that no block has, with where in the output they begin
        self._num_read = 0  # characters of these tokens and those before
        self._num_parsed = 0  # characters of the events

    def read(self, piece: Piece) -> Iterator[Change]:
        """The changes that come of what was read of the sequence."""
        if self._with_tokens:
            for token in piece.tokens:
                self._tokens.append((self._num_read, token))
                self._num_read += len(token.text)
        for event in piece.events:
            yield from self._take(event)
        if piece.last.finish_reason is not None:
            yield from self._close(not piece.last.finish_reason.cuts)

    def _take(self, event: Event) -> Iterator[Change]:
        tokens = self._tokens_of(event)
        if isinstance(event, CallStarted):
            yield from self._close(True)
            yield self._begin(Block("call", len(self.all), event.id, event.name))
            return
        if isinstance(event, CallEnded):
            yield from self._close(event.complete)
            return
        if not event.text:
            return
        block = self._open
        if not isinstance(event, ArgumentsDelta):  # those are of the call that is open
            kind: Literal["reasoning", "text"] = "reasoning" if isinstance(event, ReasoningDelta) else "text"
            if block is None or block.kind != kind:
                yield from self._close(True)
                block = Block(kind, len(self.all))
                yield self._begin(block)
        assert block is not None
        block.add_text(event.text)
        block.tokens += tokens
        yield Change("added", block, event.text, tokens)

    def _begin(self, block: Block) -> Change:
        self.all.append(block)
        self._open = block
        return Change("opened", block)

    def _close(self, whole: bool) -> Iterator[Change]:
        block, self._open = self._open, None
        if block is not None:
            block.is_whole = whole
            yield Change("closed", block)

    def _tokens_of(self, event: Event) -> list[Token]:
        """The tokens that begin in the piece of the output of which `event` was made."""
        self._num_parsed += len(event.source)
        tokens = []
        while self._tokens and self._tokens[0][0] < self._num_parsed:
            tokens.append(self._tokens.popleft()[1])
        return tokens


FINISH_REASONS: Mapping[FinishReason, str] = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.REPETITION: "repetition",
    FinishReason.DEADLINE: "length",
    FinishReason.CANCELLED: "stop",
    FinishReason.ERROR: "stop",
}
"""In OpenAI's words, and vLLM's for repetition, which only requests that ask for it get."""
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
        read, note, most = generation.reader(), generation.note_tokens, generation.most_at_once
        while tokens := await read(most):  # for every token of every stream: what is added here is paid often
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


def receipts_of(generations: Sequence[Generation]) -> list[str]:
    """The receipts of generations that were read to their ends, where they were asked for."""
    return [receipt for generation in generations if (receipt := generation.receipt()) is not None]


def with_receipts(generations: Sequence[Generation]) -> dict[str, Any]:
    """The field of a response that has these; none where they were not asked for."""
    return {"receipts": receipts} if (receipts := receipts_of(generations)) else {}


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
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_prompt_tokens,
            "image_tokens": usage.image_tokens,
            "rewritten_tokens": usage.rewritten_tokens,
            "loaded_tokens": usage.loaded_prompt_tokens,
        },
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

    def end_events(self, receipts: Sequence[str] = ()) -> bytes:
        """The last events. Chunks with the receipts and with the usage have no choice."""
        told = self._head + b'],"receipts":' + to_json(receipts) + b"}\n\n" if receipts else b""
        return told + (self._head + self._usage() if self._asked.include_usage else b"") + DONE

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
