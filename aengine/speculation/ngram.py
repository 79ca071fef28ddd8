"""`NgramDrafter`: what followed the last tokens of a sequence when they came before, in its prompt or its output (prompt lookup).

Owns an index of each row's n-grams. Adding a token and looking one up take a time that does not grow with the length of a sequence.
"""

from __future__ import annotations

import bisect

import numpy as np

from aengine.scheduler.drafter import NO_DRAFT, Acceptance, Draft, DraftSource
from aengine.scheduler.plan import IntArray

NGRAM = 3
"""Tokens that must agree. Shorter matches are mostly chance."""
_LONGEST = 32  # of a match, in tokens: it need not be known more exactly
_MOST_CANDIDATES = 8  # places that are compared, the latest first
_LENGTHS, _LIKELY = (5, 9), (0.4, 0.6, 0.8)
"""Matches shorter than the first, than the second, and longer ones: how likely what follows them is taken to be right at first."""
_MOST_NEW = 4096  # tokens of a prompt that are indexed in one call, so that no step waits long for it


class NgramDrafter:
    """Satisfies `Drafter`."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self._base = vocab_size
        self._indexes: list[_Index | None] = [None] * max_rows
        self._acceptance = [Acceptance(likely) for likely in _LIKELY]
        self._kinds = [0] * max_rows  # of the match of a row's latest draft, an index of these

    def assign(self, row: int) -> None:
        self._indexes[row] = None

    def propose(self, row: int, tokens: IntArray, most: int, *, by_model: bool = True) -> Draft:
        index = self._indexes[row]
        if index is None:
            index = self._indexes[row] = _Index(self._base)
        index.extend(tokens)
        place, length = index.longest_match(tokens)
        if not length:
            return NO_DRAFT
        kind = self._kinds[row] = bisect.bisect(_LENGTHS, length)
        following = tokens[place : place + most].copy()
        if len(following) < most:
            following = np.resize(following, most)  # where they reach the end, they go on as they began
        return Draft(following, DraftSource.NGRAM, self._acceptance[kind].value)

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        self._acceptance[self._kinds[row]].add(len(draft.token_ids), num_accepted)


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
        base, earlier, latest = self._base, self._earlier, self._latest
        ids = tokens[first - NGRAM : end - 1].tolist()
        for place, (a, b, c) in enumerate(zip(ids, ids[1:], ids[2:], strict=False), first):
            key = (a * base + b) * base + c
            earlier.append(latest.get(key, 0))
            latest[key] = place

    def longest_match(self, tokens: IntArray) -> tuple[int, int]:
        """The place in `tokens` behind the longest match of their end, of equal ones the latest, and its length; 0 if there is none."""
        if len(tokens) < NGRAM:
            return 0, 0
        a, b, c = tokens[-NGRAM:].tolist()
        place = self._latest.get((a * self._base + b) * self._base + c, 0)
        best = best_length = 0
        end = tokens[: -_LONGEST - 1 : -1].tolist() if place else []
        for _ in range(_MOST_CANDIDATES):
            if not place or best_length == _LONGEST:
                break
            before = tokens[max(0, place - _LONGEST) : place][::-1].tolist()
            length = next((i for i, pair in enumerate(zip(before, end, strict=False)) if pair[0] != pair[1]), len(before))
            if length > best_length:
                best, best_length = place, length
            place = self._earlier[place]
        return best, best_length
