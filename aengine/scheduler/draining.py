"""Who waits until all sequences that have begun are gone, so that the model can change between them. Knows neither rows nor the queue."""

from __future__ import annotations

from aengine.scheduler.request import Sequence


class Draining:
    def __init__(self) -> None:
        self.on = False  # whether sequences that have not begun wait
        self._waiting: dict[Sequence, None] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def wait(self, sequence: Sequence) -> bool:
        """Whether the sequence cannot begin now; if so, it waits."""
        if not self.on or sequence.begun:
            return False
        self._waiting[sequence] = None
        return True

    def stop_waiting(self, sequence: Sequence) -> None:
        """The sequence no longer waits, if it did."""
        self._waiting.pop(sequence, None)

    def end(self) -> list[Sequence]:
        """Sequences may begin. Returns those that waited."""
        self.on = False
        woken, self._waiting = list(self._waiting), {}
        return woken
