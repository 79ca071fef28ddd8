"""The exchange between ranks alone: what arrives, in threads and in processes, and what happens when a rank does not come."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta

import cpu_ops
import numpy as np
import pytest
import torch
import torch.distributed
from hang_guard import HANG_SECONDS, growing
from rank_threads import exchanges, on_ranks, shared_file

from aengine.kernels.cpu.library import CpuKernels, ExchangeError, RankExchange, Workspace, load_kernels
from aengine.runner import rank_steps as module
from aengine.runner.rank_steps import GroupExchange, SharedMemoryExchange


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    """Of one level: an exchange is the same at all of them."""
    return load_kernels()


WIDTHS = {2: [5, 70], 3: [128, 0, 7], 4: [1, 2, 3, 700_000]}  # the last is more than a slot has room for
ROWS = (0, 1, 3, 900)


def part_of(index: int, rows: int, width: int) -> torch.Tensor:
    return torch.arange(rows * width, dtype=torch.float32).view(rows, width) % 1009 + 10_000 * index


def gathered(kernels: CpuKernels, exchange: RankExchange, widths: list[int], threads: int) -> None:
    """Gathers parts of several sizes and checks what arrives."""
    workspace = Workspace(kernels, threads, exchange)
    firsts, index = [0, *np.cumsum(widths).tolist()], exchange.c.index
    for rows in (rows for rows in ROWS if rows * sum(widths) < 3_000_000):
        found = cpu_ops.gather_ranks(workspace, part_of(index, rows, widths[index]), firsts)
        if index:
            assert found is None
        else:
            assert torch.equal(found, torch.cat([part_of(i, rows, width) for i, width in enumerate(widths)], 1))


@pytest.mark.parametrize("size", WIDTHS)
def test_ranks_give_each_other_columns(kernels: CpuKernels, size: int) -> None:
    ranks = exchanges(kernels, size)
    on_ranks(size, lambda index: gathered(kernels, ranks[index], WIDTHS[size], 1 + index % 2))
    assert {rank.lagging() for rank in ranks} == {()}


def follow(fd: int, index: int, size: int) -> None:
    """What a process of `test_ranks_are_processes` does."""
    kernels = load_kernels()
    gathered(kernels, SharedMemoryExchange(kernels, fd, index, size, 60.0), WIDTHS[size], 1)


@pytest.mark.slow
def test_ranks_are_processes() -> None:
    size = 2
    with shared_file(size) as fd:
        command = "import sys; sys.path[:0] = sys.argv[1].split(':'); import test_cpu_exchange as t; t.follow(*map(int, sys.argv[2:]))"
        others = [
            subprocess.Popen([sys.executable, "-c", command, ":".join(sys.path), *map(str, (fd, index, size))], pass_fds=[fd])
            for index in range(1, size)
        ]
        follow(fd, 0, size)
        assert [other.wait(HANG_SECONDS) for other in others] == [0] * (size - 1)


def test_a_rank_that_does_not_come_is_named(kernels: CpuKernels) -> None:
    def run(index: int) -> str | None:
        workspace = Workspace(kernels, 2, ranks[index])
        try:
            cpu_ops.gather_ranks(workspace, torch.zeros(1, 1), [0, 1, 2, 3])
        except ExchangeError:
            return None  # a thread came too late
        if index == 1:
            return ""
        with pytest.raises(ExchangeError) as first:
            cpu_ops.gather_ranks(workspace, torch.zeros(1, 1), [0, 1, 2, 3])
        with pytest.raises(ExchangeError):
            cpu_ops.gather_ranks(workspace, torch.zeros(1, 1), [0, 1, 2, 3])
        assert first.value.lagging == (1,)
        return str(first.value)

    for timeout in growing(0.05):
        ranks = exchanges(kernels, 3, timeout=timeout)
        messages = on_ranks(3, run)
        if None not in messages:
            break
    assert "rank 1 did not come in time; the step cannot be finished" in messages


def test_abort_ends_the_wait_of_a_rank(kernels: CpuKernels) -> None:
    waiting, other = exchanges(kernels, 2, timeout=3600.0)
    ended = []

    def wait() -> None:
        with pytest.raises(ExchangeError, match="aborted") as caught:
            cpu_ops.gather_ranks(Workspace(kernels, 1, waiting), torch.zeros(1, 1), [0, 1, 2])
        ended.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    while other.lagging() != (1,):  # it has begun to wait
        os.sched_yield()
    other.abort()
    thread.join(HANG_SECONDS)
    assert not ended[0].timed_out
    with pytest.raises(ExchangeError, match="aborted"):
        cpu_ops.gather_ranks(Workspace(kernels, 1, other), torch.zeros(1, 1), [0, 1, 2])


def test_a_process_group_is_an_exchange(kernels: CpuKernels) -> None:
    size, store = 2, torch.distributed.HashStore()

    def run(index: int) -> None:
        group = torch.distributed.ProcessGroupGloo(store, index, size)
        gathered(kernels, GroupExchange(group), [300_000, 3], 2)

    on_ranks(size, run)


def test_a_process_group_that_times_out_names_the_other_rank(kernels: CpuKernels, caplog: pytest.LogCaptureFixture) -> None:
    store, timeout = torch.distributed.HashStore(), timedelta(seconds=0.2)
    groups = on_ranks(2, lambda index: torch.distributed.ProcessGroupGloo(store, index, 2, timeout))
    with pytest.raises(ExchangeError, match="rank 1 did not come in time") as caught:
        cpu_ops.gather_ranks(Workspace(kernels, 1, GroupExchange(groups[0])), torch.zeros(1, 1), [0, 1, 2])
    assert caught.value.lagging == (1,)
    assert "the exchange between ranks failed" in caplog.text


def test_what_is_no_rank_is_refused(kernels: CpuKernels) -> None:
    with shared_file(2) as fd:
        for index, size in ((2, 2), (-1, 2), (0, module.MAX_RANKS + 1)):
            with pytest.raises(ValueError, match=f"rank {index} is not one of {size} ranks"):
                SharedMemoryExchange(kernels, fd, index, size, 1.0)
