"""The state of the sequences that hold a row, as a struct of arrays indexed by row, so that a step over all of them is a few
vectorised operations; and which tokens a returned step adds to them: drafts are accepted up to the first that is not what was sampled, and
a row ends at its first stop token. Knows no policy: who runs and why is the scheduler's business.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.cache import PageNeeds
from aengine.scheduler.plan import NO_INTS, Features, IntArray, StepPlan, StepResult, TokenLogprobs
from aengine.scheduler.sequence import OutputCycles, Sequence

MOST_FORCED = 16
"""Drafts of forced text in a step, where a request says nothing: they are nearly always right."""


class RowTable:
    """`num_rows` rows of up to `max_model_len` tokens, with pages in the groups of `needs`.

    Per row: `num_tokens` counts the tokens of the sequence including those that a step in flight samples, `num_known` without
    them; `num_computed` counts the tokens whose KV is in pages or being written by a step in flight, `num_committed`
    without the latter. So num_committed <= num_known <= num_tokens and num_committed <= num_computed <= num_tokens.
    """

    def __init__(self, num_rows: int, max_model_len: int, needs: PageNeeds, max_drafts: int = 0, max_in_flight: int = 1) -> None:
        self._max_drafts = max_drafts
        self._max_forced = min(MOST_FORCED, max_drafts) if needs.state_pages else MOST_FORCED  # as many as states have inputs of
        self._max_in_flight = max_in_flight
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.keys = np.zeros(num_rows, np.int64)
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.num_known = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.num_committed = np.zeros(num_rows, np.int32)
        self.num_published = np.zeros(num_rows, np.int32)  # pages offered to the prefix index
        self.num_pages = np.zeros(num_rows, np.int32)  # in each group without a window
        self.window_begins = np.zeros((len(needs.kinds), num_rows), np.int32)  # by kind of window: the first column with a page
        self.window_ends = np.zeros(num_rows, np.int32)  # and of all kinds the one after the last; num_pages where a row decodes
        self.limit = np.zeros(num_rows, np.int32)  # tokens at which the sequence ends
        self.flights = np.zeros(num_rows, np.int32)  # steps in flight that compute the row
        self.steps = np.zeros(num_rows, np.int64)  # the number of the latest of all that compute it
        # These three are changed by the methods below alone.
        self.active = np.zeros(num_rows, np.bool_)  # RUNNING: tokens of returning steps count
        self.decoding = np.zeros(num_rows, np.bool_)  # all but the last token computed, and that one sampled by the runner
        self.parked = np.zeros(num_rows, np.bool_)
        self._ready = np.zeros(num_rows, np.bool_)  # active, decoding and not parked
        self.lockstep = np.zeros(num_rows, np.bool_)  # the next step needs the token of the one before: never two in flight
        self.lockstep_from = np.zeros(num_rows, np.int32)  # if so: tokens from which on
        self.num_processed = 0  # assigned rows with features other than RANDOM
        self.num_grammars = 0  # assigned rows with one
        self.max_drafts = np.zeros(num_rows, np.int32)  # in a step
        self.max_forced = np.zeros(num_rows, np.int32)  # the same of those that a grammar forces
        self.features = np.zeros(num_rows, np.int32)
        self.tenants = np.zeros(num_rows, np.int32)
        self._adapters = np.zeros(num_rows, np.int32)  # keys, 0 where there is none
        self.adapters = Counter[int]()  # of the assigned rows: by key, how many have it
        # Large tables are mapped lazily: only the parts that are used take memory.
        self._kinds = needs.kinds
        self._num_full = needs.num_full
        self.page_table = np.zeros((needs.num_groups, num_rows, needs.columns(max_model_len)), np.int32)  # 0: none
        self.tokens = np.zeros((num_rows, max_model_len), np.int32)
        self.stop_ids = np.full((num_rows, 4), -1, np.int32)  # padded with -1
        self._free = list(range(num_rows - 1, -1, -1))
        self.cycles: dict[int, OutputCycles] = {}  # by row, of the sequences that are to end for repeating themselves

    @property
    def num_free(self) -> int:
        return len(self._free)

    def assign(self, sequence: Sequence, tenant: int) -> int:
        """Give `sequence` a row; it holds no pages and has nothing computed yet."""
        row = self._free.pop()
        request = sequence.request
        num_tokens = len(sequence.tokens)
        self.sequences[row] = sequence
        self.keys[row] = request.key
        self.num_tokens[row] = self.num_known[row] = num_tokens
        self.num_computed[row] = self.num_committed[row] = self.num_published[row] = self.num_pages[row] = 0
        self.window_begins[:, row] = self.window_ends[row] = 0
        self.limit[row] = sequence.limit
        self.flights[row] = 0
        self.active[row] = True
        self.decoding[row] = self._ready[row] = False
        self.parked[row] = sequence.parked
        self.max_drafts[row] = self._max_drafts if request.max_drafts is None else min(request.max_drafts, self._max_drafts)
        self.max_forced[row] = self._max_forced if request.max_drafts is None else min(request.max_drafts, self._max_forced)
        self.features[row] = request.params.features
        self.num_processed += bool(request.params.features & ~Features.RANDOM)
        self.num_grammars += bool(request.params.features & Features.GRAMMAR)
        self.lockstep[row] = self._max_in_flight > 1 or bool(request.params.features & Features.LAST_TOKEN)
        only_grammar = self._max_in_flight == 1 and not request.params.features & Features.LAST_TOKEN & ~Features.GRAMMAR
        self.lockstep_from[row] = len(request.prompt) + request.params.grammar_from if only_grammar else 0
        self.tenants[row] = tenant
        self._adapters[row] = request.adapter
        if request.adapter:
            self.adapters[request.adapter] += 1
        self.tokens[row, :num_tokens] = sequence.tokens
        stop_ids = sorted(request.stop_token_ids | request.eos_token_ids)
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stop_ids)] = stop_ids
        if request.repetition is not None:
            if sequence.cycles is None:
                output = sequence.tokens[len(request.prompt) :]
                sequence.cycles = OutputCycles(request.repetition, output, request.params.min_tokens)
            self.cycles[row] = sequence.cycles
        sequence.row = row
        return row

    def clear(self, row: int) -> None:
        """Make the row free. Its pages must have been released."""
        sequence = self.sequences[row]
        assert sequence is not None
        sequence.row = -1
        self.sequences[row] = None
        self.cycles.pop(row, None)
        self.num_processed -= bool(self.features[row] & ~int(Features.RANDOM))
        self.num_grammars -= bool(self.features[row] & int(Features.GRAMMAR))
        self.active[row] = self.decoding[row] = self.parked[row] = self._ready[row] = False
        self.num_pages[row] = 0
        if adapter := sequence.request.adapter:
            self.adapters[adapter] -= 1
            if not self.adapters[adapter]:
                del self.adapters[adapter]
        self._free.append(row)

    def set_parked(self, row: int, parked: bool) -> None:
        self.parked[row] = parked
        self._ready[row] = self.active[row] and self.decoding[row] and not parked

    def set_decoding(self, row: int, decoding: bool) -> None:
        """Whether the row's next token is one that the runner sampled last."""
        self.decoding[row] = decoding
        self._ready[row] = self.active[row] and decoding and not self.parked[row]

    def deactivate(self, row: int) -> None:
        self.active[row] = self._ready[row] = False

    def ready(self, *, in_flight: bool) -> IntArray:
        """The rows that decode in the next step, ascending. `in_flight`: a step has not been committed yet."""
        ready = self._ready
        if in_flight:  # else a row at its limit has ended
            waits = self.lockstep & (self.flights > 0) & (self.num_tokens >= self.lockstep_from)
            ready = ready & (self.num_tokens < self.limit) & ~waits
        return ready.nonzero()[0].astype(np.int32)

    def share(self, ready: IntArray) -> IntArray:
        """The part of the `ready` rows, ascending, that the next step takes when the rows are divided evenly among the steps in flight:
        those whose latest step is the longest ago."""
        num_rows = -(-np.count_nonzero(self._ready) // self._max_in_flight)
        if len(ready) <= num_rows:
            return ready
        first: IntArray = ready[np.sort(self.steps[ready].argsort(kind="stable")[:num_rows])]
        return first

    def adapters_of(self, rows: IntArray) -> IntArray:
        """The adapter keys [n] of the given rows, 0 for a row without an adapter; empty if no row has one."""
        if not self.adapters:
            return NO_INTS
        keys: IntArray = self._adapters[rows]
        return keys if np.count_nonzero(keys) else NO_INTS

    def pages(self, row: int) -> IntArray:
        """The pages that the row holds, first to last."""
        pages = self.page_table[: self._num_full, row, : self.num_pages[row]].T.ravel()
        if not self._kinds:
            return pages
        return np.concatenate((pages, *(self.window_pages(number, row) for number in range(len(self._kinds)))))

    def window_pages(self, number: int, row: int) -> IntArray:
        """The pages that the row holds in the groups of the window kind `number`, first to last."""
        kind = self._kinds[number]
        columns = slice(self.window_begins[number, row], self.window_ends[row])
        return self.page_table[kind.begin : kind.end, row, columns].T.ravel()


@dataclass(frozen=True, slots=True)
class NewTokens:
    """t tokens of a returned step, in the order of its plan; those of a row follow each other."""

    rows: IntArray  # [t]
    positions: IntArray  # [t]
    tokens: IntArray  # [t]
    logprobs: TokenLogprobs | None  # as in `StepResult`
    repeats: NDArray[np.bool_]  # [t] whether its sequence ends with it, for repeating itself

    def select(self, tokens: NDArray[np.bool_ | np.int64]) -> NewTokens:
        """Some of the tokens: those with True in a mask [t], or those at the given indices."""
        logprobs = None if self.logprobs is None else self.logprobs.select(tokens)
        return NewTokens(self.rows[tokens], self.positions[tokens], self.tokens[tokens], logprobs, self.repeats[tokens])


def new_tokens(table: RowTable, plan: StepPlan, result: StepResult) -> tuple[NewTokens, IntArray]:
    """The new tokens, and [n] how many tokens of each of the plan's rows have their KV in pages now."""
    committed = plan.starts + plan.lengths
    at = slice(None) if plan.num_decodes == len(plan.rows) else plan.num_sampled.nonzero()[0]
    rows = plan.rows[at]
    if result.accepted is None:
        repeats = np.zeros(len(rows), np.bool_)
        if table.cycles:
            _until_repetition(table, rows, np.arange(len(rows), dtype=np.int32), np.ones(len(rows), np.int32), result.tokens, repeats)
        return NewTokens(rows, committed[at], result.tokens, result.logprobs, repeats), committed
    num_sampled = plan.num_sampled[at]
    firsts = np.cumsum(num_sampled) - num_sampled  # of each row, the index of its first token in the result
    positions = committed[at] - num_sampled + 1  # of these
    accepted = _until_end(table, rows, positions, firsts, num_sampled, result.accepted, result.tokens)
    repeats = np.zeros(len(result.tokens), np.bool_)
    if table.cycles:
        accepted = _until_repetition(table, rows, firsts, accepted, result.tokens, repeats)
    committed[at] -= num_sampled - accepted
    number = np.arange(accepted.sum(), dtype=np.int32) - np.repeat(np.cumsum(accepted) - accepted, accepted)  # within its row
    index = np.repeat(firsts, accepted) + number  # in the result
    logprobs = None if result.logprobs is None else result.logprobs.select(index)
    places = np.repeat(positions, accepted) + number
    return NewTokens(np.repeat(rows, accepted), places, result.tokens[index], logprobs, repeats[index]), committed


def _until_end(
    table: RowTable, rows: IntArray, positions: IntArray, firsts: IntArray, num_sampled: IntArray, accepted: IntArray, tokens: IntArray
) -> IntArray:
    """[m] `accepted` without the tokens behind the one that ends a row."""
    accepted = np.minimum(accepted, table.limit[rows] - positions).clip(0)
    stops = np.flatnonzero((tokens[:, None] == table.stop_ids[np.repeat(rows, num_sampled)]).any(axis=1))
    if len(stops):
        found = np.append(stops, len(tokens))[np.searchsorted(stops, firsts)]  # the first at or behind each row's first token
        accepted = np.minimum(accepted, found - firsts + 1)
    return accepted


def _until_repetition(
    table: RowTable, rows: IntArray, firsts: IntArray, accepted: IntArray, tokens: IntArray, repeats: NDArray[np.bool_]
) -> IntArray:
    """[m] `accepted` without the tokens behind the first with which a row has repeated itself enough, which is noted in `repeats`."""
    accepted = accepted.copy()
    for i, row in enumerate(rows.tolist()):
        if (cycles := table.cycles.get(row)) is not None:
            first = int(firsts[i])
            for at in range(first, first + int(accepted[i])):
                if cycles.add_token(int(tokens[at])):
                    accepted[i], repeats[at] = at - first + 1, True
                    break
    return accepted
