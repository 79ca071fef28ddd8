"""Generations and calls in flight: how many there are and may be, how calls are ended from outside, and how one whose client stands still
is found.

Knows nothing of a door's side of a call; a call that is ended here gets a cancellation with an error beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from aengine.server.core.errors import ServiceError, draining
from aengine.server.core.records import CallRecord

MAX_CHECK_SECONDS = 5.0
STALLED: Mapping[str, str] = {
    "READER_STALLED": "the client has not read for {:g} s",
    "SENDER_STALLED": "the client has not sent its message for {:g} s",
}
"""Messages of the errors that end a call whose client is too slow, by their reasons."""


class Admission:
    """Counts generations between their start and their end. To be used from one event loop."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.closed = False  # whether new generations are refused
        self.idle = asyncio.Event()  # set while there is no generation
        self.idle.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Held by a generation while it lives. Raises `ServiceError` (DRAINING) once closed."""
        if self.closed:
            raise draining()
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()


@dataclass(slots=True, eq=False)
class Call(CallRecord):
    """One call, made in the task that runs it."""

    is_apart: bool = False  # it does not count among the others, nor is it ended with them
    task: asyncio.Task[None] | None = field(default_factory=asyncio.current_task)
    error: Exception | None = None  # why it was ended from outside
    mute: bool = False  # its headers are on their way, and no error can be sent until they are
    waits: str | None = None  # for the client: a key of `STALLED`
    seen: tuple[str, int] | None = None  # what it waited for when it was last looked at
    waits_since: float = 0.0

    def end(self, error: Exception) -> None:
        """Have it fail with `error`: at once, or where it is mute when it no longer is, unless it has come to its end then."""
        if self.error is None and self.task is not None:
            self.error = error
            if not self.mute:
                self.task.cancel()

    def give_up(self, error: Exception) -> None:
        """Have it fail with `error` at once, whether or not the client can be informed."""
        if (self.error is None or self.mute) and self.task is not None:
            self.error = error
            self.task.cancel()


class CallsInFlight:
    """To be used from one event loop. A call that waits for its client longer than `stall_seconds` is ended, within a quarter more."""

    def __init__(self, max_calls: int, stall_seconds: float) -> None:
        """`max_calls`: of either kind, so that neither can take the place of the other."""
        self.stall_seconds = stall_seconds
        self._max_calls = max_calls
        self._calls: set[Call] = set()
        self._apart: set[Call] = set()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        """Raises `ServiceError` (TOO_MANY_CALLS)."""
        calls = self._apart if call.is_apart else self._calls
        if len(calls) >= self._max_calls:
            raise ServiceError("TOO_MANY_CALLS", f"{self._max_calls} calls are under way, which is the limit")
        calls.add(call)

    def discard(self, call: Call) -> None:
        (self._apart if call.is_apart else self._calls).discard(call)

    async def end_all(self, error: Exception, seconds: float) -> None:
        """Have all calls fail with `error`; returns when their clients are informed, or after `seconds`."""
        tasks = [call.task for call in self._calls if call.task is not None]
        for call in tuple(self._calls):
            call.end(error)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def watch(self) -> None:
        """Look for calls whose client stands still, for ever: at all of them now and then, rather than with a timer for each message."""
        while True:
            await asyncio.sleep(min(self.stall_seconds / 8, MAX_CHECK_SECONDS))
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """End the calls that have waited too long. `now`: on time.monotonic."""
        for call in (*self._calls, *self._apart):
            if call.waits is None:
                call.seen = None
                continue
            seen = (call.waits, call.messages_sent)
            if call.seen != seen:
                call.seen, call.waits_since = seen, now
            elif now - call.waits_since >= self.stall_seconds:
                call.give_up(ServiceError(call.waits, STALLED[call.waits].format(self.stall_seconds)))
