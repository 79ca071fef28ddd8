"""Thread edge 1: commands from any thread to the step thread. A lock-free hand-over of plain data."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from aengine.scheduler import Request


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


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


class Mailbox:
    """`post` from any thread, also from a destructor; `wait` and `take` from the step thread alone."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._posted = threading.Event()

    def post(self, command: Command) -> None:
        self._commands.append(command)
        self._posted.set()

    def wait(self, timeout: float | None = None) -> None:
        """Until something is posted, or `timeout` seconds."""
        self._posted.wait(timeout)

    def take(self) -> list[Command]:
        """What was posted since the last call, in order."""
        self._posted.clear()  # before looking: what is posted from here on sets it again
        commands: list[Command] = []
        while self._commands:
            commands.append(self._commands.popleft())
        return commands
