"""The steps of a draft model that precede a step of the model: one for the tokens that it lacks, and one for each further draft of a row.

Knows nothing of the models. The page table is that of the model: a draft model has pages of its own under the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aengine.attention import build_layout
from aengine.runner.base import IntArray, Step
from aengine.scheduler.plan import NO_INTS, DraftRows, StepPlan


def with_drafts(plan: StepPlan, drafted: DraftRows, page_table: IntArray, page_size: int, run: Callable[[Step], IntArray]) -> IntArray:
    """The `token_ids` of a plan with the drafts that the draft model proposes for the rows that are `drafted`. `run` computes a step of it
    and returns its tokens; decodes go on from what it sampled last for their rows.

    `page_table` [1, rows, columns] is of a group without a window.
    """
    layout = build_layout(drafted.rows, 0, drafted.starts, drafted.lengths, page_table, page_size)
    at = drafted.num_drafts.nonzero()[0]
    rows, left, positions = drafted.rows[at], drafted.num_drafts[at], layout.seq_lens[at]  # of the drafts
    tokens = run(Step(plan.step, layout, drafted.rows, drafted.token_ids, layout.qo_indptr[1:][at] - 1, rows, positions))
    if not len(at):
        return plan.token_ids
    ends = np.zeros(len(page_table[0]), np.int64)  # by row, in token_ids
    ends[plan.rows] = np.cumsum(np.where(np.arange(len(plan.rows)) < plan.num_decodes, 0, plan.lengths))
    token_ids, places = plan.token_ids.copy(), ends[rows] - left
    while True:
        token_ids[places] = tokens
        going = left > 1
        if not going.any():
            return token_ids
        rows, positions, places, left = rows[going], positions[going], places[going] + 1, left[going] - 1
        layout = build_layout(rows, len(rows), positions, np.ones(len(rows), np.int32), page_table, page_size)
        positions = layout.seq_lens
        tokens = run(Step(plan.step, layout, rows, NO_INTS, layout.qo_indptr[:-1], rows, positions))
