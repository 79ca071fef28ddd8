"""Executes what nvcc compiled: a libcudart of ours (`cudart/`) hands the launches and copies of libraries on.

Knows fat binaries, and how a launch passes arguments; knows no library. PTX must be in the libraries, uncompressed: nvcc writes it with
`-gencode arch=compute_80,code=compute_80 --no-compress`. A process has one such runtime, which libraries find if they are loaded later.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.ptx.encoding import Encoded
from tools.ptx.executor import KernelFault, Launch, check_limits, shared_layout
from tools.ptx.memory import DeviceMemory
from tools.ptx.native import compiled, execute
from tools.ptx.program import Allowed, Kernel, read_kernel

_FOLDER = Path(__file__).parent / "cudart"
_FAT_BINARY, _IS_PTX = 0xBA55ED50, 1
_SUCCESS, _FAILED = 0, 999
_STATIC_SHARED = 48 << 10  # bytes that a kernel may have unless it asked for more
_FROM_HOST = (1, 4)  # cudaMemcpyHostToDevice, and cudaMemcpyDefault: here no library copies to the host

Work = Callable[[DeviceMemory], None]


class CudaRuntime:
    """`give` is called with what executes a launch; `copy_from_host` with an address of the device, one of the host, and bytes.

    `executed`: for each kernel by image and name, it and how often threads executed each instruction.
    """

    def __init__(self, give: Callable[[Work], None], copy_from_host: Callable[[int, int, int], None], allowed: Allowed) -> None:
        self._give, self._copy_from_host, self._allowed = give, copy_from_host, allowed
        self.executed: dict[tuple[int, str], tuple[Kernel, NDArray[np.int64]]] = {}
        self._encoded: dict[tuple[int, str], Encoded] = {}
        self._texts: dict[int, str] = {}
        self._error: Exception | None = None
        link = [f"-Wl,-soname,libcudart.so.13,--version-script={_FOLDER / 'exports.map'}"]
        self._library = ctypes.CDLL(str(compiled(_FOLDER, "cudart.cpp", link)), mode=ctypes.RTLD_GLOBAL)
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        sizes = ctypes.POINTER(ctypes.c_uint)
        launch = ctypes.CFUNCTYPE(number, pointer, ctypes.c_char_p, sizes, size, number, ctypes.POINTER(pointer))
        copy = ctypes.CFUNCTYPE(number, ctypes.c_uint64, ctypes.c_uint64, size, number)
        fill = ctypes.CFUNCTYPE(number, ctypes.c_uint64, number, size)
        self._handlers = launch(self._told(self._launch)), copy(self._told(self._copy)), fill(self._told(self._fill))
        self._library.set_handlers(*self._handlers)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Encloses a call of a library, which tells less of an error than this raises."""
        self._error = None
        try:
            yield
        except Exception as error:
            raise (self._error or error) from None
        if self._error is not None:
            raise self._error

    def _told(self, handler: Callable[..., None]) -> Callable[..., int]:
        def handle(*arguments: Any) -> int:
            try:
                handler(*arguments)
            except Exception as error:
                self._error = self._error or error
                return _FAILED
            return _SUCCESS

        return handle

    def _launch(self, image: int, name: bytes, sizes: Any, shared: int, most_shared: int, arguments: Any) -> None:
        key = image, name.decode()
        if key not in self.executed:
            if image not in self._texts:
                self._texts[image] = ptx_of(image)
            kernel = replace(read_kernel(self._texts[image], key[1]), allowed=self._allowed)
            self.executed[key] = kernel, np.zeros(len(kernel.instructions), np.int64)
            self._encoded[key] = Encoded(kernel, shared_layout(kernel, 0)[0])
        (kernel, executed), encoded = self.executed[key], self._encoded[key]
        given = tuple(ctypes.string_at(arguments[at], one.size) for at, one in enumerate(kernel.parameters))
        launch = Launch((sizes[0], sizes[1], sizes[2]), (sizes[3], sizes[4], sizes[5]), given, shared)
        check_limits(kernel, launch)
        if shared > max(most_shared, _STATIC_SHARED):
            raise KernelFault(f"{kernel.name}: {shared} bytes of shared memory, of at most {most_shared} that it has asked for")

        def run(memory: DeviceMemory) -> None:
            np.add(executed, execute(kernel, memory, launch, encoded), out=executed)

        self._give(run)

    def _copy(self, target: int, source: int, size: int, kind: int) -> None:
        if kind not in _FROM_HOST:
            raise NotImplementedError(f"a copy of kind {kind}")
        self._copy_from_host(target, source, size)

    def _fill(self, target: int, byte: int, size: int) -> None:
        self._give(lambda memory: memory.write(target, np.full(size, byte, np.uint8)))


def ptx_of(image: int) -> str:
    """The PTX in the fat binary at an address. Raises ValueError if there is none that can be read."""
    magic, _, header, size = struct.unpack("<IHHQ", ctypes.string_at(image, 16))
    if magic != _FAT_BINARY:
        raise ValueError("this is no fat binary")
    at, end = image + header, image + header + size
    while at < end:
        kind, _, header, size, compressed = struct.unpack("<HHIQI", ctypes.string_at(at, 20))
        if kind == _IS_PTX and not compressed:
            return ctypes.string_at(at + header, size).rstrip(b"\0").decode()
        at += header + size
    raise ValueError("a fat binary without PTX that is not compressed")
