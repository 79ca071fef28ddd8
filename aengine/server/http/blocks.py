"""The parts of an output, one behind the other: reasoning, texts and calls of tools, each opened, added to and closed.

For APIs whose streams number them. Knows none of those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from aengine.api.outputs import Token
from aengine.chat.events import ArgumentsDelta, CallEnded, CallStarted, Event, ReasoningDelta
from aengine.server.http.chat_output import Piece


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

    def add(self, text: str) -> None:
        self._texts.append(text)


class Change(NamedTuple):
    """What has happened to a block: it was opened, got more text, or was closed."""

    kind: Literal["opened", "added", "closed"]
    block: Block
    text: str = ""  # that was added
    tokens: Sequence[Token] = ()  # that made it


class Blocks:
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
        block.add(event.text)
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
