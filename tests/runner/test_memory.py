"""The arithmetic of the pool."""

from __future__ import annotations

import pathlib

import pytest

from aengine.errors import InsufficientMemoryError
from aengine.runner import memory
from aengine.runner.memory import size_pool


def size(budget: int, *, page_size: int = 16, seqs: int = 4, length: int = 100, may_shorten: bool = False) -> tuple[int, int]:
    return size_pool(budget, 1000, page_size, seqs, length, may_shorten=may_shorten)


def test_one_sequence_and_the_reserved_page_must_fit() -> None:
    assert size(8_000) == (8, 100)  # 7 pages of 16 hold 100 tokens
    with pytest.raises(InsufficientMemoryError, match=r"7\.81 KiB \(7 \+ 1 pages of 1000 bytes\)"):
        size(7_999)


def test_shortening_keeps_what_fits() -> None:
    assert size(7_999, may_shorten=True) == (7, 96)
    assert size(2_000, may_shorten=True) == (2, 16)
    assert size(3_000, page_size=1, may_shorten=True) == (3, 2)
    for budget, page_size in ((1_999, 16), (2_999, 1), (-5_000, 16)):
        with pytest.raises(InsufficientMemoryError, match="one sequence of 2 tokens"):
            size(budget, page_size=page_size, may_shorten=True)


def test_no_more_than_all_sequences_need() -> None:
    assert size(10**9) == (4 * 7 + 1, 100)


def test_free_memory_respects_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"memory.max": 1 << 20, "memory.current": 1 << 19}
    monkeypatch.setattr(memory, "_number", lambda path: limits[pathlib.Path(path).name])
    assert memory.free_host_memory() == 1 << 19
    assert memory.cpu_budget() == 1 << 17
    limits["memory.current"] = 1 << 30
    assert memory.free_host_memory() == 0
    limits["memory.max"] = None
    assert memory.free_host_memory() > 1 << 20
    assert memory.cpu_budget() <= 1 << 30
