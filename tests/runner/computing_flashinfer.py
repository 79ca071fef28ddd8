"""FlashInfer on a CUDA device without a GPU: its own Python, its planner in C++, and its kernels executed from their PTX.

Its modules are compiled for compute capability 8.0, from which its fa2 kernels hardly differ for 9.0, and kept in a folder of their own.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from computing_cuda import ComputingCuda
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from tools.gpu import flashinfer_folder
from tools.ptx.cuda_libraries import CudaRuntime
from tools.ptx.program import Allowed, Source

# What warps have merged, warp 0 stores over the parts, which others may still read, though nothing comes of their sums (`write_o_reg_gmem`
# of 0.6.18). Rows of queries that are not there are not loaded, and multiplied all the same.
_ALLOWED = Allowed(frozenset(Source("prefill.cuh", line) for line in range(2039, 2045)), unwritten=True)
_CUDA = 2  # kDLCUDA
_TYPES = {torch.uint8: (1, 8), torch.int8: (0, 8), torch.int32: (0, 32), torch.int64: (0, 64), torch.float16: (2, 16)}
_TYPES |= {torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.float8_e4m3fn: (10, 8), torch.bool: (6, 8)}


def build_environment() -> dict[str, str]:
    """What FlashInfer must find before it is imported."""
    wrapper = Path(__file__).parents[2] / "tools" / "ptx" / "nvcc_ptx.sh"
    folder = Path(tempfile.gettempdir()) / f"aengine-flashinfer-ptx-{os.getuid()}"
    return {
        **flashinfer_folder.build_environment(folder),
        "FLASHINFER_CUDA_ARCH_LIST": "8.0",
        "FLASHINFER_NVCC": str(wrapper),
        "FLASHINFER_WORKSPACE_BASE": os.environ.get("FLASHINFER_WORKSPACE_BASE", str(folder)),
    }


class _Array(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("array", _Array), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_given: dict[int, _Managed] = {}  # to libraries that have not done with them, by address
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forget = _DELETER(_given.pop)


class _OnDevice:
    """A tensor for libraries."""

    def __init__(self, tensor: Tensor, address: int) -> None:
        code, bits = _TYPES[tensor.dtype]
        sizes = ctypes.c_int64 * tensor.dim()
        array = _Array(address, _CUDA, 0, tensor.dim(), code, bits, 1, sizes(*tensor.shape), sizes(*tensor.stride()), 0)
        self._managed = _Managed(array, None, ctypes.cast(_forget, ctypes.c_void_p))

    def __dlpack__(self, **_: Any) -> Any:
        _given[ctypes.addressof(self._managed)] = self._managed
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


class _Calls:
    """What modules of FlashInfer are called with, and what they ask of CUDA."""

    def __init__(self, cuda: ComputingCuda) -> None:
        self._cuda = cuda
        self._kept: list[Any] = []  # of the call under way
        self.runtime = CudaRuntime(self._give, self._copy_from_host, _ALLOWED)

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._kept = []
            placed = [self._placed(one) for one in arguments]
            with _disable_current_modes(), self.runtime.calling():  # type: ignore[no-untyped-call]
                return function(*placed)

        return call

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        import tvm_ffi

        memory = self._cuda.memory(value)
        tensor = _OnDevice(value, memory.address + value.storage_offset() * value.element_size())
        self._kept.append(memory)
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            return tvm_ffi.from_dlpack(tensor)

    def _give(self, work: Callable[[Any], None]) -> None:
        self._cuda.give(work, self._kept)

    def _copy_from_host(self, target: int, source: int, size: int) -> None:
        host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(source))
        pinned = self._cuda.pinned_at(source)
        given = host.copy() if pinned is None else host
        self._cuda.give(lambda memory: memory.write(target, given), [*self._kept, pinned])


class _Module:
    def __init__(self, module: Any, calls: _Calls) -> None:
        self._module, self._calls = module, calls

    def __getattr__(self, name: str) -> Any:
        return self._calls.function(getattr(self._module, name))


@contextmanager
def flashinfer_on(cuda: ComputingCuda) -> Iterator[None]:
    """Needs `build_environment`, a device that is active, and FlashInfer."""
    import tvm_ffi

    calls, load = _Calls(cuda), tvm_ffi.load_module
    with mock.patch.object(tvm_ffi, "load_module", lambda path, *_: _Module(load(path), calls)):
        yield
