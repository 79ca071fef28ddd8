"""`ReportQueue`: how the step thread's reports reach the event loop without the GIL being released.

`call_soon_threadsafe` releases the GIL to wake the loop, which then keeps it for all its callbacks, while the step thread waits to begin
its step. This queue wakes the loop with the GIL held, so the loop runs when the step thread releases it, which it does in the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from aengine.loop_edge import LoopEdge

T = TypeVar("T")


class ReportQueue(Generic[T]):
    """`put` from any thread; reports are received in the event loop, in order."""

    def __init__(self, edge: LoopEdge, receive: Callable[[T], object]) -> None:
        """To be created in the loop of `edge`, in which `receive` is called with every report."""
        self._edge = edge
        self._receive = receive
        self._reports: deque[T] = deque()
        self._wake_up = _WakeUp()
        self._is_sent = False  # whether a wake-up was sent that the loop has not seen yet
        self._is_watched = edge.watch(self._wake_up.file, self._receive_all)

    def put(self, report: T) -> None:
        """The report is lost once the queue or the loop is closed."""
        if self._is_watched:
            self._reports.append(report)
            if not self._is_sent:
                self._is_sent = True
                self._wake_up.send()
        else:
            self._edge.call_soon(self._receive, report)

    def close(self) -> None:
        """Nothing is received any more. To be called in the loop."""
        if self._is_watched:
            self._edge.unwatch(self._wake_up.file)

    def _receive_all(self) -> None:
        self._wake_up.clear()
        self._is_sent = False  # before looking: what is put from here on sends another one
        try:
            while self._reports:
                self._receive(self._reports.popleft())
        finally:
            if self._reports:  # `receive` raised, and the other reports must not wait for the next `put`
                self._wake_up.send()


class _WakeUp:
    """A pipe, whose `file` can be read from between `send` and `clear`. It is closed with the object and not before, so that no thread can
    be about to write to a file that was opened in its place."""

    def __init__(self) -> None:
        self.file, self._writer = os.pipe()
        os.set_blocking(self.file, False)
        os.set_blocking(self._writer, False)
        self._write = ctypes.PyDLL(None).write  # os.write would release the GIL
        self._write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)

    def send(self) -> None:
        self._write(self._writer, b"x", 1)  # fails if the pipe is full, and then it can be read from

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.file, 4096)

    def __del__(self) -> None:
        os.close(self.file)
        os.close(self._writer)
