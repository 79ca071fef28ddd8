"""Host memory that a thread commits before it is needed, and files as memory. Does not know what it is used for; imports no torch.

The first write to a page takes longer than filling it, on a virtual machine several times longer. A process that is busy on one core, for
example with imports, can do that on another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pathlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HUGE_PAGE = 2 << 20  # bytes
_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mmap = _libc.mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_STRIDE = 8 << 20  # bytes that the thread touches between two checks whether it is to stop


Allocate = Callable[[int], NDArray[np.uint8]]
"""A function: size -> [size] zeros."""


def lazy_bytes(size: int, *, small: int = 0) -> NDArray[np.uint8]:
    """[size] zeros on a 2 MiB boundary, which are committed when they are first touched.

    Pages are huge where the system supports it: there are fewer address translations, and hardware prefetchers stop at the end of a page.
    But the `small` first bytes are in pages of the usual size, of which little is committed where little is touched.
    """
    mapped, first = _map(size)
    if small and hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_NOHUGEPAGE, first, min(-(-small // mmap.PAGESIZE) * mmap.PAGESIZE, len(mapped) - first))
    return np.frombuffer(mapped, np.uint8, size, first)  # holds a reference to the mapping


def keep_rows(memory: NDArray[Any], rows: NDArray[np.int32]) -> None:
    """Returns to the system what of `memory`, on `lazy_bytes` and contiguous, lies between `rows` of it, which ascend. What is returned
    becomes zeros and is committed again when it is touched; what shares a page of the system with a row is left as it is."""
    address, size = memory.ctypes.data, memory.nbytes // len(memory)
    bounds = np.concatenate(([-1], rows, [len(memory)])).astype(np.int64)
    gaps = np.flatnonzero(np.diff(bounds) > 1)
    firsts = -(-(address + (bounds[gaps] + 1) * size) // mmap.PAGESIZE) * mmap.PAGESIZE
    ends = (address + bounds[gaps + 1] * size) // mmap.PAGESIZE * mmap.PAGESIZE
    for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
        if end > first and _madvise(first, end - first, mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")


def map_file(path: pathlib.Path) -> NDArray[np.uint8]:
    """The content of a regular file, which is not followed through a link, on a 2 MiB boundary. Processes that map it share its pages,
    which are huge where the system keeps the file so. They are read when they are first touched. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(-1, size + _HUGE_PAGE, flags=flags, prot=mmap.PROT_READ)  # reserves addresses
        everything = np.frombuffer(mapped, np.uint8)
        begin = everything.__array_interface__["data"][0]
        first = -begin % _HUGE_PAGE
        if size and _mmap(begin + first, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        if hasattr(mmap, "MADV_HUGEPAGE"):  # without it a page that is not in memory is read in small pieces
            _madvise(begin + first, size, mmap.MADV_HUGEPAGE)
        return everything[first : first + size]  # which holds a reference to the mapping, and that ends both
    finally:
        os.close(descriptor)


class WarmMemory:
    """Memory that a thread touches from the first byte on, until some of it is taken. All calls come from one thread."""

    def __init__(self, size: int) -> None:
        self._mapped, self._first = _map(size)
        self._bytes = np.frombuffer(self._mapped, np.uint8, size, self._first)
        self._taken = 0
        self.touched = 0
        """Bytes that are committed by now."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="aengine-warm", daemon=True)
        self._thread.start()

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """[size] zeros on a page boundary that were not taken before; `lazy_bytes` when fewer are left. Stops the thread."""
        self._finish()
        first, end = self._taken, self._taken + size
        if end > len(self._bytes):
            return lazy_bytes(size)
        self._taken = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        return self._bytes[first:end]

    def __enter__(self) -> WarmMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        """Returns the memory that was not taken to the system."""
        self._finish()
        left = len(self._bytes) - self._taken
        if left > 0:
            self._mapped.madvise(mmap.MADV_DONTNEED, self._first + self._taken, left)
        self._bytes = self._bytes[:0]

    def _touch(self) -> None:
        address, size = self._bytes.ctypes.data, len(self._bytes)
        for first in range(0, size, _STRIDE):
            if self._stop.is_set():
                return
            ctypes.memset(address + first, 0, min(_STRIDE, size - first))  # without the GIL
            self.touched = min(first + _STRIDE, size)

    def _finish(self) -> None:
        self._stop.set()
        self._thread.join()


def _map(size: int) -> tuple[mmap.mmap, int]:
    """A mapping, and the offset of its `size` bytes."""
    mapped = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped, -np.frombuffer(mapped, np.uint8).ctypes.data % _HUGE_PAGE
