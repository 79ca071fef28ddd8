"""The steps of a draft model that precede a step of the model: one for the tokens that it lacks, and one for each further draft of a row.

Knows nothing of the models. The page table is that of the model: a draft model has pages of its own under the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from aengine.attention import StepLayout, build_layout
from aengine.runner.contract import IntArray, Step
from aengine.scheduler.plan import NO_INTS, DraftRows, StepPlan


def with_drafts(
    plan: StepPlan, drafted: DraftRows, page_table: IntArray, page_size: int, run: Callable[[Step], IntArray], *, is_head: bool
) -> IntArray:
    """The `token_ids` of a plan with the drafts that the draft model proposes for the rows that are `drafted`. `run` computes a step of it
    and returns its tokens; decodes go on from what it sampled last for their rows.

    `page_table` [1, rows, columns] is of a group without a window. A head has a token at the position before it, beside the model's hidden
    state of that position. So it has no first tokens.
    """
    behind = int(is_head)  # how far its positions are behind those of its tokens
    starts, lengths, ids = drafted.starts - behind, drafted.lengths, drafted.token_ids
    all_rows, num_drafts = drafted.rows, drafted.num_drafts
    if (starts < 0).any():
        numbers = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # within their rows
        lengths, starts, ids = lengths + np.minimum(starts, 0), np.maximum(starts, 0), ids[numbers + np.repeat(starts, lengths) >= 0]
        all_rows, starts, lengths, num_drafts = (array[lengths > 0] for array in (all_rows, starts, lengths, num_drafts))
        if not len(all_rows):
            return plan.token_ids

    def next_slots(rows: IntArray, layout: StepLayout, of: slice | NDArray[np.int64] = slice(None)) -> IntArray:
        positions = layout.seq_lens[of]
        return page_table[0, rows, positions // page_size] * page_size + positions % page_size if is_head else NO_INTS

    layout = build_layout(all_rows, 0, starts, lengths, page_table, page_size)
    at = num_drafts.nonzero()[0]
    rows, num_drafts, positions = all_rows[at], num_drafts[at], layout.seq_lens[at]  # the latter behind those of the step
    step = plan.step, layout, all_rows, ids, layout.qo_indptr[1:][at] - 1, rows, positions + behind
    tokens = run(Step(*step, kept_slots=next_slots(rows, layout, at)))
    if not len(at):
        return plan.token_ids
    ends = np.zeros(len(page_table[0]), np.int64)  # by row, in token_ids
    ends[plan.rows] = np.cumsum(np.where(np.arange(len(plan.rows)) < plan.num_decodes, 0, plan.lengths))
    token_ids, places = plan.token_ids.copy(), ends[rows] - num_drafts
    token_ids[places] = tokens
    going = [(num_drafts > number).nonzero()[0] for number in range(1, num_drafts.max())]  # in each further step
    for number, (of, layout) in enumerate(zip(going, _decodes(rows, positions, going, page_table, page_size), strict=True), 1):
        step = plan.step, layout, rows[of], NO_INTS, layout.qo_indptr[:-1], rows[of], layout.seq_lens + behind
        token_ids[places[of] + number] = run(Step(*step, kept_slots=next_slots(rows[of], layout)))
    return token_ids


def _decodes(
    rows: IntArray, positions: IntArray, going: list[NDArray[np.int64]], page_table: IntArray, page_size: int
) -> Iterator[StepLayout]:
    """The layouts of steps that follow one another, in which those of the rows that are `going` decode, at first at `positions`. They are
    made at once, since a draft model may take no longer for a step than one layout takes."""
    if not going:
        return
    joined = np.concatenate(going)
    numbers = np.repeat(np.arange(len(going), dtype=np.int32), [len(of) for of in going])
    every = build_layout(rows[joined], len(joined), positions[joined] + numbers, np.ones(len(joined), np.int32), page_table, page_size)
    begin = 0
    for of in going:
        end = begin + len(of)
        first_page, end_page = every.kv_indptr[begin], every.kv_indptr[end]
        yield StepLayout(
            page_size=page_size,
            num_decodes=len(of),
            qo_indptr=every.qo_indptr[: len(of) + 1],
            kv_indptr=every.kv_indptr[begin : end + 1] - first_page,
            kv_indices=every.kv_indices[:, first_page:end_page],
            last_page_len=every.last_page_len[begin:end],
            seq_lens=every.seq_lens[begin:end],
            positions=every.positions[begin:end],
            slot_mapping=every.slot_mapping[:, begin:end],
        )
        begin = end
