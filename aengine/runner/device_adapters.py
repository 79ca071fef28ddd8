"""`DeviceAdapters`: the adapters of a `DeviceExecutor`, and which of them are on the device.

All that are loaded are in host memory. Those of a step's rows are copied to the slots of the device that were used longest ago.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aengine.layers.adapters import AdapterTable, PackedAdapter
from aengine.runner.base import Step
from aengine.scheduler.plan import NO_INTS


class DeviceAdapters:
    """All methods are called on the stream of the steps."""

    def __init__(self, table: AdapterTable) -> None:
        self.table = table
        self._packed: dict[int, PackedAdapter] = {}
        self._slots: dict[int, int] = {}  # by key, the one that was used longest ago first
        self._free = list(range(table.num_slots))

    def set(self, key: int, packed: PackedAdapter | None) -> None:
        """As `Executor.set_adapter`."""
        if packed is not None:
            self._packed[key] = packed
            return
        del self._packed[key]
        if key in self._slots:
            self._free.append(self._slots.pop(key))

    def forget_slots(self) -> None:
        """Those of the device may hold anything finite afterwards."""
        self._slots.clear()
        self._free = list(range(self.table.num_slots))

    def begin(self, step: Step) -> None:
        """Before the forward pass of a step: its adapters are in slots, of which there are enough."""
        self.table.on = len(step.adapters) > 0
        if not self.table.on:
            self.table.write_slots(NO_INTS)  # for graphs
            return
        keys, of_rows = np.unique(step.adapters, return_inverse=True)
        used = keys.tolist()
        slots = np.array([self._slot(key, used) for key in used], dtype=np.int32)
        self.table.write_slots(np.repeat(slots[of_rows], np.diff(step.layout.qo_indptr)))

    def _slot(self, key: int, used: Sequence[int]) -> int:
        """`num_slots` for 0, which is no adapter."""
        if key == 0:
            return self.table.num_slots
        slot = self._slots.pop(key, None)
        if slot is None:
            if not self._free:
                self._free.append(self._slots.pop(next(other for other in self._slots if other not in used)))
            slot = self._free.pop()
            self.table.put(slot, self._packed[key])
        self._slots[key] = slot
        return slot
