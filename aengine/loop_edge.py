"""`LoopEdge`: from another thread into an event loop, asyncio's or trio's. Knows nothing of the functions it runs there."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from aengine.errors import EngineStateError

T = TypeVar("T")


class LoopEdge:
    """The event loop it was created in, as seen from another thread."""

    def __init__(self) -> None:
        self._native = running_loop()
        self._schedule = self._native.call_soon_threadsafe if hasattr(self._native, "call_soon_threadsafe") else self._native.run_sync_soon

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Run `function(*args)` in the loop, after whatever was handed over before. Does nothing once the loop is closed."""
        with contextlib.suppress(RuntimeError):  # raised by both loops when they are closed
            self._schedule(function, *args)

    async def wait(self, future: Future[T]) -> T:
        """The result of `future`, which is cancelled with the waiting task."""
        done = anyio.Event()
        future.add_done_callback(lambda _: self.call_soon(done.set))
        try:
            await done.wait()
            return future.result()
        finally:
            future.cancel()

    def call_later(self, seconds: float, function: Callable[..., object], *args: object) -> Callable[[], object]:
        """Run `function(*args)`, which must not raise, in the loop after `seconds`, unless what is returned was called. To be called in
        the loop."""
        context = contextvars.Context()  # not the caller's
        if hasattr(self._native, "call_later"):
            timer: asyncio.TimerHandle = self._native.call_later(max(0.0, seconds), function, *args, context=context)
            return timer.cancel
        import trio

        scope = trio.CancelScope()

        async def wait() -> None:
            with scope:
                await trio.sleep(max(0.0, seconds))
                function(*args)

        trio.lowlevel.spawn_system_task(wait, context=context)
        return scope.cancel

    def watch(self, file: int, callback: Callable[[], object]) -> bool:
        """Run `callback` in the loop whenever `file` can be read from. False: this loop has no way to. To be called in the loop."""
        if not hasattr(self._native, "add_reader"):
            return False  # trio has tasks for that
        try:
            contextvars.Context().run(self._native.add_reader, file, callback)  # not in the caller's context
        except NotImplementedError:
            return False
        return True

    def unwatch(self, file: int) -> None:
        self._native.remove_reader(file)

    def check_current(self) -> None:
        """Raise EngineStateError unless called from this loop."""
        if running_loop() is not self._native:
            raise EngineStateError("the engine belongs to another event loop than the one that is running")


def running_loop() -> Any:
    """asyncio's event loop, or trio's TrioToken. Raises `EngineStateError` where none runs."""
    try:
        return anyio.lowlevel.current_token().native_token
    except RuntimeError:
        pass
    try:
        return asyncio.get_running_loop()  # in a callback, where there is no task
    except RuntimeError:
        raise EngineStateError("the engine must be used from a running asyncio or trio event loop") from None
