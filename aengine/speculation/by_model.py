"""`ModelDrafter`: drafts of a smaller model, which runs beside the model in the runner. Owns how far it has computed each row."""

from __future__ import annotations

import numpy as np

from aengine.scheduler.drafter import BY_MODEL, Draft, DraftSource
from aengine.scheduler.plan import IntArray


class ModelDrafter:
    """Satisfies `Drafter`."""

    def __init__(self, max_rows: int, source: DraftSource = DraftSource.MODEL) -> None:
        self._source = source
        self._computed = np.full(max_rows, -1)  # tokens of a row; -1: its prompt, which is computed with that of the model

    def assign(self, row: int) -> None:
        self._computed[row] = -1

    def propose(self, row: int, tokens: IntArray, most: int) -> Draft:
        if self._computed[row] < 0:
            self._computed[row] = len(tokens) - 1
        return Draft(np.full(most, BY_MODEL, np.int32), self._source, len(tokens) - int(self._computed[row]))

    def observe(self, row: int, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        """The last of its drafts it has proposed, and not computed."""
        self._computed[row] = num_tokens + min(num_accepted, num_drafts - 1)
