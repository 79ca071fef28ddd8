"""The calls that are under way: how they are ended from outside, and how one whose client has stopped reading is found.

Knows nothing of gRPC's side of a call; a call that is ended here learns it as a cancellation with an error beside it.
"""

from __future__ import annotations

import asyncio
import time

from aengine.server.errors import ReaderStalledError
from aengine.server.records import CallRecord

MAX_CHECK_SECONDS = 5.0


class Call:
    """One call, made in the task that runs it."""

    __slots__ = ("error", "record", "sent_before", "task", "waits_since", "writing")

    def __init__(self, record: CallRecord) -> None:
        self.record = record
        self.task = asyncio.current_task()
        self.error: Exception | None = None  # why it was ended from outside
        self.writing = False  # a message waits for the client
        self.sent_before = -1  # when the message that waits was first seen
        self.waits_since = 0.0

    def end(self, error: Exception) -> None:
        """Have it fail with `error`."""
        if self.error is None and self.task is not None:
            self.error = error
            self.task.cancel()


class CallsUnderWay:
    """To be used from one event loop. A message that waits longer than `stall_seconds` ends its call, within a quarter more."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._calls: set[Call] = set()
        self._reaper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        self._calls.add(call)

    def discard(self, call: Call) -> None:
        self._calls.discard(call)

    def start(self) -> None:
        """Begin to look for calls whose client does not read."""
        self._reaper = asyncio.get_running_loop().create_task(self._reap(), name="aengine-stalled-calls")

    def stop(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None

    async def end_all(self, error: Exception, seconds: float) -> None:
        """Have all calls fail with `error`; returns when they have told their clients, or after `seconds`."""
        tasks = [call.task for call in self._calls if call.task is not None]
        for call in tuple(self._calls):
            call.end(error)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def _reap(self) -> None:
        # One look at all calls now and then, rather than a timer for each message.
        while True:
            await asyncio.sleep(min(self._stall_seconds / 8, MAX_CHECK_SECONDS))
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """End the calls whose message waits too long. `now`: on time.monotonic."""
        for call in tuple(self._calls):
            sent = call.record.messages_sent
            if not call.writing:
                call.sent_before = -1
            elif call.sent_before != sent:
                call.sent_before, call.waits_since = sent, now
            elif now - call.waits_since >= self._stall_seconds:
                call.end(ReaderStalledError(f"the client has not read for {self._stall_seconds:g} s"))
