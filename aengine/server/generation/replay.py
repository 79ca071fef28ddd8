"""The serialised events of a generation, kept within limits so that they can be read again, and their one reader.

Owns back-pressure between whoever writes the events and the reader, with or without a connection. Knows nothing of gRPC, of how
events are made, or of how long they are kept. To be used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from aengine.errors import InvalidRequestError
from aengine.server.core.errors import ServiceError

READ_EVENTS = 64
"""Most events taken from the ring at a time: these count as sent while a slow client is still being sent the first of them."""

EVENT_BYTES = 48
"""The memory that an event takes beside its own bytes."""


class EventRing:
    """The latest events of a generation, and how far they were sent.

    Half of it is for events that wait to be sent, the rest for those that were sent and may be asked for again. What was not sent is
    never dropped: the writer must wait for `has_room`.
    """

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._events: deque[bytes] = deque()
        self._unsent_bytes = 0
        self.num_bytes = 0  # with EVENT_BYTES for each
        self.first = 0  # number of the oldest event that is kept
        self.position = 0  # number of the next event to send

    @property
    def end(self) -> int:
        """The number of the next event to come."""
        return self.first + len(self._events)

    @property
    def has_room(self) -> bool:
        """Whether one more event may be appended, however large it is."""
        return self.end - self.position < self._max_events // 2 and self._unsent_bytes < self._max_bytes // 2

    def append(self, event: bytes) -> None:
        self._events.append(event)
        self.num_bytes += _size(event)
        self._unsent_bytes += _size(event)
        while self.first < self.position and (len(self._events) > self._max_events or self.num_bytes > self._max_bytes):
            self.num_bytes -= _size(self._events.popleft())
            self.first += 1

    def take(self, most: int) -> list[bytes]:
        """The next events to send, which count as sent from now on."""
        start = self.position - self.first
        events = [self._events[index] for index in range(start, min(start + most, len(self._events)))]
        self.position += len(events)
        self._unsent_bytes -= sum(map(_size, events))
        return events

    def seek(self, number: int) -> None:
        """Send from event `number` on. Raises `ServiceError` (EVENTS_DROPPED) for the past, `InvalidRequestError` for the future."""
        if number < self.first:
            raise ServiceError("EVENTS_DROPPED", f"event {number} is no longer kept; the oldest is {self.first}")
        if number > self.end:
            raise InvalidRequestError.of("next_event_number", f"{number} is not yet known; the next event is {self.end}")
        self.position = number
        self._unsent_bytes = sum(_size(self._events[index]) for index in range(number - self.first, len(self._events)))


class Replay:
    """A generation that can be read again, by one reader at a time."""

    def __init__(self, max_events: int, max_bytes: int, changed: Callable[[], None]) -> None:
        """`changed` is called when a reader came or left, and at the end."""
        self.ended = False
        self.ring = EventRing(max_events, max_bytes)
        self._changed = changed
        self._reader: asyncio.Event | None = None  # wakes the reader there is
        self._waiting: asyncio.Event | None = None  # the reader that has nothing to read
        self._error: ServiceError | None = None
        self._moved = asyncio.Event()  # the reader read something, came or left

    @property
    def has_reader(self) -> bool:
        return self._reader is not None

    async def append(self, event: bytes) -> None:
        """Keep `event`, once there is room for it."""
        while not self.ring.has_room:
            await self._move()
        self.ring.append(event)
        self._wake_reader()

    def end(self, error: ServiceError | None = None) -> None:
        """Nothing follows; `error` is what every reader gets at the end. Ignored when it has ended."""
        if not self.ended:
            self.ended, self._error = True, error
            self._wake_reader()
            self._changed()

    async def wait_sent(self) -> None:
        """Return when the reader was sent everything and waits for more, or there is none."""
        while self._reader is not None and not (self._waiting is self._reader and self.ring.position == self.ring.end):
            await self._move()

    async def read(self, number: int) -> AsyncGenerator[bytes, None]:
        """The events from `number` on to the end, in place of the present reader. Raises what `EventRing.seek` raises, the error that the
        generation failed with, and `ServiceError` (READER_REPLACED) once another reader has come."""
        self.ring.seek(number)
        self._wake_reader()  # the present one, which stops
        reader = asyncio.Event()
        self._set_reader(reader)
        try:
            while self._reader is reader:
                if events := self.ring.take(READ_EVENTS):
                    self._moved.set()
                    for event in events:
                        yield event
                elif self._error is not None:
                    raise self._error
                elif self.ended:
                    return
                else:
                    self._waiting = reader
                    reader.clear()
                    self._moved.set()
                    await reader.wait()
                    self._waiting = None if self._waiting is reader else self._waiting
            raise ServiceError("READER_REPLACED", "another reader has taken over the stream")
        finally:
            if self._reader is reader:
                self._set_reader(None)

    def _set_reader(self, reader: asyncio.Event | None) -> None:
        self._reader = reader
        self._moved.set()
        self._changed()

    def _wake_reader(self) -> None:
        if self._reader is not None:
            self._reader.set()

    async def _move(self) -> None:
        self._moved.clear()
        await self._moved.wait()


def _size(event: bytes) -> int:
    return len(event) + EVENT_BYTES
