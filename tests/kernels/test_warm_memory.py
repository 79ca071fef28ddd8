from __future__ import annotations

import gc
import mmap
import pathlib

import numpy as np
import pytest
from numpy.typing import NDArray

from aengine.kernels.warm_memory import WarmMemory, keep_rows, lazy_bytes

MIB = 1 << 20
STATM = pathlib.Path("/proc/self/statm")
needs_statm = pytest.mark.skipif(not STATM.exists(), reason="no /proc")


def resident() -> int:
    """Bytes of this process that are committed."""
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE


def is_of(warm: WarmMemory, part: NDArray[np.uint8]) -> bool:
    """Whether the bytes are those of the warm memory."""
    return np.may_share_memory(part, np.frombuffer(warm._mapped, np.uint8))


def test_what_is_taken_is_zero_on_a_page_and_nobody_elses() -> None:
    with WarmMemory(4 * MIB) as warm:
        parts = [warm.allocate(size) for size in (1, 5000, MIB, 100)]
        for number, part in enumerate(parts, 1):
            assert is_of(warm, part)
            assert not part.any()
            assert part.ctypes.data % mmap.PAGESIZE == 0
            part[:] = number
        for number, part in enumerate(parts, 1):
            assert (part == number).all()


def test_it_gives_no_more_than_it_has() -> None:
    with WarmMemory(3 * mmap.PAGESIZE + 5) as warm:
        for size, given in ((3 * mmap.PAGESIZE + 6, False), (2 * mmap.PAGESIZE + 1, True), (6, False), (5, True), (1, False)):
            part = warm.allocate(size)
            assert (len(part), is_of(warm, part)) == (size, given)


def test_memory_outlives_its_giver_and_nothing_is_given_afterwards() -> None:
    with WarmMemory(2 * MIB) as warm:
        part = warm.allocate(MIB)
        part[:] = 7
    assert not is_of(warm, warm.allocate(1))
    del warm
    gc.collect()
    assert (part == 7).all()


@needs_statm
def test_the_memory_is_committed_beforehand_and_what_is_left_is_given_back() -> None:
    size = 64 * MIB
    before = resident()
    with WarmMemory(size) as warm:
        warm._thread.join()
        assert resident() - before > 0.9 * size
        part = warm.allocate(size // 4)
    assert resident() - before < 0.4 * size
    assert not part.any()


def test_the_thread_does_not_write_to_what_is_taken() -> None:
    for _ in range(20):
        with WarmMemory(32 * MIB) as warm:
            part = warm.allocate(32 * MIB)
            part[:: mmap.PAGESIZE] = 1
            warm._thread.join()
            assert part[:: mmap.PAGESIZE].all()


def test_memory_is_warm_while_that_lasts() -> None:
    with WarmMemory(MIB) as warm:
        first, second, third = warm.allocate(MIB // 2), warm.allocate(MIB), warm.allocate(MIB // 2)
    base = first.ctypes.data
    assert third.ctypes.data == base + MIB // 2
    assert not base <= second.ctypes.data < base + MIB
    assert [len(part) for part in (first, second, third)] == [MIB // 2, MIB, MIB // 2]
    assert not any(part.any() for part in (first, second, third))


@pytest.mark.parametrize("size", [0, 1, 3 * MIB])
def test_lazy_bytes(size: int) -> None:
    array = lazy_bytes(size)
    assert array.dtype == np.uint8
    assert len(array) == size
    assert not array.any()
    if size:
        assert array.ctypes.data % (2 * MIB) == 0
        array[-1] = 1


@pytest.mark.parametrize("size", [1, 100, 4096, 6000, MIB // 3])
def test_rows_are_kept_and_what_is_between_them_is_given_back(size: int) -> None:
    memory = lazy_bytes(20 * size).reshape(20, size)
    memory[:] = np.arange(1, 21, dtype=np.uint8)[:, None]
    for rows in ([], [0], [19], [0, 1, 5, 6, 7, 19], list(range(20))):
        kept = np.array(rows, np.int32)
        memory[:] = np.arange(1, 21, dtype=np.uint8)[:, None]
        keep_rows(memory, kept)
        assert (memory[kept] == kept[:, None] + 1).all()
        others = np.setdiff1d(np.arange(20), kept)
        zeros = (memory[others] == 0).sum()
        assert ((memory[others] == 0) | (memory[others] == others[:, None] + 1)).all()
        assert zeros >= memory[others].size - 2 * mmap.PAGESIZE * (len(rows) + 1)
