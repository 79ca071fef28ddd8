"""The hand-over into the event loop: in order, complete, and without taking the GIL from the thread that reports."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import anyio.to_thread
import pytest
from oracle_engine import OracleEngine, until

from aengine import SamplingParams
from aengine.aio.edge import LoopEdge
from aengine.engine.edges import ReportQueue

pytestmark = pytest.mark.anyio
only_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])


def new_queue(receive: Callable[[Any], object]) -> ReportQueue[Any]:
    return ReportQueue(LoopEdge(), receive)


async def test_everything_is_received_in_order() -> None:
    received: list[int] = []
    loops_thread = threading.get_ident()

    def receive(number: int) -> None:
        assert threading.get_ident() == loops_thread
        received.append(number)

    queue = new_queue(receive)

    def report() -> None:
        for number in range(20_000):
            queue.put_report(number)

    await anyio.to_thread.run_sync(report)
    await until(lambda: len(received) == 20_000)
    assert received == list(range(20_000))
    queue.close()


@pytest.mark.slow
async def test_several_may_report() -> None:
    received: list[tuple[int, int]] = []
    queue = new_queue(received.append)
    threads = [threading.Thread(target=lambda who=who: [queue.put_report((who, number)) for number in range(3000)]) for who in range(4)]
    for thread in threads:
        thread.start()
    await until(lambda: len(received) == 12_000)
    for who in range(4):
        assert [number for whose, number in received if whose == who] == list(range(3000))
    queue.close()


@only_asyncio
async def test_the_thread_that_reports_goes_on_first() -> None:
    """It keeps the GIL: the loop gets it when the thread releases it."""
    order: list[str] = []
    queue = new_queue(order.append)

    def report() -> None:
        for _ in range(30):
            queue.put_report("received")
            order.append("went on")
            while order[-1] != "received":
                os.sched_yield()  # releases the GIL

    interval = sys.getswitchinterval()
    sys.setswitchinterval(5.0)
    try:
        await anyio.to_thread.run_sync(report)
    finally:
        sys.setswitchinterval(interval)
    assert order == ["went on", "received"] * 30
    queue.close()


@only_asyncio
async def test_a_report_that_fails_holds_up_no_other() -> None:
    received: list[int] = []
    errors: list[BaseException | None] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context.get("exception")))

    def receive(number: int) -> None:
        if number % 3 == 0:
            raise ValueError(number)
        received.append(number)

    queue = new_queue(receive)
    for number in range(10):
        queue.put_report(number)
    await until(lambda: len(received) == 6)
    assert [str(error) for error in errors] == ["0", "3", "6", "9"]
    queue.close()


@only_asyncio
async def test_nothing_is_received_from_a_closed_queue() -> None:
    received: list[int] = []
    queue = new_queue(received.append)
    queue.close()
    for number in range(100_000):  # more than a pipe holds
        queue.put_report(number)
    await asyncio.sleep(0)
    assert not received


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.quick_cases(1)
async def test_engines_leave_no_files_open() -> None:
    async def run() -> None:
        async with OracleEngine() as engine:
            assert len([token async for token in engine.stream([1, 2], SamplingParams(seed=1, max_tokens=3, ignore_eos=True))]) == 3

    await run()
    before = open_files()
    for _ in range(5):
        await run()
    await until(lambda: open_files() <= before)  # the last step thread may be on its way out
