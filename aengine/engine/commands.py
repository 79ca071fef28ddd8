"""`Commands`: what the event loop has the step thread do, and its replies. Lives in the event loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from aengine.engine.mailbox import Command
from aengine.engine.step_driver import Done
from aengine.loop_edge import LoopEdge

T = TypeVar("T")


class Commands:
    """`post` hands a command to the step thread."""

    def __init__(self, edge: LoopEdge, post: Callable[[Command], None]) -> None:
        self._edge = edge
        self._post = post
        self._waiting: set[Future[Any]] = set()  # the replies that are not there yet
        self._ended: BaseException | None = None

    async def run(self, make: Callable[[Future[T]], Command]) -> T:
        """Have the step thread carry out a command; returns or raises what it replies."""
        reply = self.send(make)
        try:
            return await self._edge.wait(reply)
        finally:
            self._waiting.discard(reply)

    def send(self, make: Callable[[Future[T]], Command]) -> Future[T]:
        """As `run`, without waiting."""
        reply: Future[T] = Future()
        if self._ended is not None:
            reply.set_exception(self._ended)
            return reply
        self._waiting.add(reply)
        self._post(make(reply))
        return reply

    def settle(self, done: Done) -> None:
        """The step thread has replied."""
        if done.reply not in self._waiting:
            return  # its task was cancelled
        self._waiting.remove(done.reply)
        if isinstance(done.value, BaseException):
            done.reply.set_exception(done.value)
        else:
            done.reply.set_result(done.value)

    def end(self, error: BaseException) -> None:
        """The step thread has ended: so do all that wait, with `error`."""
        self._ended = error
        while self._waiting:
            self._waiting.pop().set_exception(error)
