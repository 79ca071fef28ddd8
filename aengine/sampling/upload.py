"""Small host arrays to the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor of its shape and dtype, without waiting for the device.

    On a CPU it shares the array's memory. Elsewhere it is copied from pinned memory; torch keeps that from reuse until the copy is done.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu" or array.size == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
