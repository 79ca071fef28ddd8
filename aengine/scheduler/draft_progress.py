"""`DraftProgress`: how far the draft model has computed each row, and what it computes in a step.

The draft model has KV pages of its own under the numbers of the model's. What it lacks costs accepted drafts, and never changes an output.
"""

from __future__ import annotations

import numpy as np

from aengine.cache import PageCache
from aengine.scheduler.plan import DraftRows, IntArray, StepPlan
from aengine.scheduler.rows import RowTable

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
