"""The arithmetic of the pool."""

from __future__ import annotations

import pathlib

import pytest

from aengine.api.config import EngineConfig
from aengine.api.errors import InsufficientMemoryError
from aengine.cache import PageNeeds
from aengine.runner import memory
from aengine.runner.memory import size_pool


def size(budget: int, *, page_size: int = 16, seqs: int = 4, length: int = 100, may_shorten: bool = False) -> tuple[int, int]:
    return size_pool(budget, 1000, PageNeeds((None,), page_size, 64), seqs, length, may_shorten=may_shorten)


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


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_respects_the_control_groups(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    files = ("memory.max", "memory.current", "") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    root = tmp_path / ("" if version == 2 else "memory")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    assert memory.free_host_memory() > 1 << 20
    own = {1: "5:cpu:/\n4:cpuset,memory:/jobs/one\n", 2: "0::/jobs/one\n"}[version]
    (tmp_path / "own").write_text(own)

    def limit(group: str, most: int | str, used: int, cached: int = 0) -> None:
        folder = root / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / files[0]).write_text(f"{most}\n")
        (folder / files[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{files[2]}active_file {cached}\n{files[2]}inactive_file {cached}\n")

    limit("jobs/one", 1 << 20, 1 << 19)
    limit("other", 1, 1)
    assert memory.free_host_memory() == 1 << 19
    assert memory.cpu_budget() == 1 << 17
    limit("jobs/one", 1 << 20, 1 << 19, 1 << 10)  # cached files give way
    assert memory.free_host_memory() == (1 << 19) + (1 << 11)
    limit("", 1 << 18, 1 << 17)  # that of all groups, or of the container
    assert memory.free_host_memory() == 1 << 17
    limit("", "max" if version == 2 else 2**63 - 4096, 1 << 17)
    limit("jobs/one", 1 << 20, 1 << 30)
    assert memory.free_host_memory() == 0
    limit("jobs/one", "max" if version == 2 else 2**63 - 4096, 1 << 30)
    assert memory.free_host_memory() > 1 << 20
    assert memory.cpu_budget() <= 1 << 30


def test_a_container_that_does_not_see_its_own_group(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/docker/name\n")
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "memory.current").write_text("1024\n")
    assert memory.free_host_memory() == 3072


def test_weights_and_a_smallest_cache_must_fit() -> None:
    def check(available: int, **settings) -> None:
        memory.check_memory(10 << 20, 1 << 20, PageNeeds((None,), 16, 64), EngineConfig(model="demo", **settings), available)

    check(12 << 20)  # a page, and the reserved one
    check(17 << 20, max_model_len=96)
    for available, settings in ((12 << 20, {}), (17 << 20, {"max_model_len": 96})):
        with pytest.raises(InsufficientMemoryError):
            check(available - 1, **settings)
    with pytest.raises(InsufficientMemoryError) as caught:
        check(-5)
    assert str(caught.value) == (
        "the model needs 12.00 MiB of memory (10.00 MiB of weights and 2.00 MiB of KV cache), but 0 bytes are available"
    )
