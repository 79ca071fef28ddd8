"""`NgramDrafter`: what followed the last tokens of a sequence when they came before, in its prompt or its output (prompt lookup).

Owns an index of each row's n-grams. Adding a token and looking one up take a time that does not grow with the length of a sequence.
"""

from __future__ import annotations

import numpy as np

from aengine.scheduler.drafter import Draft, DraftSource
from aengine.scheduler.plan import IntArray

NGRAM = 3
"""Tokens that must agree. Shorter matches are mostly chance."""
_LONGEST = 32  # of a match, in tokens: it need not be known more exactly
_MOST_CANDIDATES = 8  # places that are compared, the latest first
_MOST_NEW = 4096  # tokens of a prompt that are indexed in one call, so that no step waits long for it


class NgramDrafter:
    """Satisfies `Drafter`."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self._base = vocab_size
        self._indexes: list[_Index | None] = [None] * max_rows

    def assign(self, row: int) -> None:
        self._indexes[row] = None

    def propose(self, row: int, tokens: IntArray, most: int) -> Draft:
        index = self._indexes[row]
        if index is None:
            index = self._indexes[row] = _Index(self._base)
        index.extend(tokens)
        place = index.longest_match(tokens)
        return Draft(tokens[place : place + most].copy(), DraftSource.NGRAM)

    def observe(self, row: int, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        pass


class _Index:
    """Where each n-gram of a sequence ends: chains from its latest place to earlier ones, as LZ77 compressors keep them (RFC 1951, 4)."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._latest: dict[int, int] = {}  # n-gram -> the place behind it
        self._earlier: list[int] = [0] * NGRAM  # by place: the one before with the same n-gram; 0: none

    def extend(self, tokens: IntArray) -> None:
        """Index the n-grams that end before the last token of the sequence, for a while at most `_MOST_NEW` of them."""
        first, end = len(self._earlier), min(len(tokens), len(self._earlier) + _MOST_NEW)
        if end <= first:
            return
        part = tokens[first - NGRAM : end - 1].astype(np.int64)
        keys = np.zeros(end - first, np.int64)
        for offset in range(NGRAM):
            keys = keys * self._base + part[offset : offset + end - first]
        for place, key in enumerate(keys.tolist(), first):
            self._earlier.append(self._latest.get(key, 0))
            self._latest[key] = place

    def longest_match(self, tokens: IntArray) -> int:
        """The place in `tokens` behind the longest match of their end, of equal ones the latest; len(tokens) if there is none."""
        num_tokens = len(tokens)
        key = 0
        for token in tokens[-NGRAM:].tolist():
            key = key * self._base + token
        place = self._latest.get(key, 0) if num_tokens >= NGRAM else 0
        best, best_length = num_tokens, 0
        end = tokens[-_LONGEST:][::-1]
        for _ in range(_MOST_CANDIDATES):
            if not place:
                break
            before = tokens[max(0, place - _LONGEST) : place][::-1]
            length = len(before)
            differs = np.flatnonzero(before != end[:length])
            if len(differs):
                length = int(differs[0])
            if length > best_length:
                best, best_length = place, length
            place = self._earlier[place]
        return best
