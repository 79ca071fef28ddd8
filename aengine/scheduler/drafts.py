"""`Drafts`: which rows of a step get drafts, and how many; and what their fate says about later ones.

Knows nothing of where drafts come from, of prompts or of budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from aengine.outputs import DraftUsage
from aengine.scheduler.draft_lengths import DraftLengths
from aengine.scheduler.draft_progress import DraftProgress
from aengine.scheduler.drafter import Draft, Drafter, DraftSource
from aengine.scheduler.plan import NO_INTS, IntArray, StepPlan, StepResult
from aengine.scheduler.request import DraftCount
from aengine.scheduler.residency import Residency
from aengine.scheduler.rows import RowTable


class Drafts:
    """A row with `RowTable.drafting` is in lock step, so that its tokens are known when drafts are wanted. It leaves lock step for a while
    when there are no drafts for it that pay."""

    def __init__(self, rows: RowTable, residency: Residency, drafter: Drafter, progress: DraftProgress | None) -> None:
        """`progress`: of the draft model, if there is one."""
        self._rows = rows
        self._residency = residency
        self._drafter = drafter
        self._progress = progress
        self._lengths = DraftLengths(len(rows.sequences))
        self._forced: Mapping[int, IntArray] = {}  # by row, in the latest result
        self._sources: dict[int, DraftSource] = {}  # by row, of its drafts in flight
        self.usage: dict[DraftSource, DraftUsage] = {}  # so far
        self._before: float | None = None  # when the step before was committed, if there was no pause since

    def assign(self, row: int) -> None:
        """The row is assigned to another sequence."""
        self._drafter.assign(row)
        self._lengths.assign(row)

    def choose(self, decodes: IntArray, budget: int) -> Iterator[tuple[int, Draft]]:
        """Of `decodes` the rows that get drafts, with these: at most `budget` together, and as many as there are pages for."""
        rows, found = self._rows, dict[int, Draft]()
        for row in decodes[rows.lockstep[decodes] & (rows.max_drafts[decodes] > 0) & (rows.flights[decodes] == 0)].tolist():
            num_tokens = int(rows.num_tokens[row])
            # The last token of a sequence is sampled, and never computed.
            most = min(int(rows.max_drafts[row]), budget, int(rows.limit[row]) - num_tokens - 1)
            forced = self._forced.get(row, NO_INTS)[: max(0, most)]
            if len(forced) or most <= 0:
                found[row] = Draft(forced, DraftSource.GRAMMAR)
                continue
            draft = self._drafter.propose(row, rows.tokens[row, :num_tokens], most)
            if draft.by_model and self._progress is not None and self._progress.is_behind(row):
                self._progress.catch_up(row, num_tokens)
            else:
                found[row] = draft
        for row, wanted in self._lengths.choose(len(decodes), {row: len(draft.token_ids) for row, draft in found.items()}).items():
            length = self._residency.extend_by_drafts(row, min(wanted, budget))
            if length:
                budget -= length
                self._sources[row] = found[row].source
                yield row, found[row]._replace(token_ids=found[row].token_ids[:length])
            else:
                self._lengths.observe(row, int(rows.num_tokens[row]), 0, 0)
                rows.set_drafting(row, False)

    def observe(self, plan: StepPlan, result: StepResult, committed: IntArray, now: float) -> list[DraftCount]:
        """A step has returned at time `now`, in seconds; [n] tokens of its rows have their KV in pages. Returns what became of the drafts
        of requests that have not ended meanwhile."""
        counts: list[DraftCount] = []
        self._forced = result.forced
        rows, lengths = self._rows, self._lengths
        drafted = np.flatnonzero(plan.num_sampled > 1)
        only_decodes = plan.num_decodes + len(drafted) == len(plan.rows)
        if only_decodes and self._before is not None:
            lengths.step_took(now - self._before, int(plan.lengths.sum()), verifying=bool(len(drafted)))
        self._before = now
        for i in drafted[committed[drafted] > plan.starts[drafted]].tolist():  # else the row got no token
            row, num_drafts, accepted = int(plan.rows[i]), int(plan.num_sampled[i]) - 1, int(committed[i] - plan.starts[i]) - 1
            lengths.observe(row, int(rows.num_tokens[row]), num_drafts, accepted)
            source = self._sources[row]
            if rows.active[row]:
                self.usage[source] = self.usage.get(source, DraftUsage(source.value)).plus(num_drafts, accepted)
                counts.append(DraftCount(int(rows.keys[row]), source, num_drafts, accepted))
        resting = plan.rows[(rows.max_drafts[plan.rows] > 0) & ~rows.drafting[plan.rows]]
        for row in resting[lengths.tried(resting, rows.num_tokens[resting])].tolist():
            rows.set_drafting(row, True)
        return counts

    def pause(self) -> None:
        """No step is in flight: the time until the next one says nothing."""
        self._before = None
