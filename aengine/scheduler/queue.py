"""The order in which waiting sequences are admitted. Knows who is next, not whether there is room.

1. Lower priority number first, where waiting `ageing_seconds` improves it by one, so that nothing starves.
2. Among equals, the tenant that was served least: virtual token counters (Sheng et al., "Fairness in Serving Large Language
   Models", 2024). A counter grows by the tokens served over the tenant's weight; a tenant that comes back from idle starts at
   the smallest counter of those that have work, so idling saves up no credit.
3. Then arrival.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.scheduler.request import Sequence

REMEMBERED_TENANTS = 1024
Entry = list[Any]  # [arrival, key, serial number of the push, sequence, or None once it was removed]


class WaitingQueue:
    """Waiting sequences: a heap by arrival for each (priority, tenant). O(log n + heaps) per operation."""

    def __init__(self, *, tenant_weights: Mapping[str, float] | None = None, ageing_seconds: float = 30.0) -> None:
        self._weights = dict(tenant_weights or {})
        self._ageing_seconds = ageing_seconds
        self._heaps: dict[tuple[int, int], list[Entry]] = {}
        self._entries: dict[int, Entry] = {}  # by request key
        self._serial = itertools.count()
        self._tenant_ids: dict[str, int] = {}
        self._weight = np.ones(0, np.float64)
        self._served = np.zeros(0, np.float64)  # virtual token counter per tenant id
        self._alive = np.zeros(0, np.int64)  # sequences per tenant id that are waiting or running

    def __len__(self) -> int:
        return len(self._entries)

    def enter(self, sequence: Sequence) -> None:
        """A new sequence arrives; it is counted for its tenant until `leave`, and waits."""
        tenant_id = self._register(sequence.request.tenant)
        if not self._alive[tenant_id]:
            others = self._served[self._alive > 0]
            if len(others):
                self._served[tenant_id] = max(self._served[tenant_id], others.min())
        self._alive[tenant_id] += 1
        self.push(sequence)

    def leave(self, sequence: Sequence) -> None:
        """The sequence has finished (it must not be waiting any more)."""
        self._alive[self.tenant_id(sequence)] -= 1

    def tenant_id(self, sequence: Sequence) -> int:
        """A small number for the tenant of a sequence that has entered."""
        return self._tenant_ids[sequence.request.tenant]

    def charge(self, tenant_ids: NDArray[np.int32], num_tokens: int = 1) -> None:
        """Count `num_tokens` for each of the given tenants: a prompt at its admission, so that it counts for the next choice
        already, and every decoded token. What is computed again after a preemption is not charged."""
        if len(self._served) > 1:  # for counters are only compared
            self._served += np.bincount(tenant_ids, minlength=len(self._served)) * (num_tokens / self._weight)

    def push(self, *sequences: Sequence) -> None:
        """Put sequences (back) into the queue; the place of each is that of its arrival."""
        for sequence in sequences:
            request = sequence.request
            entry: Entry = [request.arrival, request.key, next(self._serial), sequence]
            self._entries[request.key] = entry
            heapq.heappush(self._heaps.setdefault((request.priority, self.tenant_id(sequence)), []), entry)

    def pop(self, now: float) -> Sequence | None:
        """Take out the sequence that is next at time `now`."""
        if not self._entries:
            self._heaps.clear()  # of those that were removed
            return None
        best: tuple[float, float, float, int] | None = None
        best_heap: list[Entry] = []
        for heap_key, heap in list(self._heaps.items()):
            while heap and heap[0][3] is None:
                heapq.heappop(heap)
            if not heap:
                del self._heaps[heap_key]
                continue
            arrival, key = heap[0][:2]
            priority, tenant_id = heap_key
            rank = (priority - (now - arrival) // self._ageing_seconds, float(self._served[tenant_id]), arrival, key)
            if best is None or rank < best:
                best, best_heap = rank, heap
        sequence: Sequence = heapq.heappop(best_heap)[3]
        del self._entries[sequence.request.key]
        return sequence

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out of the queue; False when it was not there."""
        entry = self._entries.pop(sequence.request.key, None)
        if entry is None:
            return False
        entry[3] = None  # its place in the heap is cleared when it comes up
        return True

    def _register(self, tenant: str) -> int:
        """The number of a tenant, which is a new one for a new tenant."""
        tenant_id = self._tenant_ids.get(tenant)
        if tenant_id is not None:
            return tenant_id
        idle = None
        if len(self._served) >= REMEMBERED_TENANTS:  # drop the counter of one without work
            idle = next((name for name, number in self._tenant_ids.items() if not self._alive[number]), None)
        if idle is not None:
            tenant_id = self._tenant_ids.pop(idle)
        else:
            tenant_id = len(self._served)
            self._weight = np.append(self._weight, 1.0)
            self._served = np.append(self._served, 0.0)
            self._alive = np.append(self._alive, 0)
        self._tenant_ids[tenant] = tenant_id
        self._weight[tenant_id] = self._weights.get(tenant, 1.0)
        self._served[tenant_id] = 0.0
        return tenant_id
