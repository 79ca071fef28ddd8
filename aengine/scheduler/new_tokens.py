"""Which tokens a returned step adds to its rows: drafts are accepted up to the first that is not what was sampled, and a row ends at its
first stop token. Knows nothing of sequences or pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aengine.scheduler.plan import IntArray, StepPlan, StepResult, TokenLogprobs
from aengine.scheduler.rows import RowTable


@dataclass(frozen=True, slots=True)
class NewTokens:
    """t tokens of a returned step, in the order of its plan; those of a row follow each other."""

    rows: IntArray  # [t]
    positions: IntArray  # [t]
    tokens: IntArray  # [t]
    logprobs: TokenLogprobs | None  # as in `StepResult`

    def select(self, tokens: NDArray[np.bool_ | np.int64]) -> NewTokens:
        """Those with True in a mask [t], or at the given indices."""
        logprobs = None if self.logprobs is None else self.logprobs.select(tokens)
        return NewTokens(self.rows[tokens], self.positions[tokens], self.tokens[tokens], logprobs)


def new_tokens(table: RowTable, plan: StepPlan, result: StepResult) -> tuple[NewTokens, IntArray]:
    """The new tokens, and [n] how many tokens of each of the plan's rows have their KV in pages now."""
    committed = plan.starts + plan.lengths
    at = slice(None) if plan.num_decodes == len(plan.rows) else plan.num_sampled.nonzero()[0]
    rows = plan.rows[at]
    if result.accepted is None:
        return NewTokens(rows, committed[at], result.tokens, result.logprobs), committed
    num_sampled = plan.num_sampled[at]
    firsts = np.cumsum(num_sampled) - num_sampled  # of each row, the index of its first token in the result
    positions = committed[at] - num_sampled + 1  # of these
    accepted = _until_end(table, rows, positions, firsts, num_sampled, result.accepted, result.tokens)
    committed[at] -= num_sampled - accepted
    number = np.arange(accepted.sum(), dtype=np.int32) - np.repeat(np.cumsum(accepted) - accepted, accepted)  # within its row
    index = np.repeat(firsts, accepted) + number  # in the result
    logprobs = None if result.logprobs is None else result.logprobs.select(index)
    return NewTokens(np.repeat(rows, accepted), np.repeat(positions, accepted) + number, result.tokens[index], logprobs), committed


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
