"""Thread edge 1: commands from any thread to the step thread. A lock-free hand-over of plain data."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from aengine.outputs import MemoryUse
from aengine.runner.changes import Prepared
from aengine.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    requests: list[Request]  # the sequences of one request


@dataclass(frozen=True, slots=True)
class Cancel:
    key: int


@dataclass(frozen=True, slots=True)
class Park:
    key: int
    parked: bool  # False: schedule it again


@dataclass(frozen=True, slots=True)
class Pause:
    """Run no further step; `Done(reply, 0)` is reported when those in flight have finished."""

    reply: Future[int]  # which the step thread passes back and leaves as it is


@dataclass(frozen=True, slots=True)
class Unpause:
    """Run steps again."""


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Forget cached prefixes; then `Done(reply, pages freed)` is reported."""

    reply: Future[int]  # as in `Pause`


@dataclass(frozen=True, slots=True)
class WatchPages:
    """Report the names of cached pages (`PageNames`), and from then on how they change (`PagesChanged`)."""

    watch: int  # whom they are listed for
    most: int  # names


@dataclass(frozen=True, slots=True)
class UnwatchPages:
    """Report no changes of cached pages any more."""


class RunningRequests(enum.Enum):
    """What happens to requests that have begun when weights change."""

    KEEP = "keep"  # they go on, with the KV that they have
    RECOMPUTE = "recompute"  # they go on, and their KV is computed anew
    FINISH = "finish"  # they end first; none begins meanwhile
    ABORT = "abort"  # they are cancelled


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply a change, one of weights when no step is in flight; then `Done(reply, 0)` is reported."""

    reply: Future[int]  # as in `Pause`
    prepared: Prepared
    running: RunningRequests = RunningRequests.KEEP


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give memory back when no step is in flight, and run none until `Wake`; then `Done(reply, MemoryUse)` is reported. An engine that
    sleeps more deeply already goes on doing so."""

    reply: Future[MemoryUse]  # as in `Pause`
    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    """End a sleep, one of level 2 with weights that were prepared; then `Done(reply, MemoryUse)` is reported, or the error if there is
    too little memory."""

    reply: Future[MemoryUse]  # as in `Pause`
    prepared: Prepared | None
    replaces: bool  # the weights are others than before


@dataclass(frozen=True, slots=True)
class Stop:
    """End all requests and the thread."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the thread with this error, as if a step had raised it."""

    error: BaseException


Command = Submit | Cancel | Park | Pause | Unpause | FlushCache | WatchPages | UnwatchPages | Apply | Sleep | Wake | Stop | Fail


MAX_WAIT_SECONDS = 3600.0
"""Of one `wait`: a deadline may be further away than the platform can wait."""


class Mailbox:
    """`post` from any thread, also from a destructor; `wait` and `take` from the step thread alone.

    A destructor may run in the middle of any line here, in the thread that runs that line. So there is no lock that a line holds: the
    wake-up is a lock that only the waiting thread acquires, and that `post` releases.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._wake_up = threading.Lock()  # free: something may have been posted since the last `take`
        self._wake_up.acquire()
        self.on_post: Callable[[], object] = lambda: None
        """Called by `post` once the command is there. Must be as safe in a destructor as `post` itself."""

    @property
    def is_empty(self) -> bool:
        return not self._commands

    def post(self, command: Command) -> None:
        self._commands.append(command)
        self.on_post()
        self.wake_up()

    def wake_up(self) -> None:
        """Ends a `wait`, or the next one. As safe as `post`."""
        with contextlib.suppress(RuntimeError):  # it is free already
            self._wake_up.release()

    def wait(self, timeout: float | None = None) -> None:
        """Until something is posted, or `timeout` seconds, or MAX_WAIT_SECONDS if that is less."""
        self._wake_up.acquire(timeout=MAX_WAIT_SECONDS if timeout is None else min(timeout, MAX_WAIT_SECONDS))

    def take(self) -> list[Command]:
        """What was posted since the last call, in order; what is posted meanwhile may be left for the next."""
        if not self._commands:
            return []  # most often; if the wake-up is free by now, the next `wait` returns at once
        self._wake_up.acquire(blocking=False)  # before looking: what is posted from here on releases it again
        return [self._commands.popleft() for _ in range(len(self._commands))]
