"""`ModelDrafter`: drafts of a smaller model, which runs beside the model in the runner."""

from __future__ import annotations

import numpy as np

from aengine.scheduler.drafter import BY_MODEL, NO_DRAFT, Acceptance, Draft, DraftSource
from aengine.scheduler.plan import IntArray


class ModelDrafter:
    """Satisfies `Drafter`."""

    def __init__(self, source: DraftSource = DraftSource.MODEL) -> None:
        self._source = source
        self._acceptance = Acceptance(0.6)

    def assign(self, row: int) -> None:
        pass

    def propose(self, row: int, tokens: IntArray, most: int, *, by_model: bool = True) -> Draft:
        if not by_model:
            return NO_DRAFT
        return Draft(np.full(most, BY_MODEL, np.int32), self._source, self._acceptance.value)

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        self._acceptance.add(len(draft.token_ids), num_accepted)
