"""`DraftLengths`: how many drafts pay, so that speculation gains where it can and loses next to nothing where it cannot.

Owns what is measured for it: how often the drafts of each row were accepted, and how long steps take. Knows nothing of pages or plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.scheduler.drafter import Draft, num_decided
from aengine.scheduler.plan import IntArray

_MEMORY = 0.85  # of an average of seconds: what the past counts
_ROW_MEMORY = 16.0  # decided drafts of a row; what its drafter says of a draft counts like _PRIOR of them
_PRIOR = 4.0
_TRIED = 2  # drafts of a row when some are only tried
_FOR_TRYING = 0.01  # of the time
_FIRST_STEPS, _MOST_STEPS, _TRIAL_STEPS = 8, 32, 2  # the credit at first, at most, and where something is tried, in steps without drafts
_FIRST_LOOK, _LAST_LOOK = 32, 512  # after so many steps with drafts steps without are measured again


class StepKind(NamedTuple):
    """Steps whose seconds are comparable."""

    processed: bool  # logits of some rows are processed
    by_model: bool = False  # some drafts are those of a model


class DraftLengths:
    """There is a credit of seconds. Each step with drafts earns what it took less than steps without drafts would have taken for as many
    tokens, or pays what it took more; besides, `_FOR_TRYING` of all time is earned. Without credit there are no drafts. So speculation
    loses about that share of the time at most, whatever the estimates are worth."""

    def __init__(self, num_rows: int) -> None:
        self._decided = np.zeros(num_rows)
        self._accepted = np.zeros(num_rows)
        self._plain = {processed: _StepSeconds() for processed in (False, True)}  # of steps without drafts, which may run ahead
        self._verifying: dict[StepKind, _StepSeconds] = {}
        self._credit: float | None = None  # seconds; None: no step was measured
        self._since_plain = 0  # steps with drafts
        self._look = _FIRST_LOOK

    def assign(self, row: int) -> None:
        self._decided[row] = self._accepted[row] = 0.0

    def may_draft(self, num_decodes: int, kind: StepKind) -> bool:
        """Whether there is credit, and it is known what steps without drafts take."""
        return self._plain[kind.processed].is_known(num_decodes) and (self._credit or 0.0) > 0.0 and self._since_plain < self._look

    def may_try(self, num_decodes: int, kind: StepKind) -> bool:
        """Whether there is credit for drafts that are not likely to pay."""
        return self.may_draft(num_decodes, kind) and (self._credit or 0.0) >= _TRIAL_STEPS * self._plain[kind.processed].of(num_decodes)

    def choose(self, num_decodes: int, found: Mapping[int, Draft], kind: StepKind, *, tried: IntArray | None) -> dict[int, int]:
        """How many drafts each row gets, of those `found` for it, in a step in which `num_decodes` rows decode.

        With acceptance a the j-th draft of a row brings a^j tokens more. The likeliest are added while tokens per second rise; where the
        time of wider steps is not known yet, it is taken to be that of narrower ones, and so becomes known. If some rows are `tried`, these
        get a few in any case, so that their acceptance becomes known, and the others none.
        """
        if tried is not None:
            return {row: min(_TRIED, len(draft.token_ids)) if row in tried else 0 for row, draft in found.items()}
        gains = sorted(
            (
                (acceptance**j, row)
                for row, draft in found.items()
                for acceptance in (self._acceptance(row, draft),)
                for j in _counts(draft)
            ),
            reverse=True,
        )
        plain = self._plain[kind.processed].of(num_decodes)
        tokens = num_decodes + np.cumsum([gain for gain, _ in gains])
        widths = np.arange(num_decodes + 1, num_decodes + len(gains) + 1)
        seconds = self._verifying.get(kind, _NO_SECONDS).from_narrow(widths, num_decodes, plain)
        rates = np.append(num_decodes / plain, tokens / seconds)
        best = dict.fromkeys(found, 0)
        for _, row in gains[: int(rates.argmax())]:
            best[row] += 1
        return best

    def observe(self, row: int, num_drafts: int, num_accepted: int) -> None:
        decided = num_decided(num_drafts, num_accepted)
        kept = np.exp(-decided / _ROW_MEMORY)
        self._decided[row] = kept * self._decided[row] + decided
        self._accepted[row] = kept * self._accepted[row] + num_accepted

    def plain_step_took(self, seconds: float, num_rows: int, kind: StepKind, *, steady: bool, passed: int) -> None:
        """A step that computed one token of each of `num_rows` rows has returned. `steady`: so had the step before. `passed`: so
        many steps since the one before of which this was told."""
        if steady:
            self._plain[kind.processed].add(num_rows, seconds)
            if self._since_plain >= self._look:
                self._look = min(2 * self._look, _LAST_LOOK)
            self._since_plain = 0
        if self._credit is None:
            self._credit = _FIRST_STEPS * seconds
        self._earn(_FOR_TRYING * seconds * passed, num_rows, kind)

    def step_took(self, seconds: float, num_rows: int, num_tokens: int, kind: StepKind, num_new: int) -> None:
        """A step of `num_tokens` tokens has returned in which `num_rows` rows decoded, with drafts or with work of the draft model. It
        brought `num_new` tokens."""
        self._since_plain += 1
        self._verifying.setdefault(kind, _StepSeconds()).add(num_tokens, seconds)
        saved = self._plain[kind.processed].of(num_rows) * num_new / num_rows - seconds
        self._earn(saved + _FOR_TRYING * seconds, num_rows, kind)

    def _earn(self, seconds: float, num_rows: int, kind: StepKind) -> None:
        if self._credit is not None:
            self._credit = min(self._credit + seconds, _MOST_STEPS * self._plain[kind.processed].of(num_rows))

    def _acceptance(self, row: int, draft: Draft) -> float:
        return float((_PRIOR * draft.acceptance + self._accepted[row]) / (_PRIOR + self._decided[row]))


def _counts(draft: Draft) -> range:
    return range(1, len(draft.token_ids) + 1)


_BUCKETS = 64


class _StepSeconds:
    """Moving averages of the seconds of steps, by their number of tokens; numbers that differ by less than a fifth are not told apart."""

    def __init__(self) -> None:
        self._seconds = [0.0] * _BUCKETS  # 0: not known
        self._num_steps = [0] * _BUCKETS

    def add(self, num_tokens: int, seconds: float) -> None:
        at, seconds = _bucket(num_tokens), max(seconds, 1e-9)
        known = self._seconds[at]
        self._num_steps[at] += 1
        # One step that took long, for whatever reason, changes little.
        self._seconds[at] = _MEMORY * known + (1 - _MEMORY) * min(seconds, 2 * known) if known else seconds

    def is_known(self, num_tokens: int) -> bool:
        return self._num_steps[_bucket(num_tokens)] >= 3

    def of(self, num_tokens: int) -> float:
        """Of the nearest known number; 1 while none is known."""
        at = _bucket(num_tokens)
        if self._seconds[at]:
            return self._seconds[at]
        known = [i for i, seconds in enumerate(self._seconds) if seconds]
        return self._seconds[min(known, key=lambda i: abs(i - at))] if known else 1.0

    def from_narrow(self, widths: NDArray[np.int64], narrow: int, seconds: float) -> NDArray[np.float64]:
        """Of wider steps than one of `narrow` tokens that takes `seconds`: between known widths in proportion, beyond them as the last."""
        known = [i for i, seconds in enumerate(self._seconds) if seconds and _WIDTHS[i] > narrow]
        result: NDArray[np.float64] = np.interp(
            widths, [narrow, *(_WIDTHS[i] for i in known)], [seconds, *(self._seconds[i] for i in known)]
        )
        return result


def _bucket(num_tokens: int) -> int:
    return num_tokens if num_tokens <= 16 else min(int(16 + 5 * math.log2(num_tokens / 16)), _BUCKETS - 1)


_WIDTHS = [*range(17), *(16 * 2.0 ** ((i - 15.5) / 5) for i in range(17, _BUCKETS))]  # of the buckets
_NO_SECONDS = _StepSeconds()
