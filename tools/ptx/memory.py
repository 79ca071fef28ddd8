"""Memory of a device that does not exist: an arena in which every byte is known to be allocated or not, and written or not.

Knows no instruction. Addresses begin at 2**40, so that an address of the host, or one of which only 32 bits are left, is outside.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from tools.ptx.numbers import Bits

BASE = 1 << 40
GUARD = 4096  # bytes behind each allocation that belong to none
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ALLOCATED = 1
WRITTEN = _ALLOCATED | 2
_NEVER, _WRITTEN_ONCE, _BEING_COPIED = np.uint8(0), np.uint8(1), np.uint8(2)  # of bytes of shared memory
_NO_RESERVE = 0x4000  # MAP_NORESERVE: pages are there once they are written


class MemoryFault(Exception):
    """An access that hardware refuses or whose result means nothing. `threads`: [threads], which do it."""

    def __init__(self, what: str, threads: NDArray[np.bool_]) -> None:
        super().__init__(what)
        self.threads = threads


class DeviceMemory:
    """Global memory. `size`: bytes in all, of which only those written take memory of the host."""

    def __init__(self, size: int = 16 << 30) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._data, self._state = (np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8) for _ in range(2))
        self._next = GUARD
        self._free: dict[int, list[int]] = {}  # places by size

    def allocate(self, size: int, offset: int = 0) -> int:
        """The address of `size` bytes, `offset` behind a multiple of 512. What stood there before is gone, or is not."""
        if not offset and self._free.get(size):
            at = self._free[size].pop()
            self._state[at : at + size] = _ALLOCATED
            return BASE + at
        at = -(-self._next // 512) * 512 + offset
        if at + size + GUARD > self._data.size:
            raise MemoryError(f"{size} bytes do not fit in what is left of {self._data.size}")
        self._next = at + size + GUARD
        self._state[at : at + size] = _ALLOCATED
        return BASE + at

    def free(self, address: int, size: int) -> None:
        """Gives back what `allocate` gave for `size` bytes: from now on each access is a fault, until they are allocated again."""
        at = address - BASE
        self._state[at : at + size] = 0
        self._free.setdefault(size, []).append(at)

    def bytes_at(self, address: int, size: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The bytes themselves, and the state of each, WRITTEN once it is: what changes here changes there."""
        at = address - BASE
        return self._data[at : at + size], self._state[at : at + size]

    @property
    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """All bytes, and the state of each."""
        return self._data, self._state

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        at = address - BASE
        self._data[at : at + data.size] = data
        self._state[at : at + data.size] = WRITTEN

    def read(self, address: int, size: int) -> NDArray[np.uint8]:
        """A copy, with whatever stands in bytes that were never written."""
        return self._data[address - BASE : address - BASE + size].copy()

    def load(self, addresses: Bits, unit: int, count: int, active: NDArray[np.bool_]) -> list[Bits]:
        """`count` numbers of `unit` bytes behind each address, a multiple of all of them; 0 of threads that are not active."""
        places = self._places(addresses, unit * count, active, written=True)
        numbers = self._data.view(UNITS[unit])
        return [np.where(active, numbers[places // unit + k], 0).astype(np.uint64) for k in range(count)]

    def store(self, addresses: Bits, unit: int, parts: list[Bits], active: NDArray[np.bool_]) -> None:
        """Raises MemoryFault where threads store different numbers to one place."""
        places = self._places(addresses, unit * len(parts), active, written=False)[active] // unit
        numbers, state = self._data.view(UNITS[unit]), self._state.view(UNITS[unit])
        for k, part in enumerate(parts):
            given = part[active].astype(UNITS[unit])
            numbers[places + k] = given
            other = numbers[places + k] != given
            if other.any():
                raise MemoryFault("race: several threads store different numbers to one place", _spread(active, other))
            state[places + k] = int.from_bytes(bytes([WRITTEN]) * unit, "little")

    def exchange(self, thread: int, addresses: Bits, unit: int, new: np.uint64) -> None:
        """Stores the low bytes of a number for one thread, where `load` has been."""
        self._data.view(UNITS[unit])[(int(addresses[thread]) - BASE) // unit] = new.astype(UNITS[unit])

    def _places(self, addresses: Bits, size: int, active: NDArray[np.bool_], written: bool) -> NDArray[np.int64]:
        """Offsets in the arena, GUARD of threads that are not active."""
        places = addresses.view(np.int64) - BASE
        wrong = active & (places & (size - 1) != 0)
        if wrong.any():
            raise MemoryFault(f"address {int(addresses[wrong][0]):#x} is no multiple of {size} bytes", wrong)
        wrong = active & ((places < 0) | (places + size > self._data.size))
        places = np.where(active & ~wrong, places, GUARD - size)
        unit = min(size, 8)
        state, needed = self._state.view(UNITS[unit]), WRITTEN if written else _ALLOCATED
        all_needed = int.from_bytes(bytes([needed]) * unit, "little")
        lacking = np.zeros(active.shape, bool)
        for part in range(size // unit):
            lacking |= (state[places // unit + part] & all_needed) != all_needed
        lacking = (lacking & active) | wrong
        if lacking.any():
            first = int(np.flatnonzero(lacking)[0])
            at = places[first]
            there = not wrong[first] and bool((self._state[at : at + size] & _ALLOCATED).all())
            why = "was never written" if there else "is out of bounds"
            raise MemoryFault(
                f"{'load of' if written else 'store to'} address {int(addresses[first]):#x}, {size} bytes, which {why}", lacking
            )
        return places


class SharedMemory:
    """Of several blocks that run together. Since the last barrier of a block, a byte belongs to the warp that wrote it, and to those that
    read it: what another warp does to it is a race."""

    def __init__(self, size: int, blocks: int, block_of: NDArray[np.int64], warp_of: NDArray[np.int64]) -> None:
        """`block_of`, `warp_of`: [threads], the block and the warp in it of each thread."""
        self._size, self._stride = size, -(-max(size, 1) // 1024) * 1024
        self._bases, self._warps = block_of * self._stride, (warp_of + 1).astype(np.uint8)
        self._data = np.full(blocks * self._stride, 0xFF, np.uint8)
        self._unfenced = np.zeros(self._data.shape, bool)  # not yet for wgmma
        self._written = np.full(self._data.shape, _NEVER)
        self._writers, self._readers = (np.zeros(self._data.shape, np.uint8) for _ in range(2))  # warps from 1; 255 is several
        self._races_are_known = self._reads_unwritten = False

    def allow(self, races: bool, unwritten: bool) -> None:
        """From the next access on."""
        self._races_are_known, self._reads_unwritten = races, unwritten

    def load(self, addresses: Bits, unit: int, count: int, active: NDArray[np.bool_]) -> list[Bits]:
        places, warps = self._rows(addresses, unit * count, active), self._warps[active, None]
        states = self._written[places]
        lacking = states == _BEING_COPIED if self._reads_unwritten else states != _WRITTEN_ONCE
        self._refuse(lacking, "load of shared bytes that were never written, or whose copy is under way", active)
        writers = self._writers[places]
        raced = (not self._races_are_known) & (writers != 0) & (writers != warps)
        self._refuse(raced, "race: shared bytes that another warp wrote since the last barrier", active)
        readers = self._readers[places]
        np.maximum.at(self._readers, places, np.where((readers == 0) | (readers == warps), warps, np.uint8(255)))
        mixed = self._readers[places] != warps  # several in this very instruction
        np.maximum.at(self._readers, places, np.where(mixed, np.uint8(255), np.uint8(0)))
        found = self._data[places].view(UNITS[unit])  # [active threads, count]
        out = np.zeros((count, active.size), np.uint64)
        out[:, active] = found.T
        return list(out)

    def store(self, addresses: Bits, unit: int, parts: list[Bits], active: NDArray[np.bool_]) -> None:
        self.begin_copy(addresses, unit * len(parts), active)
        self.finish_copy(addresses, unit, parts, active)

    def begin_copy(self, addresses: Bits, size: int, active: NDArray[np.bool_]) -> None:
        """From now on the bytes are written at any time, until `finish_copy`."""
        places, warps = self._rows(addresses, size, active), self._warps[active, None]
        for others, verb in ((self._writers[places], "wrote"), (self._readers[places], "read")):
            wrong = (not self._races_are_known) & (others != 0) & (others != warps)
            self._refuse(wrong, f"race: store to shared bytes that another warp {verb} since the last barrier", active)
        self._written[places] = _BEING_COPIED

    def finish_copy(self, addresses: Bits, unit: int, parts: list[Bits], active: NDArray[np.bool_]) -> None:
        places, warps = self._rows(addresses, unit * len(parts), active), self._warps[active, None]
        numbers = np.ascontiguousarray(np.stack([part[active].astype(UNITS[unit]) for part in parts], 1)).view(np.uint8)
        self._data[places] = numbers
        self._refuse(self._data[places] != numbers, "race: several threads store different numbers to one shared place", active)
        self._writers[places] = np.broadcast_to(warps, places.shape)
        self._written[places], self._unfenced[places] = _WRITTEN_ONCE, True

    def load_rows(self, thread: int, places: NDArray[np.int64]) -> NDArray[np.uint8]:
        """16 bytes at each of `places`, [.., 16], as wgmma of the thread's block reads them: behind a fence and a barrier of all."""
        bytes_at = int(self._bases[thread]) + places[..., None] + np.arange(16)
        me = np.zeros(self._bases.shape, bool)
        me[thread] = True
        if places.min() < 0 or places.max() + 16 > self._size:
            raise MemoryFault(f"a matrix of wgmma reaches to byte {int(places.max()) + 16} of {self._size} bytes of shared memory", me)
        if (self._written[bytes_at] != _WRITTEN_ONCE).any():
            raise MemoryFault("wgmma of shared bytes that were never written, or whose copy is under way", me)
        if self._unfenced[bytes_at].any():
            raise MemoryFault("wgmma of shared bytes that no fence.proxy.async has passed since they were written", me)
        if self._writers[bytes_at].any():
            raise MemoryFault("race: wgmma of shared bytes that were written since the last barrier", me)
        self._readers[bytes_at] = 255
        rows: NDArray[np.uint8] = self._data[bytes_at]
        return rows

    def pass_fence(self, blocks: NDArray[np.int64]) -> None:
        """fence.proxy.async: what these blocks wrote is there for wgmma."""
        self._unfenced.reshape(-1, self._stride)[blocks] = False

    def exchange(self, thread: int, addresses: Bits, unit: int, new: np.uint64) -> None:
        """Stores the low bytes of a number for one thread, where `load` has been."""
        self._data.view(UNITS[unit])[(int(self._bases[thread]) + int(addresses[thread])) // unit] = new.astype(UNITS[unit])

    def pass_barrier(self, blocks: NDArray[np.bool_], threads: NDArray[np.bool_]) -> None:
        """`blocks`: [blocks], where enough have come. `threads`: who has; of fewer than all, what their warps did is behind them, and
        taken as behind all others, too. Of bytes that several warps have touched it is not known which, so those are forgotten."""
        of_block = threads.reshape(blocks.size, -1)
        for block in np.flatnonzero(blocks).tolist():
            together = np.unique(self._warps.reshape(blocks.size, -1)[block][of_block[block]])
            if len(together) < 2 and not of_block[block].all():
                continue
            warps = np.zeros(256, bool)
            warps[together] = warps[255] = True
            for marks in (self._writers, self._readers):
                own = marks.reshape(blocks.size, -1)[block]
                own[np.ones(own.shape, bool) if of_block[block].all() else warps[own]] = 0

    def _rows(self, addresses: Bits, size: int, active: NDArray[np.bool_]) -> NDArray[np.int64]:
        """[active threads, size], the place of each byte."""
        at = addresses.view(np.int64)
        wrong = active & ((at < 0) | (at + size > self._size) | (at & (size - 1) != 0))
        if wrong.any():
            raise MemoryFault(f"shared address {int(at[wrong][0])} of {size} bytes: no multiple of them, or beyond {self._size}", wrong)
        rows: NDArray[np.int64] = (self._bases[active] + at[active])[:, None] + np.arange(size)
        return rows

    @staticmethod
    def _refuse(wrong: NDArray[np.bool_], why: str, active: NDArray[np.bool_]) -> None:
        if wrong.any():
            raise MemoryFault(why, _spread(active, np.any(wrong, axis=1)))


def _spread(active: NDArray[np.bool_], some: NDArray[np.bool_] | np.bool_) -> NDArray[np.bool_]:
    """Of all threads, which of the active ones are meant."""
    out = np.zeros(active.shape, bool)
    out[np.flatnonzero(active)[some]] = True
    return out
