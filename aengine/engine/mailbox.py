"""Thread edge 1: commands from any thread to the step thread. A lock-free hand-over of plain data."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from dataclasses import dataclass

from aengine.scheduler import Request


@dataclass(frozen=True, slots=True)
class Submit:
    requests: list[Request]  # the sequences of one request


@dataclass(frozen=True, slots=True)
class Cancel:
    key: int


@dataclass(frozen=True, slots=True)
class Park:
    key: int


@dataclass(frozen=True, slots=True)
class Unpark:
    key: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Run no step after those under way; answered with `Done(ticket, 0)` when they are over."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Unpause:
    """Run steps again."""


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Forget cached prefixes; answered with `Done(ticket, pages freed)`."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End all requests and the thread."""


Command = Submit | Cancel | Park | Unpark | Pause | Unpause | FlushCache | Stop


MAX_WAIT_SECONDS = 3600.0
"""Of one `wait`: a deadline may be further away than the platform can wait."""


class Mailbox:
    """`post` from any thread, also from a destructor; `wait` and `take` from the step thread alone.

    A destructor may run in the middle of any line here, in the thread that runs that line. So there is no lock that a line holds: the
    bell is one that is only ever taken by who waits, and whoever posts lets it go.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self.signal = ctypes.c_int32()
        """Not 0: something may have been posted since the last `take`. It may be read without the interpreter."""
        self._bell = threading.Lock()  # free: something may have been posted since the last `take`
        self._bell.acquire()

    def post(self, command: Command) -> None:
        self._commands.append(command)
        self.signal.value = 1
        with contextlib.suppress(RuntimeError):  # it is free already
            self._bell.release()

    def wait(self, timeout: float | None = None) -> None:
        """Until something is posted, or `timeout` seconds, or MAX_WAIT_SECONDS if that is less."""
        self._bell.acquire(timeout=MAX_WAIT_SECONDS if timeout is None else min(timeout, MAX_WAIT_SECONDS))

    def take(self) -> list[Command]:
        """What was posted since the last call, in order; what is posted meanwhile may be left for the next."""
        self.signal.value = 0  # before looking, as `post` sets it after adding
        if not self._commands:
            return []  # most often; should the bell be free by now, the next `wait` ends at once
        self._bell.acquire(blocking=False)  # before looking: what is posted from here on lets it go again
        return [self._commands.popleft() for _ in range(len(self._commands))]
