"""Commands to the step thread that are answered: pause, go on, empty the prefix cache. Lives in the event loop."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from aengine.engine.mailbox import Command, FlushCache, Pause, Unpause
from aengine.engine.step_loop import Done


class _Ticket:
    def __init__(self) -> None:
        self.done = anyio.Event()
        self.value = 0
        self.error: BaseException | None = None


class Controls:
    """`post` hands a command to the step thread, whose answers come to `answer`."""

    def __init__(self, post: Callable[[Command], None]) -> None:
        self._post = post
        self._tickets: dict[int, _Ticket] = {}
        self._next = 0

    async def flush_cache(self) -> int:
        return await self._ask(FlushCache)

    async def pause(self) -> None:
        await self._ask(Pause)

    def unpause(self) -> None:
        self._post(Unpause())

    def answer(self, done: Done) -> None:
        ticket = self._tickets.get(done.ticket)
        if ticket is not None:  # else nobody waits any longer
            ticket.value = done.value
            ticket.done.set()

    def end_all(self, error: BaseException) -> None:
        """The step thread is gone."""
        for ticket in self._tickets.values():
            ticket.error = error
            ticket.done.set()

    async def _ask(self, command: Callable[[int], Command]) -> int:
        number, self._next = self._next, self._next + 1
        ticket = self._tickets[number] = _Ticket()
        self._post(command(number))
        try:
            await ticket.done.wait()
        finally:
            del self._tickets[number]
        if ticket.error is not None:
            raise ticket.error
        return ticket.value
