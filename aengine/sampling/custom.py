"""Logits processors of users. Owns the token history that they are shown, on the host: the scheduler lets these rows wait for each
token. What one of them raises fails its row and no other.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.draw_params import HIGHEST_LOGIT
from aengine.params import LogitsProcessor
from aengine.scheduler.plan import NewRow


class CustomProcessors:
    def __init__(self, max_rows: int) -> None:
        self._has = np.zeros(max_rows, dtype=np.bool_)
        self._processors: dict[int, tuple[LogitsProcessor, ...]] = {}
        self._tokens: dict[int, list[int]] = {}

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Takes over the processors and the tokens of rows that changed hands."""
        for new in new_rows:
            self._has[new.row] = bool(new.params.processors)
            self._processors.pop(new.row, None)
            self._tokens.pop(new.row, None)
            if new.params.processors:
                self._processors[new.row] = new.params.processors
                self._tokens[new.row] = new.tokens.tolist()

    def apply(self, logits: Tensor, rows: NDArray[np.int32], *, but: Set[int] = frozenset()) -> dict[int, Exception]:
        """Lets the processors change the [m, V] logits of `rows`, those in `but` excepted, in place; infinity becomes `HIGHEST_LOGIT`.
        Returns what they raised, by row."""
        failures: dict[int, Exception] = {}
        for at in np.flatnonzero(self._has[rows]).tolist():
            row = int(rows[at])
            if row in but:
                continue
            try:
                for processor in self._processors[row]:
                    # A copy of the tokens: a processor may keep or change what it gets.
                    processor(logits[at], list(self._tokens[row]))
                logits[at].clamp_(max=HIGHEST_LOGIT)
            except Exception as error:  # belongs to this row alone
                failures[row] = error
        return failures

    def has(self, row: int) -> bool:
        return bool(self._has[row])

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Appends the [m] tokens to `rows`."""
        for at in np.flatnonzero(self._has[rows]).tolist():
            self._tokens[int(rows[at])].append(int(tokens[at]))
