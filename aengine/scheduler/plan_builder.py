"""`PlanBuilder`: the `StepPlan` of the rows that were chosen for a step. Knows no policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aengine.scheduler.drafter import NO_DRAFT, Draft
from aengine.scheduler.plan import NO_INTS, DraftRows, Features, IntArray, StepPlan
from aengine.scheduler.residency import RowChanges
from aengine.scheduler.rows import RowTable

_GRAMMAR = int(Features.GRAMMAR)
_OF_PROMPTS = int(Features.OF_PROMPTS)


@dataclass(slots=True)
class Chunk:
    """The tokens of one row in a step: a part of its prompt, or its last token with drafts."""

    row: int
    start: int
    length: int
    num_sampled: int
    draft: Draft = NO_DRAFT  # the last of its tokens, which are not the sequence's yet

    @property
    def end(self) -> int:
        """The position behind its tokens that are the sequence's."""
        return self.start + self.length - len(self.draft.token_ids)


class PlanBuilder:
    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._ones = np.ones(len(rows.sequences), np.int32)  # of a step of decodes alone: their lengths, and how many tokens each samples

    def build(
        self, step: int, decodes: IntArray, chunks: list[Chunk], changes: RowChanges, draft_rows: DraftRows | None, *, wants_forced: bool
    ) -> StepPlan:
        """Counts what the step computes and samples as computed and sampled. What grammars force it only wants to know if there are any."""
        rows = self._rows
        num_decodes, num_rows = len(decodes), len(decodes) + len(chunks)
        plan_rows, lengths = decodes, self._ones[:num_rows]
        num_sampled = num_certain = lengths  # certain: tokens that are the sequence's, which drafts are not
        scores_prompts = False
        if chunks:
            added = np.array([(chunk.row, chunk.length, chunk.num_sampled) for chunk in chunks], np.int32)
            plan_rows = np.concatenate((decodes, added[:, 0]))
            lengths = np.concatenate((self._ones[:num_decodes], added[:, 1]))
            num_sampled = np.concatenate((self._ones[:num_decodes], added[:, 2]))
            num_certain = np.where(num_sampled > 1, 1, lengths)
            scores_prompts = bool(np.count_nonzero(rows.features[added[:, 0]] & _OF_PROMPTS))
        starts = rows.num_computed[plan_rows]
        rows.num_computed[plan_rows] = starts + num_certain
        rows.num_tokens[plan_rows] += num_sampled > 0
        rows.flights[plan_rows] += 1
        rows.steps[plan_rows] = step
        pieces = [piece for chunk in chunks for piece in (rows.tokens[chunk.row, chunk.start : chunk.end], chunk.draft.token_ids)]
        page_groups = page_rows = page_cols = page_ids = copy_from = copy_to = NO_INTS
        if len(changes.page_writes) == 1:
            ((page_groups, page_rows, page_cols, page_ids),) = changes.page_writes
        elif changes.page_writes:
            page_groups, page_rows, page_cols, page_ids = map(np.concatenate, zip(*changes.page_writes, strict=True))
        if changes.copies:
            copy_from, copy_to = map(np.concatenate, zip(*changes.copies.values(), strict=True))
        return StepPlan(
            step=step,
            rows=plan_rows,
            num_decodes=num_decodes,
            starts=starts,
            lengths=lengths,
            num_sampled=num_sampled,
            token_ids=np.concatenate(pieces) if pieces else NO_INTS,
            new_rows=tuple(changes.new_rows.values()),
            page_groups=page_groups,
            page_rows=page_rows,
            page_cols=page_cols,
            page_ids=page_ids,
            copy_from=copy_from,
            copy_to=copy_to,
            draft_rows=draft_rows,
            wants_forced=wants_forced and rows.num_grammars > 0 and bool(np.count_nonzero(rows.features[plan_rows] & _GRAMMAR)),
            scores_prompts=scores_prompts,
            adapters=rows.adapters_of(plan_rows),
        )
