"""Ranks as threads of one process, with an exchange over memory that they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from aengine.kernels.cpu.library import CpuKernels
from aengine.runner.rank_steps import SharedMemoryExchange, exchange_bytes

T = TypeVar("T")


@contextmanager
def shared_file(size: int) -> Iterator[int]:
    """Memory for the exchange of so many ranks."""
    fd = os.memfd_create("exchange")
    try:
        os.ftruncate(fd, exchange_bytes(size))
        yield fd
    finally:
        os.close(fd)


def exchanges(kernels: CpuKernels, size: int, timeout: float = 60.0) -> list[SharedMemoryExchange]:
    with shared_file(size) as fd:
        return [SharedMemoryExchange(kernels, fd, index, size, timeout) for index in range(size)]


def on_ranks(size: int, run: Callable[[int], T]) -> list[T]:
    """run(0) .. run(size - 1), each on a thread of its own."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
