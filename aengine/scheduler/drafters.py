"""`Drafter`: what proposes tokens that may follow those of a sequence. The model then samples at all of their positions in one step
(target verify), so a draft decides only how fast an output comes.

`NgramDrafter` knows what followed the last tokens of a sequence when they came before, in its prompt or its output (prompt lookup), or in
those of a sequence that has ended. It owns an index of each row's n-grams; adding a token and looking one up take a time that does not grow
with the length of a sequence.
`ModelDrafter` stands for a smaller model, which runs beside the model in the runner. `BestOfBoth` takes n-grams where they are likely.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from aengine.api.outputs import DraftSource
from aengine.scheduler.plan import NO_INTS, IntArray

BY_MODEL = -1
"""Stands for a token that a draft model will propose, when the step that checks it is launched."""


class Draft(NamedTuple):
    token_ids: IntArray  # ids, or `BY_MODEL` alone; may be empty
    source: DraftSource
    acceptance: float = 0.5  # how likely a token of it is right if those before it are, as far as the drafter can tell

    @property
    def by_model(self) -> bool:
        return bool(self.token_ids[:1].tolist() == [BY_MODEL])

    def cut(self, length: int) -> Draft:
        """Returns a draft of the first `length` tokens, from the same source."""
        return self._replace(token_ids=self.token_ids[:length])


NO_DRAFT = Draft(NO_INTS, DraftSource.NGRAM)


class Drafter(Protocol):
    """Has a state for each row. Called by the scheduler, from its thread."""

    def assign(self, row: int, group: Hashable, context: IntArray = NO_INTS) -> None:
        """The row is assigned to another sequence. `group`: the sequences that may learn from each other, as their time tells. `context`:
        tokens that it may repeat."""

    def release(self, row: int, tokens: IntArray) -> None:
        """The sequence of the row has ended; `tokens` are all that it had, in memory of the caller's."""

    def propose(self, row: int, tokens: IntArray, most: int, *, by_model: bool = True) -> Draft:
        """Up to `most` tokens that may follow `tokens`, all of the sequence so far, which begin with those of the call before. Also called
        to learn whether there would be any. `by_model`: whether those of a draft model are wanted."""

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        """Tells how a draft fared: the row had `num_tokens` tokens when it was proposed, and `num_accepted` of its tokens were right. The
        scheduler also calls it for drafts that were not used, once the tokens in their place are known."""


_PRIOR_WEIGHT = 4.0  # a prior counts like so many decided tokens


class Acceptance:
    """A running estimate of how likely a drafted token is right if those before it are: the share of accepted ones of those that were
    decided, of which older ones count less."""

    def __init__(self, prior: float | None, memory: float = 64.0) -> None:
        """`memory`: of how many decided tokens it is the mean, about. The prior is forgotten like these; None: `given` is told it."""
        self._memory = memory
        self._decided = 0.0 if prior is None else _PRIOR_WEIGHT
        self._accepted = self._decided * (prior or 0.0)

    @property
    def value(self) -> float:
        return self._accepted / self._decided

    def given(self, prior: float) -> float:
        """The estimate with a prior that is known only now."""
        return (_PRIOR_WEIGHT * prior + self._accepted) / (_PRIOR_WEIGHT + self._decided)

    def add_drafts(self, num_drafts: int, num_accepted: int) -> None:
        decided = num_decided(num_drafts, num_accepted)
        kept = math.exp(-decided / self._memory)
        self._decided = kept * self._decided + decided
        self._accepted = kept * self._accepted + num_accepted


def num_decided(num_drafts: int, num_accepted: int) -> int:
    """Returns how many of `num_drafts` drafts, the first `num_accepted` of which were accepted, are known to be right or wrong. Drafts
    behind a rejected one say nothing."""
    return min(num_accepted + 1, num_drafts)


NGRAM = 3
"""Tokens that must agree. Shorter matches are mostly chance."""
_LONGEST = 32  # of a match, in tokens: it need not be known more exactly
_MOST_CANDIDATES = 8  # places that are compared, the latest first
_LENGTHS, _LIKELY = (5, 9), (0.4, 0.6, 0.8)
"""Matches shorter than the first, than the second, and longer ones: how likely what follows them is taken to be right at first."""
_MOST_PAST, _MOST_GROUPS = 1 << 15, 4
"""Tokens of sequences that have ended, before the older half of them goes, and groups that have some: at most 30 MB in all."""
_MOST_NEW = 4096  # tokens of a prompt that are indexed in one call, so that no step waits long for it


class NgramDrafter:
    """A `Drafter` that looks up the last tokens of a sequence in its prompt and output, and, where no long match is there, in its context
    and in the latest sequences of its group that have ended. It proposes what followed them."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self._base = vocab_size
        self._indexes: list[_Index | None] = [None] * max_rows
        self._groups: list[Hashable] = [None] * max_rows
        self._contexts: list[_Past | None] = [None] * max_rows
        self._past: OrderedDict[Hashable, _Past] = OrderedDict()  # by group, the one that was added to last at the end
        self._acceptance = [Acceptance(likely) for likely in (*_LIKELY, *_LIKELY)]  # of its own tokens, then of others'
        self._kinds = [0] * max_rows  # of the match of a row's latest draft, an index of these

    def assign(self, row: int, group: Hashable, context: IntArray = NO_INTS) -> None:
        self._indexes[row], self._groups[row], self._contexts[row] = None, group, None
        if len(context):
            self._contexts[row] = past = _Past(self._base)
            past.add_sequence(context)

    def release(self, row: int, tokens: IntArray) -> None:
        self._contexts[row] = None
        group = self._groups[row]
        past = self._past.pop(group) if group in self._past else _Past(self._base)
        past.add_sequence(tokens)
        self._past[group] = past
        if len(self._past) > _MOST_GROUPS:
            self._past.popitem(last=False)

    def propose(self, row: int, tokens: IntArray, most: int, *, by_model: bool = True) -> Draft:
        index = self._indexes[row]
        if index is None:
            index = self._indexes[row] = _Index(self._base)
        index.extend(tokens)
        source = tokens
        place, length = index.longest_match(tokens, tokens)
        kind = bisect.bisect(_LENGTHS, length)
        for past in (self._contexts[row], self._past.get(self._groups[row])):
            if past is None or length >= _LENGTHS[-1]:
                continue
            for others, places in past.parts():
                other_place, other_length = places.longest_match(others, tokens)
                if other_length > length:
                    source, place, length = others, other_place, other_length
                    kind = len(_LIKELY) + bisect.bisect(_LENGTHS, length)
        if not length:
            return NO_DRAFT
        self._kinds[row] = kind
        following = source[place : place + most].copy()
        if len(images := np.flatnonzero(following < 0)):  # what names one is no token that can be sampled
            following = following[: images[0]]
            if not len(following):
                return NO_DRAFT
        if len(following) < most and source is tokens:
            following = np.resize(following, most)  # where they reach the end, they go on as they began
        return Draft(following, DraftSource.NGRAM, self._acceptance[kind].value)

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        self._acceptance[self._kinds[row]].add_drafts(len(draft.token_ids), num_accepted)


class _Past:
    """The tokens of sequences that have ended, one sequence behind the other. A draft may run over the end of one; it is only wrong."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._tokens = np.empty(_MOST_PAST, np.int32)
        self._length = 0
        self._index = _Index(base)
        self._older: tuple[IntArray, _Index] | None = None

    def add_sequence(self, tokens: IntArray) -> None:
        """Add the last tokens of a sequence. Where there is no room, the older half of all goes."""
        tokens = tokens[-_MOST_PAST // 2 :]
        if self._length + len(tokens) > _MOST_PAST:
            self._older = self._tokens[: self._length], self._index
            self._tokens, self._length, self._index = np.empty(_MOST_PAST, np.int32), 0, _Index(self._base)
        self._tokens[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)

    def parts(self) -> Iterator[tuple[IntArray, _Index]]:
        """The tokens, the latest first, and where their n-grams are."""
        tokens = self._tokens[: self._length]
        self._index.extend(tokens)
        yield tokens, self._index
        if self._older is not None:
            yield self._older


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

    def longest_match(self, tokens: IntArray, looked_up: IntArray) -> tuple[int, int]:
        """The place in `tokens`, which were indexed, behind the longest match of the end of `looked_up`, of equal ones the latest, and its
        length; 0 if there is none."""
        if len(looked_up) < NGRAM:
            return 0, 0
        a, b, c = looked_up[-NGRAM:].tolist()
        place = self._latest.get((a * self._base + b) * self._base + c, 0)
        best = best_length = 0
        end = looked_up[: -_LONGEST - 1 : -1].tolist() if place else []
        for _ in range(_MOST_CANDIDATES):
            if not place or best_length == _LONGEST:
                break
            before = tokens[max(0, place - _LONGEST) : place][::-1].tolist()
            length = next((i for i, pair in enumerate(zip(before, end, strict=False)) if pair[0] != pair[1]), len(before))
            if length > best_length:
                best, best_length = place, length
            place = self._earlier[place]
        return best, best_length


class ModelDrafter:
    """A `Drafter` for tokens that the runner's draft model or heads propose. A draft holds `BY_MODEL` in place of ids, which are not known
    before the step is launched; its acceptance is that of all rows."""

    def __init__(self, source: DraftSource = DraftSource.MODEL) -> None:
        self._source = source
        self._acceptance = Acceptance(0.6)

    def assign(self, row: int, group: Hashable, context: IntArray = NO_INTS) -> None:
        pass

    def release(self, row: int, tokens: IntArray) -> None:
        pass

    def propose(self, row: int, tokens: IntArray, most: int, *, by_model: bool = True) -> Draft:
        if not by_model:
            return NO_DRAFT
        return Draft(np.full(most, BY_MODEL, np.int32), self._source, self._acceptance.value)

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        self._acceptance.add_drafts(len(draft.token_ids), num_accepted)


class BestOfBoth:
    """A `Drafter` that takes the n-gram draft of a row where it is at least as likely to be accepted as one of the model."""

    def __init__(self, ngram: NgramDrafter, model: ModelDrafter) -> None:
        self._ngram = ngram
        self._model = model

    def assign(self, row: int, group: Hashable, context: IntArray = NO_INTS) -> None:
        self._ngram.assign(row, group, context)
        self._model.assign(row, group, context)

    def release(self, row: int, tokens: IntArray) -> None:
        self._ngram.release(row, tokens)
        self._model.release(row, tokens)

    def propose(self, row: int, tokens: IntArray, most: int, *, by_model: bool = True) -> Draft:
        looked_up = self._ngram.propose(row, tokens, most)
        if not by_model:
            return looked_up
        drawn = self._model.propose(row, tokens, most)
        return looked_up if len(looked_up.token_ids) and looked_up.acceptance >= drawn.acceptance else drawn

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        drafter = self._ngram if draft.source is DraftSource.NGRAM else self._model
        drafter.observe(row, num_tokens, draft, num_accepted)
