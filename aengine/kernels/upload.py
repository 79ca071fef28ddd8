"""Copies of small host arrays to a device, from pinned memory, so that the host does not wait; and back. Does not know what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor of its shape and dtype, without waiting for the device.

    On a CPU it shares the array's memory. On others it is copied from pinned memory, which torch does not reuse before the copy is done.
    """
    import torch

    tensor = torch.from_numpy(array)
    if device.type == "cpu" or array.size == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory, when the current stream has made it. A thread that waits here sleeps, and others may run."""
    import torch

    if tensor.device.type == "cpu":
        return tensor
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    memory.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tensor.device))
    copied.synchronize()
    return memory


def staged(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> Tensor:
    """One-dimensional host arrays, one after another in a new host tensor that is pinned for CUDA: torch does not reuse its memory before
    asynchronous copies from it are done."""
    import torch

    staging = torch.empty(sum(map(len, arrays)), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=staging.numpy())
    return staging


def upload(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """One int32 tensor for each array, without waiting.

    On a CPU they share the arrays' memory. Elsewhere they are slices of one tensor, copied from pinned memory, which torch does not reuse
    before the copy is done.
    """
    import torch

    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    parts = torch.split(staged([array.reshape(-1) for array in arrays], device).to(device, non_blocking=True), [*map(np.size, arrays)])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
