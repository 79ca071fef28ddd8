"""Who waits, and for what. `WaitingQueue` has the order in which waiting sequences are admitted; it knows who is next, not whether there
is room:

1. Lower priority number first, where waiting `ageing_seconds` improves it by one, so that nothing starves.
2. Among equals, the tenant that was served least: virtual token counters (Sheng et al., "Fairness in Serving Large Language
   Models", 2024). A counter grows by the tokens served over the tenant's weight; a tenant that comes back from idle starts at
   the smallest counter of those that have work, so idling saves up no credit.
3. Then arrival.

`AdapterRoom` has those for whose adapter there is no place, `Draining` those that wait until all others are gone, so that the model can
change, and `PrefixesInFlight` those whose prompt begins with a page that is being computed. `Deadlines` says whose time is over. None of
them knows rows, pages or the others.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.scheduler.rows import RowTable
from aengine.scheduler.sequence import Sequence

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

    def enter_sequence(self, sequence: Sequence) -> None:
        """A new sequence arrives; it is counted for its tenant until `leave_sequence`, and waits."""
        tenant_id = self._register(sequence.request.tenant)
        if not self._alive[tenant_id]:
            others = self._served[self._alive > 0]
            if len(others):
                self._served[tenant_id] = max(self._served[tenant_id], others.min())
        self._alive[tenant_id] += 1
        self.push(sequence)

    def leave_sequence(self, sequence: Sequence) -> None:
        """The sequence has finished (it must not be waiting any more)."""
        self._alive[self.tenant_id(sequence)] -= 1

    def tenant_id(self, sequence: Sequence) -> int:
        """A small number for the tenant of a sequence that has entered."""
        return self._tenant_ids[sequence.request.tenant]

    def crowding(self, tenant_ids: NDArray[np.int32], most: int) -> int | None:
        """The tenant with a name that stands at `most` or more of the given places, if there is one: more than half of them."""
        if len(tenant_ids) < most:
            return None
        counts = np.bincount(tenant_ids, minlength=1)
        tenant_id = int(counts.argmax())
        return tenant_id if counts[tenant_id] >= most and tenant_id != self._tenant_ids.get("") else None

    def hogging(self, tenant_ids: NDArray[np.int32], num_pages: NDArray[np.int32]) -> int | None:
        """The tenant with a name that has more than half of `num_pages`, which those in `tenant_ids` hold; if there is one."""
        held = np.bincount(tenant_ids, num_pages, minlength=1)
        tenant_id = int(held.argmax())
        return tenant_id if 2 * held[tenant_id] > held.sum() and tenant_id != self._tenant_ids.get("") else None

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

    def pop(self, now: float, without: int | None = None) -> Sequence | None:
        """Take out the sequence that is next at time `now`, of another tenant than that with the number `without`."""
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
            if tenant_id == without:
                continue
            rank = (priority - (now - arrival) // self._ageing_seconds, float(self._served[tenant_id]), arrival, key)
            if best is None or rank < best:
                best, best_heap = rank, heap
        if best is None:
            return None
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
        """The sequence got a row. While others wait for the place of their adapter, a sequence with an adapter counts towards the number
        that may pass them."""
        self._num_passed += bool(self._waiting and sequence.request.adapter)

    def leave_row(self, adapter: int) -> list[Sequence]:
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


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # deadline, key; some keys may be gone

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> float | None:
        """The first, maybe of a key that is gone."""
        return self._heap[0][0] if self._heap else None

    def add_deadline(self, deadline: float, key: int, keys: Collection[int]) -> None:
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

    def end_draining(self) -> list[Sequence]:
        """Sequences may begin. Returns those that waited."""
        self.on = False
        woken, self._waiting = list(self._waiting), {}
        return woken


class PrefixesInFlight:
    """A running sequence, or a load from a tier, claims the digests that it will publish; a sequence that needs one waits for it."""

    def __init__(self) -> None:
        self._owner: dict[bytes, object] = {}
        self._claims: dict[object, list[bytes]] = {}
        self._awaiting: dict[bytes, list[Sequence]] = {}

    @property
    def num_awaiting(self) -> int:
        return sum(len(waiting) for waiting in self._awaiting.values())

    def claim(self, owner: object, digests: list[bytes]) -> None:
        self._claims[owner] = [digest for digest in digests if self._owner.setdefault(digest, owner) is owner]

    def wait(self, sequence: Sequence, digest: bytes) -> bool:
        """Whether a running sequence is computing the page; if so, `sequence` waits for it."""
        if digest not in self._owner:
            return False
        sequence.awaits = digest
        self._awaiting.setdefault(digest, []).append(sequence)
        return True

    def num_waiting_for(self, owner: object) -> int:
        return sum(len(self._awaiting.get(digest, ())) for digest in self._claims.get(owner, ()))

    def stop_waiting(self, sequence: Sequence) -> None:
        """The sequence no longer waits, if it did."""
        digest = sequence.awaits
        if digest is None:
            return
        sequence.awaits = None
        waiting = self._awaiting[digest]
        waiting.remove(sequence)
        if not waiting:
            del self._awaiting[digest]

    def settle(self, owner: object, digest: bytes) -> list[Sequence]:
        """The page was published. Returns those that waited for it."""
        if self._owner.get(digest) is not owner:
            return []
        del self._owner[digest]
        woken = self._awaiting.pop(digest, [])
        for waiting in woken:
            waiting.awaits = None
        return woken

    def abandon(self, owner: object) -> list[Sequence]:
        """The owner publishes no further pages. Returns those that waited for one of them."""
        woken: list[Sequence] = []
        for digest in self._claims.pop(owner, ()):
            woken.extend(self.settle(owner, digest))
        return woken
