"""`Drafts`: which rows of a step get drafts, and how many; and what their fate says about later ones. `Looks`: after which steps it is
looked whether drafts would pay.

Knows nothing of where drafts come from, of prompts or of budgets; of seconds only that a look has to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from aengine.api.outputs import DraftUsage
from aengine.scheduler.draft_lengths import DraftLengths, DraftProgress, StepKind
from aengine.scheduler.drafters import Acceptance, Draft, Drafter, DraftSource
from aengine.scheduler.kv import Chunk, KVCacheManager
from aengine.scheduler.plan import NO_INTS, DraftRows, Features, IntArray, StepPlan, StepResult
from aengine.scheduler.rows import RowTable
from aengine.scheduler.sequence import DraftCount

_EACH, _LAST_PAUSE = 8, 64
"""For so many steps after drafts were last used each step looks for new ones; later the more seldom the longer they do not pay."""
_MEASURED = 4  # steps before a look are measured
_FORCED = 16  # steps after forced text that paid, in which what is forced is looked at in any case


class Looks:
    def __init__(self) -> None:
        self._num_steps = 0  # since drafts were used
        self._next = 0  # after so many of them
        self._earliest = 0  # whatever happens, since the look before took long
        self._measured = 0  # from so many on they are measured
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
        return self._num_steps >= self._measured

    @property
    def wants_forced(self) -> bool:
        """Whether the step that is planned should say what is forced: its result, or that of one in flight, is looked at."""
        return self._num_forced > 0 or self._num_steps + 1 >= self._next - 1

    def restart(self) -> None:
        """Drafts that were to pay are used."""
        self._num_steps = self._next = self._earliest = self._measured = 0
        self._pause = _EACH // 2

    def hasten(self) -> None:
        """Makes the next look come within `_EACH` steps, and the pause behind it short again. Called when a row is assigned, as drafts of a
        new sequence may pay."""
        self._pause = _EACH // 2
        self._plan(min(self._next, self._num_steps + _EACH))

    def postpone(self) -> None:
        """Nothing could be looked at, or nothing is known of steps without drafts: they are measured."""
        self._next, self._measured = self._num_steps + _EACH, self._num_steps

    def made(self, wait: int, *, forced: bool | None) -> None:
        """It was looked, so the next look comes after `wait` steps at the earliest. `forced`: there was forced text, which pays or not."""
        if forced is not None:
            self._num_forced = _FORCED if forced else 0
        if self._num_steps >= _EACH:
            self._pause = min(2 * self._pause, _LAST_PAUSE)
        self._earliest = self._num_steps + wait
        self._plan(self._num_steps + (self._pause if self._num_steps >= _EACH else 1))

    def _plan(self, num_steps: int) -> None:
        self._next = max(num_steps, self._earliest)
        self._measured = self._next - _MEASURED


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
        self._looks = Looks()
        self._passed = 0  # steps since the latest one that was measured
        self._before: tuple[float, bool] | None = None
        """When the step before returned, if there was no pause since, and whether it had nothing to do with drafts."""

    def assign(self, row: int, primary: int | None) -> None:
        """The row is assigned to another sequence; as a fork, to one that shares the pages of the row `primary`."""
        self._drafter.assign(row)
        self._lengths.assign(row)
        self._unused.pop(row, None)
        self._looks.hasten()
        if self._progress is not None:
            self._progress.assign(row, primary)

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
        return None if self._progress is None else self._progress.take()

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
                self._lengths.step_took(
                    now - before[0], len(plan.rows), num_tokens, kind, num_new, num_drafts=num_drafts, tried=self._trying
                )

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
        may_try = lengths.may_try(len(decodes), self._kind(decodes, {})._replace(by_model=True))
        by_model = self._follows or may_try or self._judged != len(decodes)  # else such a look is not worth its time
        found = self._propose(able, rows.num_known[able], _NO_LIMIT, by_model=by_model)
        kind = self._kind(decodes, found)
        pays = bool(found) and any(lengths.choose(len(decodes), found, kind, tried=None).values())
        self.drafting = pays and lengths.may_draft(len(decodes), kind)
        if not self.drafting:
            self._unused = {row: (int(rows.num_known[row]), draft) for row, draft in found.items() if not draft.by_model}
        if kind.by_model:
            self._follows, self._judged = pays, len(decodes)
            if may_try:
                self._try(found)
        forced = self.drafting if any(draft.source is DraftSource.GRAMMAR for draft in found.values()) else None
        self._looks.made(lengths.look_took(self._clock() - begin, len(decodes), kind), forced=forced)

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
            self._forced_acceptance.add(len(draft.token_ids), num_accepted)
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
