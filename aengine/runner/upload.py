"""Small host arrays to the device, all of a step in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """One int32 tensor per one-dimensional array, in order.

    On a CPU they share the arrays' memory. Elsewhere they are slices of one tensor, copied from pinned memory without
    waiting; torch keeps the pinned block from reuse until the copy is done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [len(array) for array in arrays]
    staging = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
    np.concatenate(arrays, out=staging.numpy())
    return list(torch.split(staging.to(device, non_blocking=True), sizes))
