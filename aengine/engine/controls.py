"""Commands to the step thread whose completion is awaited: pause, unpause, flush the prefix cache. Lives in the event loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future

from aengine.engine.loop_edge import LoopEdge
from aengine.engine.mailbox import Command, FlushCache, Pause, Unpause
from aengine.engine.step_driver import Done


class Controls:
    """`post` hands a command to the step thread, which reports `Done` to `on_done`."""

    def __init__(self, edge: LoopEdge, post: Callable[[Command], None]) -> None:
        self._edge = edge
        self._post = post
        self._waiting: dict[int, Future[int]] = {}  # by ticket
        self._tickets = itertools.count()

    async def flush_cache(self) -> int:
        return await self._run(FlushCache)

    async def pause(self) -> None:
        await self._run(Pause)

    def unpause(self) -> None:
        self._post(Unpause())

    def on_done(self, done: Done) -> None:
        if (future := self._waiting.pop(done.ticket, None)) is not None:  # else its task was cancelled
            future.set_result(done.value)

    def end_all(self, error: BaseException) -> None:
        """The step thread has ended."""
        while self._waiting:
            self._waiting.popitem()[1].set_exception(error)

    async def _run(self, command: Callable[[int], Command]) -> int:
        ticket = next(self._tickets)
        future = self._waiting[ticket] = Future()
        self._post(command(ticket))
        try:
            return await self._edge.wait(future)
        finally:
            self._waiting.pop(ticket, None)
