"""`DeviceAdapters`: the adapters of a `DeviceExecutor`, and which of them are on the device.

All that are loaded are in host memory. Those of a step's rows are copied to the slots of the device that were used longest ago.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aengine.layers.adapters import AdapterTable, PackedAdapter
from aengine.runner.contract import Step
from aengine.scheduler.plan import NO_INTS


class DeviceAdapters:
    """All methods are called on the stream of the steps."""

    def __init__(self, table: AdapterTable) -> None:
        self.table = table
        self._packed: dict[int, PackedAdapter] = {}
        self._slots: dict[int, int] = {}  # by key, the one that was used longest ago first
        self._free = list(range(table.num_slots))

    def set(self, key: int, packed: PackedAdapter | None) -> None:
        """Lets steps have the adapter with this key from now on. None: they have it no more, and its slot is free."""
        if packed is not None:
            self._packed[key] = packed
            return
        del self._packed[key]
        if key in self._slots:
            self._free.append(self._slots.pop(key))

    def forget_slots(self) -> None:
        """Forgets which adapters are on the device, so that each is copied again at its next use. Slots may hold anything finite from now
        on."""
        self._slots.clear()
        self._free = list(range(self.table.num_slots))

    def begin(self, step: Step) -> None:
        """To be called before the forward pass of a step: puts its adapters in slots, of which there are enough, and notes the slot of each
        token."""
        self.table.on = len(step.adapters) > 0
        if not self.table.on:
            self.table.write_slots(NO_INTS)  # for graphs
            return
        keys, of_rows = np.unique(step.adapters, return_inverse=True)
        used = keys.tolist()
        slots = np.array([self._slot(key, used) for key in used], dtype=np.int32)
        self.table.write_slots(np.repeat(slots[of_rows], np.diff(step.layout.qo_indptr)))

    def _slot(self, key: int, used: Sequence[int]) -> int:
        """The slot of an adapter, copied to it if it is in none; `num_slots` for key 0, which is no adapter. Those in `used` stay."""
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
