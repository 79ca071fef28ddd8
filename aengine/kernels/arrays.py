"""The dtypes of models as NumPy has them, and the way from torch's tensors to arrays and back, without a copy; and copies of small arrays
to a device, from pinned memory, so that the host does not wait, and back.

Imports torch only where a tensor is made or read, so that what computes with arrays runs without it. Knows nothing of what the numbers
mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT16, FLOAT32, INT8 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.int8)
INT4 = np.dtype(ml_dtypes.int4)
_OF_TORCH_ALONE = {2: np.dtype(np.uint16), 1: np.dtype(np.uint8)}
"""By bytes of a number, a dtype that torch and NumPy both have, for those that NumPy has from `ml_dtypes`."""

Array = NDArray[Any]
Numbers: TypeAlias = Any
"""An array of NumPy, or a tensor of torch on a device."""


def cast(numbers: Numbers, dtype: np.dtype[Any]) -> Numbers:
    """The numbers rounded to a dtype; the same ones if they have it. What is too large becomes infinite, without a warning."""
    if isinstance(numbers, np.ndarray):
        with np.errstate(over="ignore"):
            return numbers.astype(dtype, copy=False)
    return numbers.to(torch_dtype(dtype))


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
