"""`LoopEdge.spawn`: work in a task of its own, in asyncio and in trio."""

from __future__ import annotations

import contextvars
import logging

import anyio
import anyio.lowlevel
import pytest
from hang_guard import HANG_SECONDS

from aengine.aio.edge import LoopEdge

pytestmark = pytest.mark.anyio


async def test_its_outcome_is_what_it_returns_or_raises() -> None:
    async def work(number: int) -> int:
        await anyio.lowlevel.checkpoint()
        return 6 // number

    loop = LoopEdge()
    with anyio.fail_after(HANG_SECONDS):
        assert await loop.wait(loop.spawn(work(2))) == 3
        with pytest.raises(ZeroDivisionError):
            await loop.wait(loop.spawn(work(0)))


async def test_what_is_no_exception_is_raised_too() -> None:
    class Panic(BaseException):
        pass

    async def work() -> None:
        raise Panic

    loop = LoopEdge()
    with anyio.fail_after(HANG_SECONDS), pytest.raises(Panic):
        await loop.wait(loop.spawn(work()))


async def test_it_goes_on_without_its_caller_and_its_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    go_on, ended = anyio.Event(), anyio.Event()

    async def work() -> None:
        await go_on.wait()
        try:
            raise ValueError("too late")
        finally:
            ended.set()

    loop = LoopEdge()
    with anyio.fail_after(HANG_SECONDS), caplog.at_level(logging.WARNING, "aengine"):
        async with anyio.create_task_group() as group:
            group.start_soon(loop.wait, loop.spawn(work()))
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert not ended.is_set()
        go_on.set()
        await ended.wait()
        await anyio.wait_all_tasks_blocked()
    assert "too late" in caplog.text


async def test_it_runs_in_no_context_of_the_caller() -> None:
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("the caller's")

    async def work() -> str:
        return variable.get()

    loop = LoopEdge()
    with anyio.fail_after(HANG_SECONDS):
        assert await loop.wait(loop.spawn(work())) == "none"
