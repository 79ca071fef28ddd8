"""Who waits for others to end because the runner has room for so many adapters only.

Knows which adapters rows have, not the waiting queue.
"""

from __future__ import annotations

import numpy as np

from aengine.scheduler.request import Sequence
from aengine.scheduler.rows import RowTable


class AdapterRoom:
    """Sequences with at most `most` different adapters have rows; None: any number.

    While some wait, as many sequences with adapters as there are rows are admitted, and then none until an adapter has left all rows. So
    those whose adapters are in use cannot keep the others out: the place of an adapter goes to whom the queue has first.
    """

    def __init__(self, rows: RowTable, most: int | None) -> None:
        self._rows = rows
        self._most = len(rows.sequences) if most is None else most
        self._waiting: dict[Sequence, None] = {}
        self._num_passed = 0  # sequences with adapters that were admitted while some waited

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def wait(self, sequence: Sequence) -> bool:
        """Whether a sequence cannot have a row now because of its adapter; if so, it waits."""
        adapter, in_use = sequence.request.adapter, self._rows.adapters
        if not adapter:
            return False
        is_full = adapter not in in_use and len(in_use) >= self._most
        if is_full or (self._waiting and self._num_passed >= len(self._rows.sequences)):
            self._waiting[sequence] = None
            return True
        return False

    def stop_waiting(self, sequence: Sequence) -> None:
        """The sequence no longer waits, if it did."""
        self._waiting.pop(sequence, None)

    def admit(self, sequence: Sequence) -> None:
        """The sequence gets a row."""
        self._num_passed += bool(self._waiting and sequence.request.adapter)

    def leave(self, adapter: int) -> list[Sequence]:
        """A row with the adapter is free. Returns the sequences that waited, if it was the last one."""
        if not adapter or adapter in self._rows.adapters:
            return []
        woken, self._waiting, self._num_passed = list(self._waiting), {}, 0
        return woken

    def parked(self) -> list[Sequence]:
        """If others wait: the sequences of an adapter that parked sequences alone have, none of them in a step in flight."""
        if not self._waiting:
            return []
        rows = self._rows
        idle = [rows.sequences[row] for row in np.flatnonzero(rows.active & rows.parked & (rows.flights == 0)).tolist()]
        for adapter, count in rows.adapters.items():
            users = [one for one in idle if one is not None and one.request.adapter == adapter]
            if len(users) == count:
                return users
        return []
