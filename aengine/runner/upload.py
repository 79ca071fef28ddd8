"""Small host arrays to the device, all of a step in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.upload import staged


def upload(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """One int32 tensor per one-dimensional array, in order.

    On a CPU they share the arrays' memory. Elsewhere they are slices of one tensor, copied from pinned memory without
    waiting; torch keeps the pinned block from reuse until the copy is done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return list(torch.split(staged(arrays, device).to(device, non_blocking=True), [len(array) for array in arrays]))


class UploadSlot:
    """Host memory that is on its way to a device."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._device = device
        self._memory = torch.empty(0, dtype=torch.int32)
        self._left: torch.cuda.Event | None = None
        self.array: NDArray[np.int32] = self._memory.numpy()

    def prepare(self, length: int) -> None:
        """Waits until what was here has left, and makes room for `length` numbers at least."""
        if self._left is not None:
            self._left.synchronize()
        if len(self._memory) < length:
            room = 1 << (length - 1).bit_length()
            self._memory = torch.empty(room, dtype=torch.int32, pin_memory=not self._on_cpu)
            self.array = self._memory.numpy()

    def send(self, length: int, out: Tensor) -> None:
        """Copies the first `length` numbers to the beginning of `out`, on the current stream, without waiting."""
        out[:length].copy_(self._memory[:length], non_blocking=True)

    def leave(self) -> None:
        """Everything that reads this memory has been put on the current stream."""
        if not self._on_cpu:
            if self._left is None:
                self._left = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._left.record(torch.cuda.current_stream(self._device))


class UploadRing:
    """Slots that are used in turn, so that a step is written while those before it may not have left yet."""

    def __init__(self, device: torch.device, depth: int = 3) -> None:
        self._slots = [UploadSlot(device) for _ in range(depth)]
        self._next = 0

    def take(self, length: int) -> UploadSlot:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.prepare(length)
        return slot
