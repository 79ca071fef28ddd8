"""`Drafts`: which rows of a step get drafts, and how many; and what their fate says about later ones. `DraftProgress`: how far the draft
model has computed each row, and what it computes in a step. The draft model has KV pages of its own under the numbers of the model's.
What it lacks costs accepted drafts, and never changes an output.

Knows nothing of where drafts come from, of prompts or of budgets; of seconds only that a look has to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from aengine.api.outputs import DraftSource, DraftUsage
from aengine.cache import PageCache
from aengine.scheduler.draft_lengths import DraftLengths, LookTimes, StepKind
from aengine.scheduler.drafters import Acceptance, Draft, Drafter
from aengine.scheduler.kv import Chunk, KVCacheManager
from aengine.scheduler.plan import NO_INTS, DraftRows, Features, IntArray, StepPlan, StepResult
from aengine.scheduler.rows import RowTable
from aengine.scheduler.sequence import DraftCount, Sequence

MOST_BEHIND = 32
"""A row of which the draft model lacks more tokens gets no drafts in the step in which these are computed."""


class DraftProgress:
    """How far the draft model is. Its KV is there for the first `_computed` tokens of a row, steps in flight included, and for all tokens
    of `PageCache.marked` pages.

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

    def take_rows(self) -> DraftRows | None:
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


_NO_LIMIT = 1 << 30
_PROCESSED = int(Features.PROCESSED | Features.LOGPROBS)  # steps take longer with these


class Drafts:
    """A draft follows a token that is known. So while the engine is `drafting`, no step is planned before the one before it has returned.
    Otherwise steps run ahead, and now and then it is looked whether drafts would pay."""

    def __init__(
        self, rows: RowTable, kv_cache: KVCacheManager, clock: Callable[[], float], drafter: Drafter, progress: DraftProgress | None
    ) -> None:
        """`progress`: of the draft model, if there is one."""
        self.drafting = False
        self.usage: dict[DraftSource, DraftUsage] = {}  # so far
        self._rows = rows
        self._kv_cache = kv_cache
        self._clock = clock
        self._drafter = drafter
        self._progress = progress
        self._follows = True  # the draft model computes prompts, since its drafts may pay
        self._judged = 0  # with so many decodes they did not
        self._lengths = DraftLengths(len(rows.sequences))
        self._forced: Mapping[int, IntArray] = {}  # by row: tokens that grammars force to follow, as of the latest result
        self._forced_acceptance = Acceptance(0.5)  # until it is known better from drafts that are not used
        self._in_flight: dict[int, Draft] = {}  # by row
        self._unused: dict[int, tuple[int, Draft]] = {}  # by row: a draft that was found and not used, and for which position
        self._tried: IntArray | None = None  # rows whose drafts are only tried; None: none are
        self._trying = False  # in the latest step
        self._looks = LookTimes()
        self._passed = 0  # steps since the latest one that was measured
        self._before: tuple[float, bool] | None = None
        """When the step before returned, if there was no pause since, and whether it had nothing to do with drafts."""

    def assign(self, row: int, primary: int | None) -> None:
        """The row is assigned to another sequence; as a fork, to one that shares the pages of the row `primary`."""
        sequence = self._rows.sequences[row]
        assert sequence is not None
        request = sequence.request
        self._drafter.assign(row, (request.tenant, request.cache_salt, request.adapter), request.draft_context)
        self._lengths.assign(row)
        self._unused.pop(row, None)
        self._looks.hasten()
        if self._progress is not None:
            self._progress.assign(row, primary)

    def release(self, sequence: Sequence) -> None:
        """A sequence that has ended is about to lose its row."""
        self._drafter.release(sequence.row, self._rows.tokens[sequence.row, : self._rows.num_known[sequence.row]])

    def follow_prompt(self, row: int, start: int, length: int) -> None:
        """In the step that is planned the model computes so many tokens of the row's prompt from position `start` on."""
        rows = self._rows
        if self._progress is not None and self._follows and rows.max_drafts[row] and rows.limit[row] - rows.num_tokens[row] > 2:
            self._progress.follow(row, start, length)

    def choose(self, decodes: IntArray, budget: int) -> tuple[IntArray, list[Chunk]]:
        """Give drafts to some of the rows `decodes`: at most `budget` together, and as many as there are pages for. Returns the other
        rows, and the chunks of these."""
        rows = self._rows
        able = decodes[(rows.max_drafts[decodes] > 0) & (rows.flights[decodes] == 0)]
        found = self._propose(able, rows.num_tokens[able], budget, by_model=self._follows or self._tried is not None)
        kind = self._kind(decodes, found)
        chosen: dict[int, int] = {}
        catches_up = False
        if found and self._lengths.may_draft(len(decodes), kind):
            chosen = self._lengths.choose(len(decodes), found, kind, tried=self._tried)
            if self._progress is not None:
                for row in [row for row, wanted in chosen.items() if wanted and found[row].by_model and self._progress.is_behind(row)]:
                    self._progress.catch_up(row, int(rows.num_tokens[row]))
                    chosen[row], catches_up = 0, True
        self.drafting = catches_up or any(chosen.values())
        self._trying = self._tried is not None
        if not catches_up:
            self._tried = None
        chunks: list[Chunk] = []
        for row, wanted in chosen.items():
            length = self._kv_cache.extend_by_drafts(row, min(wanted, budget))
            if length:
                budget -= length
                draft = self._in_flight[row] = found[row].cut(length)
                if self._progress is not None and draft.by_model:
                    self._progress.propose(row, int(rows.num_tokens[row]), length)
                num_tokens = len(draft.token_ids) + 1
                chunks.append(Chunk(row, int(rows.num_computed[row]), num_tokens, num_tokens, draft))
        if chunks:
            decodes = decodes[(decodes[:, None] != [chunk.row for chunk in chunks]).all(axis=1)]  # faster than setdiff1d
        return decodes, chunks

    @property
    def wants_forced(self) -> bool:
        """Whether the step that is planned should say what grammars force."""
        return self.drafting or self._looks.wants_forced

    def take_rows(self) -> DraftRows | None:
        """What the draft model computes in the step that was planned."""
        return None if self._progress is None else self._progress.take_rows()

    def observe(self, plan: StepPlan, result: StepResult, committed: IntArray, now: float) -> list[DraftCount]:
        """A step has returned at time `now`, in seconds; [n] tokens of its rows have their KV in pages. Returns what became of the drafts
        of requests that have not ended meanwhile."""
        self._forced = result.forced
        looks = self._looks.count_step(forced=bool(self._forced)) and not self.drafting
        self._passed += 1
        behind_drafts = self._before is not None and not self._before[1]
        if not (looks or behind_drafts or self.drafting or self._in_flight or self._looks.near) and plan.draft_rows is None:
            self._before = None
            return []
        rows, counts = self._rows, list[DraftCount]()
        if self._progress is not None:
            self._progress.commit(plan, committed)
        drafted = plan.num_decodes + np.flatnonzero(plan.num_sampled[plan.num_decodes :] > 1) if self._in_flight else NO_INTS
        drafts = {row: self._in_flight.pop(row) for row in plan.rows[drafted].tolist()}
        self._measure(plan, drafts, committed, now)
        for i in drafted[committed[drafted] > plan.starts[drafted]].tolist():  # else the row got no token
            row, accepted = int(plan.rows[i]), int(committed[i] - plan.starts[i]) - 1
            draft = drafts[row]
            num_drafts = len(draft.token_ids)
            self._learn(row, int(plan.starts[i]) + 1, draft, accepted)
            if rows.active[row]:
                self.usage[draft.source] = self.usage.get(draft.source, DraftUsage(draft.source.value)).plus(num_drafts, accepted)
                counts.append(DraftCount(int(rows.keys[row]), draft.source, num_drafts, accepted))
        if self.drafting and not self._trying:
            self._looks.restart()
        if looks:
            self._look(now)
        return counts

    def idle(self) -> None:
        """No step is in flight: the time until the next one says nothing."""
        self._before = None

    def rollback(self, plan: StepPlan) -> None:
        """The latest plan does not run."""
        for row in plan.rows[plan.num_sampled > 1].tolist():
            del self._in_flight[row]
        if self._progress is not None:
            self._progress.rollback(plan)

    def _measure(self, plan: StepPlan, drafts: dict[int, Draft], committed: IntArray, now: float) -> None:
        before, self._before = self._before, None
        if plan.num_decodes + len(drafts) < len(plan.rows):
            return  # it has a part of a prompt
        if plan.wants_forced and not drafts:
            return  # what is forced takes time that steps without speculation do not take
        plain = not drafts and plan.draft_rows is None
        self._before = (now, plain)
        passed, self._passed = self._passed, 0
        if before is not None:
            kind = self._kind(plan.rows, drafts)
            kind = kind._replace(by_model=kind.by_model or plan.draft_rows is not None)
            if plain:
                self._lengths.plain_step_took(now - before[0], len(plan.rows), kind, steady=before[1], passed=passed)
            else:
                num_tokens, num_new = int(plan.lengths.sum()), int((committed - plan.starts).sum())
                num_drafts = int(plan.num_sampled.max()) - 1
                self._lengths.step_took(now - before[0], len(plan.rows), num_tokens, kind, num_new, num_drafts=num_drafts)

    def _look(self, begin: float) -> None:
        """Whether drafts would pay, or can be tried, now, at the time `begin`; of rows whose steps run ahead the latest tokens are not
        known."""
        rows, lengths = self._rows, self._lengths
        decodes = rows.ready(in_flight=False)
        if not len(decodes) or not lengths.is_measured(len(decodes), self._kind(decodes, {})):
            self._looks.postpone()
            return
        self._learn_from_unused()
        able = decodes[rows.max_drafts[decodes] > 0]
        may_try = lengths.may_start(len(decodes), self._kind(decodes, {})._replace(by_model=True))
        by_model = self._follows or may_try or self._judged != len(decodes)  # else such a look is not worth its time
        found = self._propose(able, rows.num_known[able], _NO_LIMIT, by_model=by_model)
        kind = self._kind(decodes, found)
        pays = bool(found) and any(lengths.choose(len(decodes), found, kind, tried=None).values())
        self.drafting = pays and lengths.may_start(len(decodes), kind)
        if not self.drafting:
            self._unused = {row: (int(rows.num_known[row]), draft) for row, draft in found.items() if not draft.by_model}
        if kind.by_model:
            self._follows, self._judged = pays, len(decodes)
            if may_try:
                self._try(found)
        forced = self.drafting if any(draft.source is DraftSource.GRAMMAR for draft in found.values()) else None
        self._looks.looked(lengths.look_took(self._clock() - begin, len(decodes), kind), forced=forced)

    def _try(self, found: dict[int, Draft]) -> None:
        """What a draft model would propose is not known before it is used. So it is used for one row now and then, if it does not pay."""
        by_model = np.array([row for row, draft in found.items() if draft.by_model], np.int32)
        if not self.drafting and self._progress is not None:
            self._tried = by_model[[self._progress.lags(by_model).argmin()]]
            self.drafting = True

    def _learn(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        """Records that `num_accepted` tokens of a draft were right, for a row that had `num_tokens` tokens, in the estimates of the row and
        of the draft's source."""
        self._lengths.observe(row, len(draft.token_ids), num_accepted)
        if draft.source is DraftSource.GRAMMAR:
            self._forced_acceptance.add_drafts(len(draft.token_ids), num_accepted)
        else:
            self._drafter.observe(row, num_tokens, draft, num_accepted)

    def _learn_from_unused(self) -> None:
        """Compares the drafts that were found and not used with the tokens that came in their place, and records how many would have been
        right."""
        unused, self._unused = self._unused, {}
        for row, (position, draft) in unused.items():
            came = self._rows.tokens[row, position : int(self._rows.num_known[row])]
            decided = min(len(came), len(draft.token_ids))
            if decided:
                wrong = np.flatnonzero(came[:decided] != draft.token_ids[:decided])
                self._learn(row, position, draft.cut(decided), int(wrong[0]) if len(wrong) else decided)

    def _propose(self, able: IntArray, num_tokens: IntArray, budget: int, *, by_model: bool) -> dict[int, Draft]:
        rows, found = self._rows, dict[int, Draft]()
        # The last token of a sequence is sampled, and never computed.
        left = np.minimum(rows.limit[able] - num_tokens - 1, budget)
        for row, num, most, max_drafts in zip(*(array.tolist() for array in (able, num_tokens, left, rows.max_drafts[able])), strict=True):
            if most <= 0:
                continue
            forced = self._forced.get(row)
            if forced is not None and len(forced):
                draft = Draft(forced[: min(most, int(rows.max_forced[row]))], DraftSource.GRAMMAR, self._forced_acceptance.value)
            else:
                draft = self._drafter.propose(row, rows.tokens[row, :num], min(most, max_drafts), by_model=by_model)
            if len(draft.token_ids):
                found[row] = draft
        return found

    def _kind(self, rows: IntArray, drafts: dict[int, Draft]) -> StepKind:
        processed = self._rows.num_processed > 0 and bool(np.count_nonzero(self._rows.features[rows] & _PROCESSED))
        return StepKind(processed, any(draft.by_model for draft in drafts.values()))
