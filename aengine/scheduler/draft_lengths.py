"""`DraftLengths`: how many drafts pay, so that speculation gains where it can and loses next to nothing where it cannot. `LookTimes`: after
which steps it is looked whether drafts would pay.

Two estimates decide: how often the drafts of each row were accepted, and how long steps of each width take. The credit stands between them
and their errors: it bounds what drafts may lose, whatever the estimates are worth. Knows nothing of pages or plans.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.scheduler.drafters import Acceptance, Draft
from aengine.scheduler.plan import IntArray

_LATEST = 0.1  # what a step counts at least in the average of seconds
_ROW_MEMORY = 16.0  # decided drafts of a row
_TOKEN_COST = 0.005  # of a step of one row, for each draft, beside what is measured: measured times of similar widths differ by chance
_TRIED = 2  # drafts of a row when some are only tried, and at first
_SHARE = 0.01  # of the time, that drafts and looks may lose
_MOST_CREDIT = 12.0  # steps without drafts
_START_CREDIT = 1.0  # the same: with less, drafting does not start
_KNOWN_AFTER = 6  # steps
_FIRST_SPAN, _LAST_SPAN = 32, 512  # after so many steps with drafts steps without are measured again
_NUM_MEASURED = 3  # of them


class StepKind(NamedTuple):
    """What a step's duration depends on beside its numbers of rows and tokens: only the seconds of steps of one kind are comparable."""

    processed: bool  # logits of some rows are processed
    by_model: bool = False  # some drafts are those of a model


class DraftLengths:
    """The credit is in steps without drafts, `_MOST_CREDIT` at first and at most. Each of these steps adds `_SHARE`; looks cost what they
    take; steps with drafts add what they saved against steps without for as many tokens, or cost what they lost. Drafting starts with a
    credit of `_START_CREDIT`, and stops when there is none. Drafts of a model have a credit of their own, so that only the drafts which do
    not pay are stopped."""

    def __init__(self, num_rows: int) -> None:
        self._acceptance = [Acceptance(None, _ROW_MEMORY) for _ in range(num_rows)]
        self._plain = {processed: _StepSeconds() for processed in (False, True)}  # of steps without drafts, which may run ahead
        self._verifying: defaultdict[StepKind, _StepSeconds] = defaultdict(_StepSeconds)
        self._most: dict[StepKind, int] = {}  # drafts of a row so far
        self._credit = dict.fromkeys((False, True), _MOST_CREDIT)  # by whether drafts are those of a model
        self._looking = _StepSeconds()  # of looks, by number of rows
        self._latest_by_model = False  # the latest step with drafts
        self._since_plain = 0  # steps with drafts
        self._span, self._num_measured = _FIRST_SPAN, 0

    def assign(self, row: int) -> None:
        self._acceptance[row] = Acceptance(None, _ROW_MEMORY)

    def is_measured(self, num_decodes: int, kind: StepKind) -> bool:
        """Whether it is known what steps without drafts take."""
        return self._plain[kind.processed].is_known(num_decodes) and self._since_plain < self._span

    def may_start(self, num_decodes: int, kind: StepKind) -> bool:
        """Whether that is known, and there is enough credit to begin to draft, or to try drafts that are not likely to pay."""
        return self.is_measured(num_decodes, kind) and self._credit[kind.by_model] >= _START_CREDIT

    def may_draft(self, num_decodes: int, kind: StepKind) -> bool:
        """Whether that is known, and there is credit to go on drafting."""
        return self.is_measured(num_decodes, kind) and self._credit[kind.by_model] >= 0

    def choose(self, num_decodes: int, found: Mapping[int, Draft], kind: StepKind, *, tried: IntArray | None) -> dict[int, int]:
        """How many drafts each row gets, of those `found` for it, in a step in which `num_decodes` rows decode.

        With acceptance a the j-th draft of a row brings a^j tokens more. The likeliest are added while tokens per second rise; where the
        time of wider steps is not known yet, it is taken to be that of narrower ones, and so becomes known. If some rows are `tried`, these
        get a few in any case, so that their acceptance becomes known, and the others none.
        """
        if tried is not None:
            return {row: min(_TRIED, len(draft.token_ids)) if row in tried else 0 for row, draft in found.items()}
        most = 2 * self._most.get(kind, _TRIED // 2)  # what many drafts cost is found out step by step
        acceptance = np.array([self._acceptance[row].given(draft.acceptance) for row, draft in found.items()])
        num_found = np.array([min(len(draft.token_ids), most) for draft in found.values()])
        numbers = np.arange(1, num_found.max() + 1)
        gains = np.where(numbers <= num_found[:, None], acceptance[:, None] ** numbers, -1.0).ravel()
        likeliest = np.argsort(-gains, kind="stable")[: num_found.sum()]
        tokens = num_decodes + gains[likeliest].cumsum()
        added = np.arange(1, len(likeliest) + 1)
        plain = self._plain[kind.processed].of(num_decodes)
        seconds = np.maximum.accumulate(self._verifying[kind].from_narrow(num_decodes + added, num_decodes, plain))
        rates = tokens / (seconds * (1 + _TOKEN_COST / num_decodes * added))
        best = int(rates.argmax())
        if rates[best] <= num_decodes / plain:
            return dict.fromkeys(found, 0)
        chosen = np.bincount(likeliest[: best + 1] // len(numbers), minlength=len(found))
        return dict(zip(found, chosen.tolist(), strict=True))

    def observe(self, row: int, num_drafts: int, num_accepted: int) -> None:
        self._acceptance[row].add_drafts(num_drafts, num_accepted)

    def look_took(self, seconds: float, num_rows: int, kind: StepKind) -> int:
        """Returns after how many steps there is credit to start to draft, if the next look finds that drafts would pay."""
        self._looking.add(num_rows, seconds)
        self._save(-self._looking.of(num_rows) / self._plain[kind.processed].of(num_rows), by_model=kind.by_model)
        return max(0, int((_START_CREDIT - self._credit[kind.by_model]) / _SHARE))

    def plain_step_took(self, seconds: float, num_rows: int, kind: StepKind, *, steady: bool, passed: int) -> None:
        """A step that computed one token of each of `num_rows` rows has returned. `steady`: so had the step before; else drafts made it
        slower, as it was not planned ahead. `passed`: so many steps since the one before of which this was told."""
        plain = self._plain[kind.processed]
        if steady:
            plain.add(num_rows, seconds)
            self._num_measured += 1
            if self._since_plain and self._num_measured >= _NUM_MEASURED:
                if self._since_plain >= self._span:
                    self._span = min(2 * self._span, _LAST_SPAN)
                self._since_plain = 0
        known = plain.of(num_rows)
        if not steady:
            self._save(1 - seconds / known, by_model=self._latest_by_model)
        for by_model in self._credit:
            self._save(_SHARE * passed, by_model=by_model)

    def step_took(self, seconds: float, num_rows: int, num_tokens: int, kind: StepKind, num_new: int, *, num_drafts: int) -> None:
        """A step of `num_tokens` tokens has returned in which `num_rows` rows decoded, with up to `num_drafts` drafts or with work of the
        draft model. It brought `num_new` tokens."""
        self._since_plain += 1
        self._num_measured = 0
        if num_drafts:
            self._verifying[kind].add(num_tokens, seconds)
            self._most[kind] = max(self._most.get(kind, 1), num_drafts)
        plain = self._plain[kind.processed].of(num_rows)
        self._save(num_new / num_rows - seconds / plain, by_model=kind.by_model)
        self._latest_by_model = kind.by_model

    def _save(self, steps: float, *, by_model: bool) -> None:
        """The time of so many steps was saved, or lost if negative. What holds up the whole process for once is not the drafts' fault."""
        self._credit[by_model] = min(self._credit[by_model] + max(steps, -_MOST_CREDIT), _MOST_CREDIT)


_EACH, _LAST_PAUSE = 8, 64
"""For so many steps after drafts were last used each step looks for new ones; later the more seldom the longer they do not pay."""
_MEASURED = 4  # steps before a look are measured
_FORCED = 16  # steps after forced text that paid, in which what is forced is looked at in any case


class LookTimes:
    def __init__(self) -> None:
        self._num_steps = 0  # since drafts were used
        self._next = 0  # after so many of them
        self._earliest = 0  # whatever happens, as there is no credit before
        self._pause = _EACH // 2
        self._num_forced = 0  # steps in which forced text is looked for

    def count_step(self, *, forced: bool) -> bool:
        """A step has returned, with text that is `forced` or not. Whether it is looked now."""
        self._num_steps += 1
        self._num_forced -= self._num_forced > 0
        return self._num_steps >= self._next or (forced and self._num_forced > 0)

    @property
    def near(self) -> bool:
        """Whether a step is to be measured because of the next look."""
        return self._num_steps >= self._next - _MEASURED

    @property
    def wants_forced(self) -> bool:
        """Whether the step that is planned should say what is forced: its result, or that of one in flight, is looked at."""
        return self._num_forced > 0 or self._num_steps + 1 >= self._next - 1

    def restart(self) -> None:
        """Drafts that were to pay are used."""
        self._num_steps = self._next = self._earliest = 0
        self._pause = _EACH // 2

    def hasten(self) -> None:
        """Makes the next look come within `_EACH` steps, and the pause behind it short again. Called when a row is assigned, as drafts of a
        new sequence may pay."""
        self._pause = _EACH // 2
        self._next = max(min(self._next, self._num_steps + _EACH), self._earliest)

    def postpone(self) -> None:
        """Nothing could be looked at, or nothing is known of steps without drafts: the next ones are measured."""
        self._next = self._num_steps + _MEASURED

    def looked(self, wait: int, *, forced: bool | None) -> None:
        """It was looked, so the next look comes after `wait` steps at the earliest. `forced`: there was forced text, which pays or not."""
        if forced is not None:
            self._num_forced = _FORCED if forced else 0
        if self._num_steps >= _EACH:
            self._pause = min(2 * self._pause, _LAST_PAUSE)
        self._earliest = self._num_steps + wait
        self._next = max(self._num_steps + (self._pause if self._num_steps >= _EACH else 1), self._earliest)


_BUCKETS = 64


class _StepSeconds:
    """Moving averages of the seconds of steps, by their number of tokens; numbers that differ by less than a fifth are not told apart."""

    def __init__(self) -> None:
        self._seconds = [0.0] * _BUCKETS  # 0: not known
        self._num_steps = [0] * _BUCKETS
        self._known: list[int] = []  # buckets, ascending

    def add(self, num_tokens: int, seconds: float) -> None:
        at, seconds = _bucket(num_tokens), max(seconds, 1e-9)
        known = self._seconds[at]
        if not known:
            bisect.insort(self._known, at)
        self._num_steps[at] += 1
        part = max(1 / self._num_steps[at], _LATEST)
        self._seconds[at] = known + part * (min(seconds, 2 * known) - known) if known else seconds

    def is_known(self, num_tokens: int) -> bool:
        return self._num_steps[_bucket(num_tokens)] >= _KNOWN_AFTER

    def of(self, num_tokens: int) -> float:
        """The average seconds of a step of `num_tokens` tokens, or of the nearest number that was measured; 1 while none was."""
        at = _bucket(num_tokens)
        if self._seconds[at]:
            return self._seconds[at]
        return self._seconds[min(self._known, key=lambda i: abs(i - at))] if self._known else 1.0

    def from_narrow(self, widths: NDArray[np.int64], narrow: int, seconds: float) -> NDArray[np.float64]:
        """The seconds [w] of steps of `widths` [w] tokens, given that one of `narrow` tokens, fewer than these, takes `seconds`:
        interpolated between the wider steps that were measured, and constant beyond the widest of them."""
        known = [i for i in self._known if _WIDTHS[i] > narrow]
        result: NDArray[np.float64] = np.interp(
            widths, [narrow, *(_WIDTHS[i] for i in known)], [seconds, *(self._seconds[i] for i in known)]
        )
        return result


def _bucket(num_tokens: int) -> int:
    return num_tokens if num_tokens <= 16 else min(int(16 + 5 * math.log2(num_tokens / 16)), _BUCKETS - 1)


_WIDTHS = [*range(17), *(16 * 2.0 ** ((i - 15.5) / 5) for i in range(17, _BUCKETS))]  # of the buckets
