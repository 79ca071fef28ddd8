"""Ranks that start, take steps, fail and end, with `stand_in.py` as the others."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from driving import Driver, driving, ends
from slow_cases import slow_but

from aengine.api.errors import AdapterError, ModelLoadError, RankDiedError, RankHungError
from aengine.parallel import driver as driver_module
from aengine.parallel.messages import Sizes


def children() -> set[str]:
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended
            found.update((thread / "children").read_text().split())
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Neither processes, threads, files nor cores that a thread keeps to."""
    gc.collect()
    files, threads, cores = len(os.listdir("/proc/self/fd")), threading.active_count(), os.sched_getaffinity(0)
    yield
    gc.collect()
    assert (children(), os.sched_getaffinity(0)) == (set(), cores)
    assert threading.active_count() <= threads  # those of tests before may end meanwhile
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.slow
def test_steps_reach_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine")
    with driving(num_ranks=3, load=False) as driver:
        driver.ranks.same({"dtype": "float32"})
        agreed = driver.ranks.agree(Sizes(1000, 128, 5, "part 0"))
        assert agreed == Sizes(98, 64, 8, driver_module._digest_of(["part 0", "part 1", "part 2"]))
    assert "rank 2: did 0 steps" in caplog.messages
    with driving(num_ranks=3) as driver:
        for step in range(3):
            driver.step((step, 7), (5, step))
        driver.wait_for_steps((1, 2))
        for rank in (1, 2):
            assert driver.of_rank(rank).tolist() == [driver.pid(rank), 3, 11, 7]
    driver.ranks.check()
    assert driver.reported.empty()
    assert "rank 1: did 3 steps" in caplog.messages


def test_changes_are_prepared_by_all_ranks_before_any_applies_one() -> None:
    with driving(num_ranks=3) as driver:
        ranks = driver.ranks
        for number, refused_by in ((1, None), (2, 1), (3, 2), (5, None)):
            driver.step(within=partial(ranks.prepare_change, number, str(refused_by)))
            if refused_by is None:
                assert ranks.wait_prepared(number, "part 0") == driver_module._digest_of(["part 0", "part 1", "part 2"])
                ranks.apply_change(number)
                continue
            with pytest.raises(AdapterError, match=rf"^rank {refused_by}: not for me$"):
                ranks.wait_prepared(number, "")
            ranks.discard_change(number)
        driver.step()
        driver.wait_for_steps((1, 2))
        assert [driver.of_rank(rank)[2] for rank in (1, 2)] == [7, 7]
        ranks.prepare_change(6, "exit")
        with pytest.raises(RankDiedError, match=r"^rank [12] \(pid \d+\) ended with exit code 3"):
            ranks.wait_prepared(6, "")


def test_pages_are_read_from_all_ranks_beside_a_change() -> None:
    pages = np.array([3, 5], np.int32)
    with driving(num_ranks=3) as driver:
        ranks = driver.ranks
        ranks.prepare_change(1, "None")  # whose answers come between those
        for _ in range(2):
            ranks.send_read(pages)
            assert [content.tolist() for content in ranks.take_read()] == [[103, 105], [203, 205]]
        ranks.wait_prepared(1, "")
    with driving(num_ranks=2, what="exit") as driver:
        driver.ranks.send_read(pages)
        with pytest.raises(RankDiedError, match=r"^rank 1 \(pid \d+\) ended with exit code 3"):
            driver.ranks.take_read()


def test_ranks_divide_the_cores(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine")
    cores = os.sched_getaffinity(0)
    with driving() as driver:
        own = os.sched_getaffinity(0)
    (said,) = (message for message in caplog.messages if "cores" in message)
    others = set(range(1024)) & set(map(int, said.partition("[")[2].rstrip("]").split(", ")))
    if len(cores) == 1:
        assert own == others == cores
    else:
        assert (len(own), len(others)) == (len(cores) // 2,) * 2
        assert not own & others
        assert own | others <= cores
    assert said == f"rank 1: {driver.ranks.threads} threads on cores {sorted(others)}"


@pytest.mark.slow
def test_progress_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine")
    monkeypatch.setattr(driver_module, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(driver_module, "_GIB", 1)
    with driving(num_ranks=3, load=False) as driver:
        driver.ranks.same({"dtype": "float32"})  # before which each told that 1 of 2 bytes were loaded
        caplog.clear()
        driver.ranks.progress(2, 4)
        assert "loaded 4.0 of 8.0 GiB of weights on 3 of 3 ranks" in caplog.messages


def test_a_rank_that_ends_is_reported() -> None:
    with driving("exit") as driver:
        ended: list[BaseException | None] = []
        driver.ranks.on_failure(lambda: ended.append(driver.ranks._failure))
        driver.step()
        error = driver.failure()
        assert isinstance(error, RankDiedError)
        assert ended == [error]
        assert (error.rank, error.pid, error.log_lines[-1]) == (1, driver.pid(1), "it had enough")
        assert f"rank 1 (pid {error.pid}) ended with exit code 3; its last log lines:" in str(error)
        for call in (driver.ranks.check, driver.step):
            with pytest.raises(RankDiedError) as caught:
                call()
            assert caught.value is error
        late: list[int] = []
        driver.ranks.on_failure(lambda: late.append(1))
        assert late == [1]


def test_a_rank_that_raises_says_so() -> None:
    with driving("raise") as driver:
        driver.step()
        error = driver.failure()
        assert isinstance(error, RankDiedError)
        assert f"rank 1 (pid {driver.pid(1)}) failed: RuntimeError: something broke; its last log lines:" in str(error)
        assert "Traceback (most recent call last):" in error.log_lines


def test_a_rank_that_cannot_load_is_named() -> None:
    with driving("refuse", load=False) as driver:
        with pytest.raises(ModelLoadError, match=r"^rank 1: there is no such model$"):
            driver.load()
        assert isinstance(driver.failure(), ModelLoadError)


def test_what_is_not_the_same_on_a_rank_is_named() -> None:
    with driving("other", load=False) as driver, pytest.raises(ModelLoadError) as caught:
        driver.load()
    assert str(caught.value) == f"rank 1 (pid {driver.pid(1)}) cannot be used: its dtype is float16, that of rank 0 is float32"


def test_loading_can_be_given_up() -> None:
    class GivenUp(Exception):
        pass

    def give_up() -> None:
        raise GivenUp

    with driving(load=False) as driver:
        driver.ranks._check = give_up
        with pytest.raises(GivenUp):
            driver.ranks.agree(Sizes(1, 1, 1, ""))


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named() -> None:
    with driving(num_ranks=3, step_timeout=2.0) as driver:
        os.kill(driver.pid(2), signal.SIGSTOP)
        with pytest.raises(
            RankHungError, match=rf"^rank 2 \(pid {driver.pid(2)}\) did not answer the driver within step_timeout"
        ) as caught:
            driver.step_for_ever(range(5000))
        assert caught.value.rank == 2
        assert "rank 1 (pid" in str(driver.ranks.hung(1))


def test_a_rank_that_another_one_waits_for_is_named() -> None:
    with driving("blame", num_ranks=3) as driver:
        driver.step()
        error = driver.ranks.hung(1)
        assert error is driver.failure()
        assert isinstance(error, RankHungError)
        assert (error.rank, error.pid) == (2, driver.pid(2))
        said = f"rank 2 (pid {driver.pid(2)}) did not answer rank 1 (pid {driver.pid(1)}) within step_timeout; its last log lines:"
        assert str(error).startswith(said)


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.parallel.driver.CLOSE_SECONDS", 0.1)
    with driving("late") as driver:
        gone = ends(driver.pid(1))
    gone()
    driver.ranks.close()
    monkeypatch.undo()
    with driving("late") as driver:
        gone = ends(driver.pid(1))
        driver.ranks.close(at_once=True)
    gone()


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow_but({0, 1}, range(6)))
def test_killed_at_random_steps(seed: int) -> None:
    choose = random.Random(seed)
    with driving(num_ranks=3) as driver:
        gone = [ends(driver.pid(rank)) for rank in (1, 2)]
        victim, at = choose.choice((1, 2)), choose.randrange(200)
        with pytest.raises(RankDiedError) as caught:
            driver.step_for_ever((0, 1), at, driver.pid(victim))
        assert caught.value is driver.failure()
        assert str(caught.value).startswith(f"rank {victim} (pid {driver.pid(victim)}) was killed by SIGKILL")
        assert driver.reported.empty()
    for wait in gone:
        wait()


def test_killed_while_idle() -> None:
    with driving(num_ranks=3) as driver:
        os.kill(driver.pid(2), signal.SIGSEGV)
        error = driver.failure()
        assert isinstance(error, RankDiedError)
        assert (error.rank, "was killed by SIGSEGV" in str(error)) == (2, True)


DRIVER = """
import sys, threading
from driving import Driver
driver = Driver("", 3)
driver.load()
print(driver.pid(1), driver.pid(2), flush=True)
{then}
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("then", ["threading.Event().wait()", "while True: driver.step()"])
def test_ranks_end_with_their_driver(then: str) -> None:
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])
    code = DRIVER.format(then=then)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        gone = [ends(pid) for pid in pids]
        os.kill(pids[1], signal.SIGSTOP)  # it can do nothing itself
        process.kill()
        for wait in gone:
            wait()


def test_signals_of_a_terminal_are_for_the_driver() -> None:
    with driving() as driver:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(driver.pid(1), number)
        driver.step()
        driver.wait_for_steps((1,))
        assert driver.reported.empty()
        assert os.getsid(driver.pid(1)) != os.getsid(0)


def test_a_command_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        Driver("", 3)
