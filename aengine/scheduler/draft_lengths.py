"""The ratio of two sums over what came last, in constant memory. Knows nothing of what is summed.

`DraftProgress`: how far the draft model has computed each row, and what it computes in a step.

The draft model has KV pages of its own under the numbers of the model's. What it lacks costs accepted drafts, and never changes an output.

`DraftLengths`: how many drafts pay, so that speculation gains where it can and loses next to nothing where it cannot.

Owns what is measured for it: how often the drafts of each row were accepted, and how long steps take. Knows nothing of pages or plans."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.cache import PageCache
from aengine.scheduler.drafters import Acceptance, Draft
from aengine.scheduler.plan import DraftRows, IntArray, StepPlan
from aengine.scheduler.rows import RowTable


class MovingRatio:
    """What was added fades as more is added: after `span` of it 1/e is left."""

    __slots__ = ("_denominator", "_numerator", "_span", "_start")

    def __init__(self, span: float, start: float = 0.0) -> None:
        """`start`: the ratio as long as there is none."""
        self._span = span
        self._start = start
        self._numerator = self._denominator = 0.0

    def add(self, numerator: float, denominator: float, amount: float) -> None:
        """Adds to the two sums, after both have faded by exp(-`amount` / `span`). `amount` is in the unit of `span`, such as tokens or
        steps."""
        left = math.exp(-amount / self._span)
        self._numerator = self._numerator * left + numerator
        self._denominator = self._denominator * left + denominator

    @property
    def value(self) -> float:
        return self._numerator / self._denominator if self._denominator else self._start


MOST_BEHIND = 32
"""A row of which the draft model lacks more tokens gets no drafts in the step in which these are computed."""


class DraftProgress:
    """Its KV is there for the first `_computed` tokens of a row, steps in flight included, and for all tokens of `PageCache.marked` pages.

    In a step it computes at most as many tokens as the model, beside up to `MOST_BEHIND` of each row with drafts.
    """

    def __init__(self, rows: RowTable, cache: PageCache, max_num_batched_tokens: int, *, is_head: bool = False) -> None:
        """`is_head`: the draft model is a head. It computes a token when the model has computed the one before it, whose hidden state it
        reads, and computes accepted drafts again, from the model's hidden states instead of its own."""
        self._rows = rows
        self._cache = cache
        self._is_head = is_head
        self._most = self._left = max_num_batched_tokens
        self._computed = np.zeros(len(rows.sequences), np.int32)
        self._planned: list[tuple[int, int, int, int]] = []  # row, start, length and number of drafts, of the step that is planned

    def assign(self, row: int, primary: int | None) -> None:
        """The row is assigned to a sequence, which has the pages that it shares. The page after these is a copy of the row `primary`'s if
        there is one."""
        num_shared, size = int(self._rows.num_computed[row]), self._cache.page_size
        marked = self._cache.marked[self._rows.page_table[0, row, : num_shared // size]]
        self._computed[row] = size * (len(marked) if marked.all() else int(marked.argmin()))
        if primary is not None and marked.all():
            self._computed[row] = min(num_shared, max(self._computed[row], self._computed[primary]))

    def follow(self, row: int, start: int, length: int) -> None:
        """In the step that is planned the model computes so many tokens of a row from position `start` on, whose ids are known."""
        if not self._is_head:
            self.catch_up(row, start + length)
        elif start:
            self.catch_up(row, start + 1)

    def catch_up(self, row: int, end: int) -> None:
        """In the step that is planned the draft model computes the row's tokens before position `end`, or as many as the step can have."""
        start = int(self._computed[row])
        length = min(end - start, self._left)
        if length > 0:
            self._left -= length
            self._add(row, start, length, 0)

    def lags(self, rows: IntArray) -> IntArray:
        """[n], how many tokens of each of the rows it lacks."""
        lags: IntArray = self._rows.num_tokens[rows] - self._computed[rows]
        return lags

    def is_behind(self, row: int) -> bool:
        """Whether it lacks more of the row than it can compute before it proposes."""
        return int(self.lags(np.array([row], np.int32))[0]) > MOST_BEHIND

    def propose(self, row: int, end: int, num_drafts: int) -> None:
        """It proposes drafts behind the token at `end` - 1, the row's last."""
        start = min(int(self._computed[row]), end - 1)
        self._add(row, start, end - start, num_drafts)

    def _add(self, row: int, start: int, length: int, num_drafts: int) -> None:
        self._planned.append((row, start, length, num_drafts))
        self._computed[row] = start + length

    def take(self) -> DraftRows | None:
        """What it computes in the step that was planned."""
        planned, self._planned, self._left = self._planned, [], self._most
        if not planned:
            return None
        pieces = [self._rows.tokens[row, start : start + length] for row, start, length, _ in planned]
        rows, starts, lengths, num_drafts = np.array(planned, np.int32).T
        return DraftRows(rows, starts, lengths, np.concatenate(pieces), num_drafts)

    def commit(self, plan: StepPlan, committed: IntArray) -> None:
        """A step has returned; [n] tokens of its rows have the model's KV. Of accepted drafts the draft model has computed all but the one
        that it proposed last."""
        drafted, size = plan.draft_rows, self._cache.page_size
        if drafted is None:
            return
        accepted = np.zeros(len(self._computed), np.int32)  # by row
        accepted[plan.rows] = committed - plan.starts - 1
        ends = drafted.starts + drafted.lengths
        if not self._is_head:
            ends = ends + np.minimum(accepted[drafted.rows], drafted.num_drafts - 1).clip(0)
        proposed = drafted.num_drafts > 0
        self._computed[drafted.rows[proposed]] = ends[proposed]
        for i in np.flatnonzero(ends // size > drafted.starts // size).tolist():
            self._cache.marked[self._rows.page_table[0, drafted.rows[i], drafted.starts[i] // size : ends[i] // size]] = True

    def rollback(self, plan: StepPlan) -> None:
        """The latest plan does not run, or is planned again."""
        if plan.draft_rows is not None:
            self._computed[plan.draft_rows.rows] = plan.draft_rows.starts


_LATEST = 0.1  # what a step counts at least in the average of seconds
_ROW_MEMORY = 16.0  # decided drafts of a row
_TOKEN_COST = 0.005  # of a step of one row, for each draft, beside what is measured: measured times of similar widths differ by chance
_TRIED = 2  # drafts of a row when some are only tried, and at first
_FOR_TRYING = _FOR_LOOKS = 0.005  # of the time
_MOST_SPARE, _TRIAL = 8, 2  # the allowance at first and at most, and where something is tried, in steps without drafts
_KNOWN_AFTER = 6  # steps
_FIRST_SPAN, _LAST_SPAN = 32, 512  # after so many steps with drafts steps without are measured again
_NUM_MEASURED = 3  # of them


class StepKind(NamedTuple):
    """What a step's duration depends on beside its numbers of rows and tokens: only the seconds of steps of one kind are comparable."""

    processed: bool  # logits of some rows are processed
    by_model: bool = False  # some drafts are those of a model


class _Account:
    """The account of what drafts saved and cost, in seconds. Drafts of a model have one account and all others have another, so that only
    the drafts which do not pay are stopped.

    `_FOR_TRYING` of all time is the allowance for drafts that turn out not to pay. Steps whose drafts were to pay have a balance: what they
    saved against steps without drafts for as many tokens. A negative balance is a debt; there are no drafts while it is more than the
    allowance."""

    def __init__(self) -> None:
        self._spare: float | None = None  # the allowance, in seconds; None: no step was measured
        self._balance = 0.0  # seconds

    @property
    def may_draft(self) -> bool:
        return self._spare is not None and self._balance >= -max(self._spare, 0.0)

    def may_try(self, seconds: float) -> bool:
        return self._spare is not None and self._spare >= seconds and self._balance >= 0

    def pass_time(self, seconds: float, plain: float) -> None:
        """So much time passed in steps without drafts, of which one takes `plain`."""
        most = _MOST_SPARE * plain
        self._spare = most if self._spare is None else min(self._spare + _FOR_TRYING * seconds, most)
        paid = min(max(-self._balance, 0.0), max(self._spare, 0.0))
        self._balance += paid
        self._spare -= paid

    def save(self, seconds: float, plain: float, *, tried: bool) -> None:
        """Drafts saved so much time, in a step that takes `plain` without; if negative, they cost it."""
        most = _MOST_SPARE * plain
        seconds = max(seconds, -most)  # what holds up the whole process for once is not the drafts' fault
        if tried and self._spare is not None:
            self._spare += min(seconds, 0.0)
        else:
            self._balance = min(self._balance + seconds, most)

    def pay(self, seconds: float) -> float:
        """From what was saved, as far as it goes. Returns the rest."""
        paid = min(seconds, max(self._balance, 0.0))
        self._balance -= paid
        return seconds - paid


class DraftLengths:
    """Drafts that do not pay are stopped by their `_Account`. A look, at whether drafts would pay, takes time too: what was saved, and
    beside that `_FOR_LOOKS` of all time. So speculation loses about these shares of the time at most, whatever the estimates are worth."""

    def __init__(self, num_rows: int) -> None:
        self._acceptance = [Acceptance(None, _ROW_MEMORY) for _ in range(num_rows)]
        self._plain = {processed: _StepSeconds() for processed in (False, True)}  # of steps without drafts, which may run ahead
        self._verifying: defaultdict[StepKind, _StepSeconds] = defaultdict(_StepSeconds)
        self._most: dict[StepKind, int] = {}  # drafts of a row so far
        self._accounts = {by_model: _Account() for by_model in (False, True)}
        self._looking = _StepSeconds()  # of looks, by number of rows
        self._latest = (False, False)  # of the latest step with drafts: whether some were by a model, and whether they were tried
        self._since_plain = 0  # steps with drafts
        self._span, self._num_measured = _FIRST_SPAN, 0

    def assign(self, row: int) -> None:
        self._acceptance[row] = Acceptance(None, _ROW_MEMORY)

    def is_measured(self, num_decodes: int, kind: StepKind) -> bool:
        """Whether it is known what steps without drafts take."""
        return self._plain[kind.processed].is_known(num_decodes) and self._since_plain < self._span

    def may_draft(self, num_decodes: int, kind: StepKind) -> bool:
        """Whether that is known, and the debt is not too large."""
        return self.is_measured(num_decodes, kind) and self._accounts[kind.by_model].may_draft

    def may_try(self, num_decodes: int, kind: StepKind) -> bool:
        """Whether drafts that are not likely to pay are allowed."""
        seconds = _TRIAL * self._plain[kind.processed].of(num_decodes)
        return self._accounts[kind.by_model].may_try(seconds) and self.may_draft(num_decodes, kind)

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
        self._acceptance[row].add(num_drafts, num_accepted)

    def look_took(self, seconds: float, num_rows: int, kind: StepKind) -> int:
        """Returns how many steps have to come before the next look."""
        self._looking.add(num_rows, seconds)
        left = self._accounts[kind.by_model].pay(self._looking.of(num_rows))
        return int(left / (_FOR_LOOKS * self._plain[kind.processed].of(num_rows)))

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
            by_model, tried = self._latest
            self._accounts[by_model].save(known - seconds, known, tried=tried)
        for account in self._accounts.values():
            account.pass_time(seconds * passed, known)

    def step_took(
        self, seconds: float, num_rows: int, num_tokens: int, kind: StepKind, num_new: int, *, num_drafts: int, tried: bool
    ) -> None:
        """A step of `num_tokens` tokens has returned in which `num_rows` rows decoded, with up to `num_drafts` drafts or with work of the
        draft model. It brought `num_new` tokens. `tried`: the drafts were not likely to pay."""
        self._since_plain += 1
        self._num_measured = 0
        if num_drafts:
            self._verifying[kind].add(num_tokens, seconds)
            self._most[kind] = max(self._most.get(kind, 1), num_drafts)
        plain = self._plain[kind.processed].of(num_rows)
        self._accounts[kind.by_model].save(plain * num_new / num_rows - seconds, plain, tried=tried)
        self._latest = kind.by_model, tried


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
