"""The dtypes of models as NumPy has them, and the way from torch's tensors to arrays and back, without a copy.

Imports torch only where a tensor is made or read, so that what computes with arrays runs without it. Knows nothing of what the numbers
mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT16, FLOAT32, INT8 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.int8)
_OF_TORCH_ALONE = {2: np.dtype(np.uint16), 1: np.dtype(np.uint8)}
"""By bytes of a number, a dtype that torch and NumPy both have, for those that NumPy has from `ml_dtypes`."""

Array = NDArray[Any]


def array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of arrays with these numbers."""
    return np.dtype(str(dtype).removeprefix("torch."))


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The dtype of tensors with these numbers."""
    import torch

    found: torch.dtype = getattr(torch, dtype.name)
    return found


def as_array(tensor: Tensor) -> Array:
    """A tensor in host memory as an array that shares it, of the same shape and strides."""
    dtype = array_dtype(tensor.dtype)
    if dtype.isbuiltin == 1:
        return tensor.detach().numpy()
    import torch

    bits = torch.uint16 if dtype.itemsize == 2 else torch.uint8
    found: Array = tensor.detach().view(bits).numpy().view(dtype)
    return found


def as_tensor(array: Array) -> Tensor:
    """An array as a tensor that shares its memory."""
    import torch

    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    bits = torch.from_numpy(array.view(_OF_TORCH_ALONE[array.dtype.itemsize]))
    return bits.view(getattr(torch, array.dtype.name))


def data_address(array: Array) -> int:
    """Where the numbers of an array begin, whatever its strides, also if it cannot be written."""
    found: int = array.__array_interface__["data"][0]
    return found
