"""`Deadlines`: whose time is over. Knows nothing of what a request is."""

from __future__ import annotations

import heapq
from collections.abc import Collection


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # deadline, key; some keys may be gone

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> float | None:
        """The first, maybe of a key that is gone."""
        return self._heap[0][0] if self._heap else None

    def add(self, deadline: float, key: int, keys: Collection[int]) -> None:
        """`keys`: all that are not gone."""
        if len(self._heap) > 2 * len(keys) + 64:  # mostly of those that are
            self._heap = [entry for entry in self._heap if entry[1] in keys]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline, key))

    def take_passed(self, now: float) -> list[int]:
        """The keys whose deadlines have passed, maybe some that are gone."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heapq.heappop(self._heap)[1])
        return passed
