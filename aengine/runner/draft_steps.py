"""The steps of a draft model that precede a step of the model: the same chunks of prompts, and one step for each draft of a row.

Knows nothing of the models. The page table is that of the model: a draft model has pages of its own under the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aengine.attention import build_layout
from aengine.runner.base import IntArray, Step
from aengine.scheduler.plan import NO_INTS, StepPlan


def with_drafts(plan: StepPlan, page_table: IntArray, page_size: int, run: Callable[[Step], IntArray]) -> IntArray:
    """The `token_ids` of a plan with the drafts that the draft model proposes. `run` computes a step of it, and returns its tokens.

    `page_table` [1, rows, columns] is of a group without a window.
    """
    numbers, num_drafts = np.arange(len(plan.rows)), plan.num_sampled - 1
    ends = np.cumsum(np.where(numbers < plan.num_decodes, 0, plan.lengths))  # in token_ids
    chunks = numbers[(numbers >= plan.num_decodes) & (num_drafts <= 0)]
    rows, starts, lengths = plan.rows[chunks], plan.starts[chunks], plan.lengths[chunks]
    pieces = [plan.token_ids[end - length : end] for end, length in zip(ends[chunks], lengths, strict=True)]
    drafted = plan.draft_rows
    if drafted is None:
        if len(chunks):
            layout = build_layout(rows, 0, starts, lengths, page_table, page_size)
            run(Step(plan.step, layout, rows, np.concatenate(pieces), NO_INTS, NO_INTS, NO_INTS))
        return plan.token_ids
    rows, starts = np.concatenate((rows, drafted.rows)), np.concatenate((starts, drafted.starts))
    lengths = np.concatenate((lengths, drafted.lengths))
    layout = build_layout(rows, 0, starts, lengths, page_table, page_size)
    ids = np.concatenate((*pieces, drafted.token_ids))
    positions = drafted.starts + drafted.lengths  # of the drafts
    tokens = run(Step(plan.step, layout, rows, ids, layout.qo_indptr[1:][len(chunks) :] - 1, drafted.rows, positions))
    at = numbers[np.isin(plan.rows, drafted.rows)]
    places, left = ends[at] - num_drafts[at], num_drafts[at]
    token_ids, rows = plan.token_ids.copy(), drafted.rows
    while True:
        token_ids[places] = tokens
        going = left > 1
        if not going.any():
            return token_ids
        rows, tokens, positions, places, left = (array[going] for array in (rows, tokens, positions, places + 1, left - 1))
        layout = build_layout(rows, 0, positions, np.ones(len(rows), np.int32), page_table, page_size)
        positions = positions + 1
        tokens = run(Step(plan.step, layout, rows, tokens, layout.qo_indptr[:-1], rows, positions))
