"""`BestOfBoth`: n-gram drafts where they are likely, else those of a model."""

from __future__ import annotations

from aengine.scheduler.drafter import Draft, DraftSource
from aengine.scheduler.plan import IntArray
from aengine.speculation.by_model import ModelDrafter
from aengine.speculation.ngram import NgramDrafter


class BestOfBoth:
    """Satisfies `Drafter`."""

    def __init__(self, ngram: NgramDrafter, model: ModelDrafter) -> None:
        self._ngram = ngram
        self._model = model

    def assign(self, row: int) -> None:
        self._ngram.assign(row)
        self._model.assign(row)

    def propose(self, row: int, tokens: IntArray, most: int, *, by_model: bool = True) -> Draft:
        looked_up = self._ngram.propose(row, tokens, most)
        if not by_model:
            return looked_up
        drawn = self._model.propose(row, tokens, most)
        return looked_up if len(looked_up.token_ids) and looked_up.acceptance >= drawn.acceptance else drawn

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        drafter = self._ngram if draft.source is DraftSource.NGRAM else self._model
        drafter.observe(row, num_tokens, draft, num_accepted)
