"""The contract of a graph recorder, and recordings in pieces.

A graph reads and writes memory at fixed addresses: whatever differs from step to step must be in a buffer, never a Python number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

Replay = Callable[[], None]
_WARM_UPS = 2  # before recording: libraries are set up at the first call, and autotuners measure


class Capture(Protocol):
    """Records graphs, in the thread that created it."""

    def session(self) -> AbstractContextManager[None]:
        """To be entered around all recording."""

    def begin(self) -> None:
        """Operations are recorded from now on. They may not be executed."""

    def end(self) -> Replay:
        """Returns a replay of what was recorded since `begin`, which can be called any number of times."""

    def memory(self) -> int:
        """Bytes of the device's memory in use; what was taken between two calls is their difference. Waits for the device."""


class Pieces:
    """A recording with interruptions: recorded parts, and between them actions that are run at each replay."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._parts: list[Replay] = []
        self._recording = False

    def record(self, work: Callable[[], None]) -> None:
        """Runs `work`, then records it. It may call `interrupt` of this object, in the same places each time."""
        for _ in range(_WARM_UPS):
            work()
        self._recording = True
        self._capture.begin()
        try:
            work()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                self._capture.end()
            raise
        finally:
            self._recording = False
        self._parts.append(self._capture.end())

    def interrupt(self, action: Replay) -> None:
        """To be called by the work: runs `action` now, and at this place of every replay."""
        if not self._recording:
            return action()
        self._parts += (self._capture.end(), action)
        action()
        self._capture.begin()

    def replay(self) -> None:
        for part in self._parts:
            part()
