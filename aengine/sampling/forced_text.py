"""How a model cuts text that its grammars force on it, and what it writes behind it: learned from what was sampled, and until then as its
tokenizer cuts the text.

The tokens of a forced text are not forced: a grammar allows every way to cut it. Knows nothing of grammars or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

MOST_BYTES = 128  # of a text that is looked at
_MOST_TOKENS = 16
_MOST_BEHIND = 3  # tokens behind a text: the punctuation of JSON, where a grammar allows white space too
_MOST_ENTRIES = 10_000  # some 3 MB
_SURE, _MOST_SURE = 2, 3  # how often a token was seen, less how often another one was

Encode = Callable[[int, bytes], Sequence[int]]
"""The likely ids of a text that follows a token; none if it cannot be told."""


class Place(NamedTuple):
    """In a forced text or behind it."""

    text: bytes = b""  # all of it
    rest: bytes = b""  # what must come next
    num_behind: int = 0  # tokens since its end, the one it ended in included

    @property
    def key(self) -> bytes:
        """What tells it from other places; empty if that is of no interest."""
        if self.rest or not 0 < self.num_behind <= _MOST_BEHIND:
            return self.rest
        return self.text + b"\xff" * self.num_behind  # 0xff is in no UTF-8

    def forced(self, text: bytes) -> Place:
        """Of the text that a grammar says must come next, here."""
        return Place(self.text if self.rest else text, text) if text else self

    def behind(self, token: bytes) -> Place:
        """The place behind a token, by its text."""
        rest = self.rest[len(token) :] if token else b""
        return Place(self.text, rest, 0 if rest else self.num_behind + 1)


class ForcedText:
    def __init__(self) -> None:
        self._next: dict[tuple[int, bytes], tuple[int, int]] = {}  # by the token before, and the place: the next token, how sure it is

    def tokens(self, before: int, place: Place, texts: Sequence[bytes], encode: Encode) -> list[int]:
        """The likely tokens, `_MOST_TOKENS` at most, that follow the token `before`. `texts`: of all ids."""
        found: list[int] = []
        encoded = False
        while len(found) < _MOST_TOKENS and (key := place.key):
            token, sure = self._next.get((before, key), (-1, 0))
            if token < 0 and place.rest and not encoded:
                encoded = True
                start, rest = before, place.rest
                for token in encode(start, rest):
                    self._next.setdefault((start, rest), (token, 1))
                    start, rest = token, rest[len(texts[token]) :]
                continue
            if token < 0 or (not place.rest and sure < _SURE):
                break
            found.append(token)
            before, place = token, place.behind(texts[token])
        return found

    def learn(self, before: int, place: Place, token: int) -> None:
        """The token that was sampled at a place, behind the token `before`."""
        if not (key := place.key):
            return
        if len(self._next) >= _MOST_ENTRIES:
            self._next.clear()
        known, sure = self._next.get((before, key), (token, 0))
        if known == token:
            self._next[before, key] = token, min(sure + 1, _MOST_SURE)
        else:
            self._next[before, key] = (known, sure - 1) if sure > 1 else (token, 1)
