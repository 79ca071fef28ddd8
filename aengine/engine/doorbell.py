"""`Doorbell`: how the step thread's reports come into the event loop without taking the interpreter from the step thread.

`call_soon_threadsafe` lets go of the interpreter to wake the loop, and the loop then keeps it for all its callbacks, while the step thread
waits to begin its step. This bell is rung with the interpreter held, so that the loop begins when the step thread lets go of it, which
it does in the model. Owns the pipe of that; knows nothing of what is reported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from aengine.engine.loop_edge import LoopEdge

T = TypeVar("T")


class Doorbell(Generic[T]):
    """Rung in any thread, answered in the event loop, in the order of the rings."""

    def __init__(self, edge: LoopEdge, receive: Callable[[T], object]) -> None:
        """To be made in the loop of `edge`, in which `receive` is called with every report."""
        self._edge = edge
        self._receive = receive
        self._reports: deque[T] = deque()
        self._pipe = _Pipe()
        self._is_rung = False  # and not answered yet
        self._is_watched = edge.watch(self._pipe.reader, self._answer)

    def ring(self, report: T) -> None:
        """Have `report` received; it is lost once the bell or the loop is closed."""
        if self._is_watched:
            self._reports.append(report)
            if not self._is_rung:
                self._is_rung = True
                self._pipe.fill()
        else:
            self._edge.call_soon(self._receive, report)

    def close(self) -> None:
        """Receive nothing any more. To be called in the loop."""
        if self._is_watched:
            self._edge.unwatch(self._pipe.reader)

    def _answer(self) -> None:
        self._pipe.drain()
        self._is_rung = False  # before looking: what comes from here on rings again
        try:
            while self._reports:
                self._receive(self._reports.popleft())
        finally:
            if self._reports:  # one was not received well, and the others must not wait for the next ring
                self._pipe.fill()


class _Pipe:
    """Can be read from once it was filled, however often, until it is drained. Its ends are closed with the object and not before, so that
    no thread can be about to write to what has become somebody else's file."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._write = ctypes.PyDLL(None).write  # os.write would let go of the interpreter
        self._write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)

    def fill(self) -> None:
        self._write(self._writer, b"x", 1)  # fails where it is full, and then it can be read from

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 4096)

    def __del__(self) -> None:
        os.close(self.reader)
        os.close(self._writer)
