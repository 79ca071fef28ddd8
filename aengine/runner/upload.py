"""Uploads: the arrays of a step go to the device in one copy."""

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
    """Pinned host memory from which one step at a time is copied to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.int32)
        self._copied = None if device.type == "cpu" else torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def prepare(self, length: int) -> NDArray[np.int32]:
        """Waits until the last copy from here is done; returns room for at least `length` numbers."""
        if self._copied is not None:
            self._copied.synchronize()  # returns at once if it was never recorded
        if len(self._memory) < length:
            self._memory = torch.empty(1 << (length - 1).bit_length(), dtype=torch.int32, pin_memory=self._copied is not None)
        return self._memory.numpy()

    def send(self, length: int, out: Tensor) -> None:
        """Copies the first `length` numbers to the beginning of `out`, on the current stream, without waiting."""
        out[:length].copy_(self._memory[:length], non_blocking=True)

    def record(self) -> None:
        """To be called when everything that reads this memory is on the current stream."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
