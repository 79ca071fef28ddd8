"""A histogram that is cheap to fill: fixed bounds, one count per bucket. Knows nothing of what is measured or of who reads it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """The counts at one moment. A bucket holds the values above the bound before it, up to its own; the last one has no bound."""

    bounds: tuple[float, ...] = ()  # ascending
    counts: tuple[int, ...] = (0,)  # one more than bounds
    total: float = 0.0  # the sum of all values


class Histogram:
    """To be filled by one thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending upper bounds of all buckets but the last."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, other: Histogram) -> None:
        """Add the counts of one with the same bounds."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self.bounds, tuple(self.counts), self.total)
