"""Large tensors whose memory is committed when it is first written, or was committed beforehand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aengine.kernels.warm_memory import WarmMemory, lazy_bytes

Allocate = Callable[[int], Tensor]
"""A function: size -> [size] uint8 zeros."""


def lazy_zeros(size: int) -> Tensor:
    """[size] uint8 zeros on a 2 MiB boundary; committed when they are first written."""
    return torch.from_numpy(lazy_bytes(size)) if size else torch.zeros(0, dtype=torch.uint8)


def warm_zeros(warm: WarmMemory) -> Allocate:
    """Allocates from `warm` on page boundaries, and lazily when it has too few bytes left."""

    def allocate(size: int) -> Tensor:
        taken = warm.take(size)
        return lazy_zeros(size) if taken is None else torch.from_numpy(taken)

    return allocate
