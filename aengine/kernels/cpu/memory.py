"""Large arrays that cost nothing until they are touched."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20  # bytes


def lazy_zeros(size: int) -> Tensor:
    """[size] uint8 zeros that lie on a 2 MiB boundary.

    Memory is committed when it is first touched, in huge pages where the system has them: fewer address translations, and hardware
    prefetchers stop at the end of a page.
    """
    if size == 0:
        return torch.zeros(0, dtype=torch.uint8)
    mapped = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping alive
    shift = -whole.data_ptr() % _HUGE_PAGE
    return whole[shift : shift + size]
