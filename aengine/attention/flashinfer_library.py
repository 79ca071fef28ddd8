"""The FlashInfer package: how it is imported, which versions are supported, and which of its functions are used.

Owns the lazy import, the logs and errors of building its modules, and the host arrays that its calls need. Knows nothing of steps or
models. Importing FlashInfer queries the GPU, so `load_flashinfer` is called in the thread that owns the device, and never without one. Its
functions and classes are always called with keyword arguments: their order differs between versions.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention.base import BackendUnavailableError, first_line
from aengine.kernels.upload import staged

_log = logging.getLogger("aengine")
SUPPORTED = ((0, 6, 13), (0, 8, 0))  # at least the first, below the second
HEAD_DIMS = (64, 128, 256)  # for which there are attention and rope kernels
DTYPES = (torch.bfloat16, torch.float16)  # supported for activations


def load_flashinfer(device: torch.device) -> ModuleType:
    """The installed package.

    Raises BackendUnavailableError if it is not installed, cannot be imported, or has a version that is not in `SUPPORTED`.
    """
    if device.type != "cuda":
        raise BackendUnavailableError(f"FlashInfer needs a CUDA device, not {device.type}")
    # If its CuTe-DSL package is installed, FlashInfer would use other norm kernels than those that were tested.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    try:
        library = importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(f"FlashInfer is not installed (no module {error.name}): pip install aengine[cuda]") from error
    except Exception as error:
        raise BackendUnavailableError(f"FlashInfer cannot be imported: {first_line(error)}") from error
    check_version(str(library.__version__))
    return library


def check_version(version: str) -> None:
    """Raises BackendUnavailableError for a version that is not in `SUPPORTED`."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    low, high = SUPPORTED
    if numbers is None or not low <= tuple(int(number) for number in numbers.groups()) < high:
        first, end = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise BackendUnavailableError(f"FlashInfer {version} is not supported: >={first},<{end} is")


def require_kernels(dtype: torch.dtype, head_dim: int) -> None:
    """Raises BackendUnavailableError if there are no kernels for activations of `dtype` or heads of `head_dim`."""
    if dtype not in DTYPES:
        raise BackendUnavailableError(f"FlashInfer computes in float16 and bfloat16, not {dtype}")
    if head_dim not in HEAD_DIMS:
        raise BackendUnavailableError(f"FlashInfer has kernels for head_dim {', '.join(map(str, HEAD_DIMS))}, not {head_dim}")


@contextmanager
def building(library: ModuleType, what: str, device: torch.device) -> Iterator[None]:
    """Encloses the first calls of all functions for `what`, which build and load FlashInfer's modules and fill the caches that must not be
    filled while a graph is captured. Logs how long they took.

    Raises BackendUnavailableError in place of any error but torch.OutOfMemoryError.
    """
    _log.info("building FlashInfer modules for %s: takes minutes at the first start, a moment once they are cached", what)
    begin = time.monotonic()
    try:
        yield
        if device.type == "cuda":
            # Raises the error of a kernel that cannot run. Not of the whole device, where another engine may be capturing a graph.
            torch.cuda.current_stream(device).synchronize()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _log.debug("FlashInfer failed", exc_info=True)
        raise BackendUnavailableError(f"FlashInfer {library.__version__} cannot run here: {first_line(error)}") from error
    _log.info("FlashInfer modules for %s ready after %.1f s", what, time.monotonic() - begin)


def host_tensors(arrays: Mapping[str, NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Copies of the arrays as slices of one tensor that `staged` makes.

    Raises TypeError for an array that is not int32: FlashInfer would read its bytes as int32 without an error.
    """
    for name, array in arrays.items():
        if array.dtype != np.int32:
            raise TypeError(f"{name} must be int32, not {array.dtype}")
    return list(torch.split(staged(list(arrays.values()), device), [len(array) for array in arrays.values()]))


def require_int32(**tensors: Tensor) -> None:
    """Raises TypeError for a tensor that is not int32."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, not {tensor.dtype}")
