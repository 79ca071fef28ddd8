"""How many drafts pay: which of the drafts that there are for a step make it bring the most tokens per second.

Owns what is measured for it: how often the drafts of each row were accepted, and how long steps take. Knows nothing of pages or plans.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

LIKELY = 0.6
"""Taken for the acceptance of a row's drafts before any was tried."""
_MEMORY = 0.85  # of an average: what the past counts
_MOST_WIDE = 512  # tokens of a step; wider ones are not told apart
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64  # tokens


class DraftLengths:
    def __init__(self, num_rows: int) -> None:
        self._acceptance = np.full(num_rows, LIKELY)
        self._pause = np.full(num_rows, _FIRST_PAUSE)  # the next one of a row, in tokens
        self._resume = np.zeros(num_rows, np.int64)  # a row's number of tokens at which drafts are tried again
        self._plain = _StepSeconds()  # of steps without drafts, which may run ahead
        self._verifying = _StepSeconds()

    def assign(self, row: int) -> None:
        self._acceptance[row] = LIKELY
        self._pause[row] = _FIRST_PAUSE
        self._resume[row] = 0

    def tried(self, rows: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """For which of the rows, which have so many tokens, drafts are to be tried again."""
        return num_tokens >= self._resume[rows]

    def choose(self, num_decodes: int, found: Mapping[int, int]) -> dict[int, int]:
        """How many drafts each row gets, of the number that was `found` for it, in a step in which `num_decodes` rows decode.

        With acceptance a the j-th draft of a row brings a^j tokens more. The likeliest are added while tokens per second rise; where the
        time of wider steps is not known yet, it is taken to be that of narrower ones, and so becomes known.
        """
        gains = sorted(
            ((float(self._acceptance[row]) ** j, row) for row, count in found.items() for j in range(1, count + 1)), reverse=True
        )
        plain = self._plain.of(num_decodes)
        tokens = num_decodes + np.cumsum([gain for gain, _ in gains])
        seconds = self._verifying.from_narrow(np.arange(num_decodes + 1, num_decodes + len(gains) + 1), num_decodes, plain)
        rates = np.append(num_decodes / plain, tokens / seconds)
        num_best = int(rates.argmax())
        chosen = dict.fromkeys(found, 0)
        for _, row in gains[:num_best]:
            chosen[row] += 1
        return chosen

    def observe(self, row: int, num_tokens: int, drafted: int, accepted: int) -> None:
        """Of a row's `drafted` drafts so many were `accepted`; the row has `num_tokens` tokens now. With none drafted the row pauses, each
        time for longer."""
        if not drafted:
            self._resume[row] = num_tokens + int(self._pause[row])
            self._pause[row] = min(2 * int(self._pause[row]), _LONGEST_PAUSE)
            self._acceptance[row] = max(self._acceptance[row], LIKELY)
            return
        tried = min(accepted + 1, drafted)  # those behind a rejected one say nothing
        old = _MEMORY**tried
        self._acceptance[row] = old * self._acceptance[row] + (1 - old) * accepted / tried
        if accepted:
            self._pause[row] = _FIRST_PAUSE

    def step_took(self, seconds: float, num_tokens: int, *, verifying: bool) -> None:
        (self._verifying if verifying else self._plain).add(num_tokens, seconds)


class _StepSeconds:
    """Moving averages of the seconds of steps, by their number of tokens."""

    def __init__(self) -> None:
        self._seconds: NDArray[np.float64] = np.zeros(_MOST_WIDE + 1)  # 0: not known

    def add(self, num_tokens: int, seconds: float) -> None:
        at, seconds = min(num_tokens, _MOST_WIDE), max(seconds, 1e-9)
        known = float(self._seconds[at])
        # One step that took long, for whatever reason, changes little.
        self._seconds[at] = _MEMORY * known + (1 - _MEMORY) * min(seconds, 2 * known) if known else seconds

    def of(self, num_tokens: int) -> float:
        """Of the nearest known width; 1 while none is known."""
        known = self._seconds.nonzero()[0]
        return float(self._seconds[known[np.abs(known - num_tokens).argmin()]]) if len(known) else 1.0

    def from_narrow(self, widths: NDArray[np.int64], narrow: int, seconds: float) -> NDArray[np.float64]:
        """Of wider steps than one of `narrow` tokens that takes `seconds`: between known widths in proportion, beyond them as the last."""
        known = self._seconds.nonzero()[0]
        known = known[known > narrow]
        result: NDArray[np.float64] = np.interp(widths, np.append(narrow, known), np.append(seconds, self._seconds[known]))
        return result
