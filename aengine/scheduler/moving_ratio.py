"""The ratio of two sums over what came last, in constant memory. Knows nothing of what is summed."""

from __future__ import annotations

import math


class MovingRatio:
    """What was added fades as more is added: after `span` of it 1/e is left."""

    __slots__ = ("_denominator", "_numerator", "_span", "_start")

    def __init__(self, span: float, start: float = 0.0) -> None:
        """`start`: the ratio as long as there is none."""
        self._span = span
        self._start = start
        self._numerator = self._denominator = 0.0

    def add(self, numerator: float, denominator: float, amount: float) -> None:
        """Adds to the two sums, after both have faded by exp(-`amount` / `span`). `amount` is in the unit of `span`, such as tokens or
        steps."""
        left = math.exp(-amount / self._span)
        self._numerator = self._numerator * left + numerator
        self._denominator = self._denominator * left + denominator

    @property
    def value(self) -> float:
        return self._numerator / self._denominator if self._denominator else self._start
