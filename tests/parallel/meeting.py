"""What replicas in threads tell each other, in place of collectives."""

from __future__ import annotations

import threading

from hang_guard import HANG_SECONDS

SECONDS = HANG_SECONDS
"""What is waited for comes within this time, on any machine."""


class Meeting:
    """An all-gather of numbers between threads: a turn ends when all have come."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._numbers = [0] * size

    def exchange(self, index: int, number: int) -> list[int]:
        self._numbers[index] = number
        self._barrier.wait(SECONDS)
        found = list(self._numbers)
        self._barrier.wait(SECONDS)
        return found
