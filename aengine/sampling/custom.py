"""Logits processors of users. Owns the tokens that they are shown, on the host: the scheduler lets these rows wait for each token.
What one of them raises fails its row and no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.draw_params import HIGHEST_LOGIT
from aengine.params import LogitsProcessor
from aengine.sampling.processors import Processor, StepRows
from aengine.scheduler.plan import Features, NewRow


class CustomProcessors(Processor):
    feature = int(Features.PROCESSORS)

    def __init__(self) -> None:
        self._rows: dict[int, tuple[tuple[LogitsProcessor, ...], list[int]]] = {}  # processors, and the tokens so far

    def update(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            self._rows.pop(new.row, None)
            if new.params.processors:
                self._rows[new.row] = new.params.processors, new.tokens.tolist()

    def apply(self, logits: Tensor, step: StepRows, members: NDArray[np.int64]) -> None:
        """Infinity becomes `HIGHEST_LOGIT`."""
        for index, row in zip(members.tolist(), step.rows[members].tolist(), strict=True):
            if index in step.postponed:
                continue
            processors, tokens = self._rows[row]
            drafts = step.drafts_before(index)
            try:
                for processor in processors:
                    processor(logits[index], tokens + drafts)  # a new list, which it may keep or change
                logits[index].clamp_(max=HIGHEST_LOGIT)
            except Exception as error:  # belongs to this row alone
                if drafts:
                    step.postponed.add(index)
                else:
                    step.failures[row] = error

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int64]) -> Mapping[int, Exception]:
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._rows[row][1].append(token)
        return {}
