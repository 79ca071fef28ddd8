"""The exchange between the ranks of a model: over memory that processes of one host share, or by a process group of torch.

Owns the memory. What an exchange is for the kernels is `SharedMemoryExchange` in `src/abi.h`, and how rounds work in `src/exchange.h`.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from aengine.kernels.cpu.library import CExchange, CpuKernels, CSharedRanks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_RANKS = 64
SLOT_BYTES = 1 << 20
"""Of a rank and a round: what is more takes several rounds."""
_HEADER, _COUNTER = 16384, 128  # bytes before the slots, and of one of the counters there: `SharedRounds` of exchange.cpp
_ABORTED, _TIMED_OUT = 11, 12  # `Status`
_log = logging.getLogger("aengine")


def exchange_bytes(num_ranks: int) -> int:
    """Bytes of the memory that so many ranks share."""
    return _HEADER + 2 * num_ranks * SLOT_BYTES


class SharedMemoryExchange:
    """Satisfies `RankExchange`, over shared memory. Its memory lives as long as the object, in each rank."""

    def __init__(self, kernels: CpuKernels, fd: int, index: int, size: int, timeout: float) -> None:
        """`fd`: a file of `exchange_bytes(size)`, zero when the first of the `size` ranks begins; it can be closed afterwards. When a rank
        waits for another one longer than `timeout` seconds the exchange fails on all of them."""
        if not 0 <= index < size <= MAX_RANKS:
            raise ValueError(f"rank {index} is not one of {size} ranks, or these are more than {MAX_RANKS}")
        memory = np.frombuffer(mmap.mmap(fd, exchange_bytes(size)), np.uint8)
        self._counters = memory[: (1 + size) * _COUNTER].view(np.int64)[:: _COUNTER // 8]  # whether it was aborted, then rounds by rank
        self._shared = CSharedRanks(memory.ctypes.data, timeout, index, size, size > (os.cpu_count() or 1))
        slots = [memory.ctypes.data + _HEADER + number * SLOT_BYTES for number in range(2 * size)]
        self._slots = (ctypes.c_void_p * (2 * size))(*slots)
        meet = ctypes.cast(kernels.meet_in_memory, ctypes.c_void_p)
        self.c = CExchange(ctypes.addressof(self._shared), meet, self._slots, SLOT_BYTES, 0, index, size, 0, 0)

    def abort(self) -> None:
        """Ends all waits of all ranks, now and from now on. From any thread and process."""
        self._counters[0] = 1

    def lagging(self) -> tuple[int, ...]:
        rounds = self._counters[1:]
        return tuple(np.flatnonzero(rounds < rounds.max()).tolist())


class GroupExchange:
    """Satisfies `RankExchange`, by a process group with tensors on the CPU, such as one of gloo. For ranks on several hosts."""

    def __init__(self, group: ProcessGroup) -> None:
        """What the group raises, such as after its own timeout, makes the exchange fail; it is logged."""
        self._group = group
        size = group.size()
        self._memory = torch.empty(2, size, SLOT_BYTES, dtype=torch.uint8)
        self._slots = (ctypes.c_void_p * (2 * size))(*(slot.data_ptr() for slot in self._memory.flatten(0, 1)))
        self._meet = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)(self._exchange)
        meet = ctypes.cast(self._meet, ctypes.c_void_p)
        self.c = CExchange(None, meet, self._slots, SLOT_BYTES, 0, group.rank(), size, 0, 0)

    def abort(self) -> None:
        """Ends all waits of this rank; the others notice it when their connections to it end."""
        self._group.abort()

    def lagging(self) -> tuple[int, ...]:
        """Which one of several others did not come in time is not known."""
        return (1 - self.c.index,) if self.c.size == 2 and self.c.status == _TIMED_OUT else ()

    def _exchange(self, _: object, count: int) -> int:
        slots = list(self._memory[self.c.round % 2, :, :count])
        try:
            self._group.allgather([slots], [slots[self.c.index].clone()]).wait()
        except RuntimeError as error:
            _log.error("the exchange between ranks failed: %s", error)
            return _TIMED_OUT if "timed out" in str(error).lower() else _ABORTED
        return 0
