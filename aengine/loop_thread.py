"""`LoopThread`: an event loop of asyncio in a thread of its own, for what needs asyncio in a program that runs in trio.

Owns the thread, and how a call goes there and comes back. Knows nothing of what runs there.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import anyio

from aengine.errors import EngineStateError
from aengine.loop_edge import LoopEdge

T = TypeVar("T")


class LoopThread:
    """Made, started and stopped in one event loop, from which all calls come."""

    def __init__(self, name: str) -> None:
        self.edge = LoopEdge()
        self._loop = _Loop()
        self._stop = asyncio.Event()
        self._stopping = False
        self._ended = anyio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()  # what is posted before the loop runs waits for it

    async def stop(self) -> None:
        """Cancel what runs there, and end the thread. Repeated calls do nothing."""
        self._stopping = True
        self.post(self._stop.set)
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Run `function(*args)` there, after whatever was posted before; from any thread. Does nothing once the loop has ended."""
        self._loop.call_soon_threadsafe(function, *args, context=contextvars.Context())  # in the caller's it would be trio that runs

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """What `function` gives, which is called and awaited there. Cancelling the caller cancels it, and returns when it has ended. Raises
        `EngineStateError` if the loop is stopped."""
        self.edge.check_current()
        if self._stopping:
            raise EngineStateError("the engine is closed")
        call = _Call(function, self.edge)
        self.post(call.begin)
        try:
            await call.ended.wait()
        except BaseException:
            self.post(call.cancel)
            with anyio.CancelScope(shield=True):
                await call.ended.wait()
            raise
        return call.result()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self.edge.call_soon(self._ended.set)

    async def _serve(self) -> None:
        await self._stop.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()


class _Loop(asyncio.SelectorEventLoop):
    """Drops what comes when it is closed. gRPC has one poller for all loops of a process, so that the last events of a call here may be
    handed over by another loop, where they would raise."""

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            return asyncio.Handle(callback, args, self, context)  # that never runs


class _Call(Generic[T]):
    """A call on its way there and back. `ended` belongs to the loop of the caller; so does the rest once it is set."""

    def __init__(self, function: Callable[[], Awaitable[T]], edge: LoopEdge) -> None:
        self.ended = anyio.Event()
        self._function = function
        self._edge = edge
        self._task: asyncio.Task[T]

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: self._edge.call_soon(self.ended.set))

    def cancel(self) -> None:
        self._task.cancel()

    def result(self) -> T:
        """Raises what the function raised."""
        if self._task.cancelled():
            raise EngineStateError("the engine was closed")
        return self._task.result()

    async def _run(self) -> T:
        return await self._function()
