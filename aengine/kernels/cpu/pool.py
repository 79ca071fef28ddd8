"""KV pages for the CPU kernels. Owns their memory; the layout is in `src/abi.h` and private to the kernels."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p

import numpy as np
import torch
from numpy.typing import NDArray

from aengine.kernels.cpu.library import BLOCK, KV_SCALE_BYTES, PAGE_ELEMENTS, CPool, Workspace, check
from aengine.kernels.warm_memory import keep_rows, lazy_bytes


class KvPool:
    """Pages of keys and values, initially zero; memory is committed when it is first written."""

    def __init__(
        self, layers_per_page: int, num_pages: int, page_size: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> None:
        """`page_size` is in tokens, fastest if a multiple of 16; `key_dim` and `value_dim` are the widths of a head of the model.
        `dtype` is that of the model, bfloat16 or float32; or int8: each head of a token is rounded to integers with scales of its own."""
        self.num_pages = num_pages
        widths = stored_dim(key_dim), stored_dim(value_dim)
        sizes = [num_pages * page_size * num_kv_heads * size for size in _head_bytes(key_dim, value_dim, dtype)]
        self._memory = [lazy_bytes(size) for size in sizes for _ in range(layers_per_page)]
        self.pages = [memory.reshape(num_pages, -1) for memory in self._memory]
        """[num_pages, bytes of a page] of the keys of each layer, then of the values."""
        pointers = [memory.ctypes.data for memory in self._memory]
        keys, values = ((c_void_p * layers_per_page)(*part) for part in (pointers[:layers_per_page], pointers[layers_per_page:]))
        self.c = CPool(keys, values, layers_per_page, num_pages, page_size, num_kv_heads, *widths, PAGE_ELEMENTS[dtype])

    def keep_pages(self, pages: NDArray[np.int32]) -> None:
        """Returns the memory of all other pages to the system, until they are written again."""
        for memory in self.pages:
            keep_rows(memory, pages)

    def copy_pages(self, workspace: Workspace, sources: NDArray[np.int32], destinations: NDArray[np.int32]) -> None:
        """Copies page sources[i] to page destinations[i]; all sources are read before any destination is written.

        No page is twice a destination. Raises ValueError for pages that are not in the pool.
        """
        read, write = (np.ascontiguousarray(pages, dtype=np.int32) for pages in (sources, destinations))
        if read.shape != write.shape:
            raise ValueError(f"{len(read)} sources do not match {len(write)} destinations")
        status = workspace.kernels.copy_pages(
            ctypes.byref(self.c), read.ctypes.data, write.ctypes.data, len(read), workspace.handle, workspace.threads
        )
        check(status)


def stored_dim(head_dim: int) -> int:
    """How wide a head of keys or values is in a page."""
    return -(-head_dim // BLOCK) * BLOCK


def page_bytes(page_size: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a page for each of its layers."""
    return page_size * num_kv_heads * sum(_head_bytes(key_dim, value_dim, dtype))


def _head_bytes(key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the key, with scales, and of the value of one head of a token."""
    scales = KV_SCALE_BYTES if dtype is torch.int8 else 0
    return stored_dim(key_dim) * dtype.itemsize + scales, stored_dim(value_dim) * dtype.itemsize
