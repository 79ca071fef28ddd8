"""How a model cuts text that its grammars force on it: learned from what it sampled, and until then as its tokenizer would.

The tokens of a forced text are not forced: a grammar allows every way to cut it. Knows nothing of grammars or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_TOKENS = 32
MOST_BYTES = 128  # of a text that is looked at
_MOST_ENTRIES = 10_000  # some 3 MB

Encode = Callable[[int, bytes], Sequence[int]]
"""The likely ids of a text that follows a token; none if it cannot be told."""


class ForcedText:
    def __init__(self) -> None:
        self._next: dict[tuple[int, bytes], int] = {}  # by the token before a text, and the text: its first token

    def tokens(self, before: int, text: bytes, texts: Sequence[bytes], encode: Encode) -> list[int]:
        """The likely tokens, `MOST_TOKENS` at most, of a text that must follow the token `before`. `texts`: of all ids."""
        found: list[int] = []
        encoded = False
        while text and len(found) < MOST_TOKENS:
            token = self._next.get((before, text))
            if token is None:
                if encoded:
                    break
                encoded = True
                start, rest = before, text
                for token in encode(before, text):
                    self._next.setdefault((start, rest), token)
                    start, rest = token, rest[len(texts[token]) :]
                continue
            found.append(token)
            before, text = token, text[len(texts[token]) :]
        return found

    def learn(self, before: int, text: bytes, token: int) -> None:
        """Where `text` had to follow, `token` was sampled, which may go beyond the text."""
        if len(self._next) >= _MOST_ENTRIES:
            self._next.clear()
        self._next[before, text] = token
