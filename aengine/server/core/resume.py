"""Resumable streams: generations that outlive the call that asked for them, and the calls that read them.

Each runs in a task of its own, the pump, which writes its serialised events into a `Replay`, kept within limits so that they can be read
again; the call that began it is its first reader. Owns how long a generation goes on without a reader, how long its events are kept, how
many bytes that may take, and back-pressure between whoever writes the events and the reader, with or without a connection. To be used from
one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from aengine.api.dataclass import dataclass
from aengine.api.errors import InvalidRequestError
from aengine.api.outputs import RequestInfo
from aengine.api.stream import TokenStream
from aengine.server.core.calls_in_flight import CURRENT_CALL, Caller, CallRecord, Decided, current_caller
from aengine.server.core.core import RequestIndex
from aengine.server.core.errors import ServiceError, describe, draining
from aengine.server.core.journal import Journal, StoredAnswer, pack, unpack

_log = logging.getLogger("aengine")
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
        self._unsent_bytes += _size(event) if self.end >= self.position else 0
        self._events.append(event)
        self.num_bytes += _size(event)
        while self.first < self.position and (len(self._events) > self._max_events or self.num_bytes > self._max_bytes):
            self.num_bytes -= _size(self._events.popleft())
            self.first += 1

    def kept_events(self) -> Iterable[bytes]:
        return self._events

    def take_events(self, most: int) -> list[bytes]:
        """The next events to send, which count as sent from now on."""
        start = self.position - self.first
        events = [self._events[index] for index in range(start, min(start + most, len(self._events)))]
        self.position += len(events)
        self._unsent_bytes -= sum(map(_size, events))
        return events

    def seek(self, number: int, *, may_come: bool = False) -> None:
        """Send from event `number` on. Raises `ServiceError` (EVENTS_DROPPED) for the past, `InvalidRequestError` for the future, unless it
        `may_come`: those before it then count as sent."""
        if number < self.first:
            raise ServiceError("EVENTS_DROPPED", f"event {number} is no longer kept; the oldest is {self.first}")
        if number > self.end and not may_come:
            raise InvalidRequestError.of("next_event_number", f"{number} is not yet known; the next event is {self.end}")
        self.position = number
        self._unsent_bytes = sum(_size(self._events[index]) for index in range(number - self.first, len(self._events)))


class Replay:
    """A generation that can be read again, by one reader at a time."""

    def __init__(self, max_events: int, max_bytes: int, changed: Callable[[], None]) -> None:
        """`changed` is called when a reader came or left, and at the end."""
        self.ended = False
        self.is_made_again = False  # a reader may have seen more events than there are
        self.ring = EventRing(max_events, max_bytes)
        self._changed = changed
        self._reader: asyncio.Event | None = None  # wakes the reader there is
        self._waiting: asyncio.Event | None = None  # the reader that has nothing to read
        self.error: ServiceError | None = None
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

    def end_events(self, error: ServiceError | None = None) -> None:
        """Nothing follows; `error` is what every reader gets at the end. Ignored when it has ended."""
        if not self.ended:
            self.ended, self.error = True, error
            self._wake_reader()
            self._changed()

    async def wait_sent(self) -> None:
        """Return when the reader was sent everything and waits for more, or there is none."""
        while self._reader is not None and not (self._waiting is self._reader and self.ring.position == self.ring.end):
            await self._move()

    def seek(self, number: int) -> None:
        """Have the next reader begin with event `number`. Raises what `EventRing.seek` raises."""
        self.ring.seek(number, may_come=self.is_made_again and (not self.ended or self.error is not None))

    async def read(self, number: int) -> AsyncGenerator[bytes, None]:
        """The events from `number` on to the end, in place of the present reader. Raises what `EventRing.seek` raises, the error that the
        generation failed with, and `ServiceError` (READER_REPLACED) once another reader has come."""
        self.seek(number)
        self._wake_reader()  # the present one, which stops
        reader = asyncio.Event()
        self._set_reader(reader)
        try:
            while self._reader is reader:
                if events := self.ring.take_events(READ_EVENTS):
                    self._moved.set()
                    for event in events:
                        yield event
                elif self.error is not None:
                    raise self.error
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


TOKEN_BYTES = 16
GENERATION_BYTES = 4096
"""The memory that a generation takes beside its events."""


def _ended(stored: StoredAnswer, replay: Replay) -> StoredAnswer:
    error = None if replay.error is None else [replay.error.reason, replay.error.message]
    answer = json.dumps({"first": replay.ring.first, "error": error}).encode()
    return replace(stored, ended=True, answer=answer, events=pack(replay.ring.kept_events()))


class AskedAgain(NamedTuple):
    """What a generation is made of, for the `Maker` of its door."""

    door: str
    body: bytes


@dataclass(frozen=True, slots=True)
class ResumeLimits:
    """How many events and bytes a server keeps of resumable generations."""

    events: int = 8192  # of a generation
    bytes: int = 2 * 1024 * 1024  # of its events, with EVENT_BYTES for each
    kept_bytes: int = 64 * 1024 * 1024  # of all generations that have ended, with GENERATION_BYTES for each


class Resumable:
    """A resumable generation: its events, and who may read them."""

    def __init__(
        self, limits: ResumeLimits, retain_seconds: float, owner: Caller, changed: Callable[[Resumable], None], token: bytes = b""
    ) -> None:
        self.owner = owner
        self.token = token or secrets.token_bytes(TOKEN_BYTES)
        self.stored: StoredAnswer | None = None  # in the journal
        self.retain_seconds = retain_seconds
        self.replay = Replay(limits.events, limits.bytes, lambda: changed(self))
        self.request_id = ""  # until its first event
        self.dropped = False
        self.pump: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None  # runs out when nobody comes to read
        self.stream: TokenStream | None = None  # while its events come
        self.last_info: RequestInfo | None = None  # once they all have

    @property
    def info(self) -> RequestInfo | None:
        """How far it has come; None until it has begun."""
        return self.last_info if self.stream is None else self.stream.info()

    @property
    def num_bytes(self) -> int:
        return GENERATION_BYTES + self.replay.ring.num_bytes

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


Maker = Callable[[Resumable, bytes], Awaitable[None]]
"""Writes the events of a generation again, of the body of what was asked."""


class ResumableStreams:
    """The resumable generations of a server: those that run, and those that have ended and are still kept. With a journal, those whose
    events are the same whenever they are made outlive the process: one that was cut short is made again, from its first event on.

    Without a reader, one that runs is cancelled and one that has ended dropped, when its `retain` has passed since the last reader left
    or, if that is later, since its end. The deadline of a call ends the call alone; `time_limit` is what bounds the request.

    One of the same id takes nothing from those before it: each is resumed with its own token. Where those that have ended take too much
    room, the oldest of the caller that has most of them is dropped, so that nobody drops another's by keeping much.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self.makers: dict[str, Maker] = {}  # by door
        self._journal = journal
        self._saving: set[asyncio.Task[None]] = set()
        self._may_begin = asyncio.Event()  # those of the process before
        self._closing = False
        self._limits = ResumeLimits()
        self._begun: RequestIndex[Resumable] = RequestIndex()  # those that can be resumed
        self._ended: defaultdict[str | None, dict[Resumable, None]] = defaultdict(dict)  # those of them that have, by owner, oldest first
        self._ended_bytes: Counter[str | None] = Counter()
        self._pumps: set[asyncio.Task[None]] = set()

    @property
    def kept_bytes(self) -> int:
        """The memory that the generations take that have ended."""
        return self._ended_bytes.total()

    def find(self, request_id: str, caller: Caller) -> Resumable | None:
        """The latest that can be resumed, of those that the caller may know of."""
        return next(iter(self._begun.find(request_id, caller)), None)

    def of_token(self, request_id: str, token: bytes, caller: Caller) -> Resumable | None:
        """The one with this token, of those that the caller may know of."""
        found = self._begun.find(request_id, caller)
        return next((one for one in found if secrets.compare_digest(one.token, token)), None)

    def start(self, retain_seconds: float, write: Callable[[Resumable], Awaitable[None]]) -> Resumable:
        """Begin one, whose events `write` appends to its replay, whoever reads them; `begin` is called once it can be resumed. What `write`
        raises is what every reader gets."""
        if self._journal is not None and (call := CURRENT_CALL.get()) is not None:
            call.decided = Decided.by_chance(one_by_one=True)
        resumable = Resumable(self._limits, retain_seconds, current_caller(), self._on_change)
        self._run(resumable, write)
        return resumable

    async def begin(self, resumable: Resumable, request_id: str, ask: Callable[[], AskedAgain], stream: TokenStream | None = None) -> None:
        """It can be resumed from now on, under this id; after the end of the process, too, if it can be made again of what `ask` gives. To
        be called in the task that writes its events."""
        if resumable.request_id:  # it is made again
            resumable.stream = stream
            return
        resumable.request_id, resumable.stream = request_id, stream
        self._begun.add_request(request_id, resumable.owner, resumable)
        self._on_change(resumable)
        call = CURRENT_CALL.get()
        if self._journal is not None and call is not None and call.decided is not None and call.decided.is_repeatable:
            decided = {name: getattr(call.decided, name) for name in ("seed", "request_id", "created", "one_by_one")}
            asked = ask()
            held = {"door": asked.door, "request_id": request_id, "retain": resumable.retain_seconds, "decided": decided}
            name, body = f"stream_{resumable.token.hex()}", json.dumps(held).encode() + b"\n" + asked.body
            await self._save(resumable, StoredAnswer(name, resumable.owner.name, time.time(), False, body, b"{}"))
            if resumable.stored is not None and not call.decided.shows_more:
                call.decided.progress = self._journal.follow(name)

    async def open_journal(self) -> None:
        """Find those of the process that had the journal before; those that it had not ended wait for `resume`."""
        for listed in [] if self._journal is None else await self._journal.list_answers("stream_", Caller()):
            assert self._journal is not None
            if (stored := await self._journal.get_answer(listed.name, Caller())) is not None:
                self._restore(stored)

    def resume(self) -> None:
        """The engine takes requests."""
        self._may_begin.set()

    async def read(self, resumable: Resumable) -> AsyncGenerator[bytes, None]:
        """All events of one that was started just now. If its reader leaves before it can be resumed, it ends."""
        try:
            async with aclosing(resumable.replay.read(0)) as events:
                async for event in events:
                    yield event
        finally:
            if not resumable.request_id and resumable.pump is not None:
                resumable.pump.cancel()  # no client knows how to resume it

    async def aclose(self) -> None:
        """Cancel what runs and drop what is kept; returns when nothing of it is left but what the journal has."""
        self._closing = True
        for resumable in list(self._begun):
            self._drop(resumable)
        pumps = list(self._pumps)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        await asyncio.gather(*self._saving)

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _run(self, resumable: Resumable, write: Callable[[Resumable], Awaitable[None]]) -> None:
        pump = resumable.pump = asyncio.create_task(self._pump(resumable, write))
        pump.add_done_callback(lambda _: self._on_pump_end(resumable, pump))
        self._pumps.add(pump)

    async def _pump(self, resumable: Resumable, write: Callable[[Resumable], Awaitable[None]]) -> None:
        replay = resumable.replay
        try:
            await write(resumable)
            replay.end_events()
        except Exception as error:  # every reader gets the same one
            replay.end_events(describe(error, answered=replay.ring.end > 0))

    def _on_pump_end(self, resumable: Resumable, pump: asyncio.Task[None]) -> None:
        self._pumps.discard(pump)
        resumable.pump = None
        if resumable.stream is not None:  # which holds all its tokens
            resumable.last_info, resumable.stream = resumable.stream.info(), None
        resumable.replay.end_events(draining())  # where it was cancelled: a reader must not wait for ever
        if resumable.stored is not None and not pump.cancelled():
            self._in_background(self._save(resumable, _ended(resumable.stored, resumable.replay)))

    def _on_change(self, resumable: Resumable) -> None:
        """It has begun or ended, or its reader came or left."""
        resumable.stop_timer()
        if not resumable.request_id:
            return
        if resumable.dropped:
            self._end_unread(resumable)
            return
        replay, owner = resumable.replay, resumable.owner.name
        if not replay.has_reader:
            resumable.timer = asyncio.get_running_loop().call_later(resumable.retain_seconds, self._drop, resumable)
        if replay.ended and resumable not in self._ended[owner]:
            self._ended[owner][resumable] = None
            self._ended_bytes[owner] += resumable.num_bytes
        while self.kept_bytes > self._limits.kept_bytes and (last := self._least_needed()) is not None:
            self._drop(last)

    def _least_needed(self) -> Resumable | None:
        """The oldest that nobody reads, of the owner that keeps most."""
        for owner, _ in self._ended_bytes.most_common():
            for resumable in self._ended[owner]:
                if not resumable.replay.has_reader:
                    return resumable
        return None

    def _drop(self, resumable: Resumable) -> None:
        """It can be resumed no more, and goes on only as long as somebody reads it."""
        resumable.stop_timer()
        resumable.dropped = True
        self._begun.discard(resumable.request_id, resumable)
        if resumable.stored is not None and not self._closing:
            self._in_background(self._forget(resumable.stored.name))
            resumable.stored = None
        owner = resumable.owner.name
        if resumable in self._ended[owner]:
            del self._ended[owner][resumable]
            self._ended_bytes[owner] -= resumable.num_bytes
        if not self._ended[owner]:
            del self._ended[owner], self._ended_bytes[owner]
        self._end_unread(resumable)

    def _end_unread(self, resumable: Resumable) -> None:
        if resumable.pump is not None and not resumable.replay.has_reader:
            resumable.pump.cancel()

    # ---- the journal ---------------------------------------------------------------------------------------------------

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(self, resumable: Resumable, stored: StoredAnswer) -> None:
        assert self._journal is not None
        try:
            await self._journal.put_answer(stored)
            resumable.stored = stored
        except OSError as error:
            _log.warning("a resumable stream is not stored: %s", error)
            if stored.ended:
                await self._forget(stored.name)
                resumable.stored = None

    async def _forget(self, name: str) -> None:
        assert self._journal is not None
        with suppress(OSError):
            await self._journal.delete_answer(name)

    def _restore(self, stored: StoredAnswer) -> None:
        header, _, body = stored.asked.partition(b"\n")
        held, token = json.loads(header), bytes.fromhex(stored.name.partition("_")[2])
        resumable = Resumable(self._limits, held["retain"], Caller.of_owner(stored.owner), self._on_change, token)
        resumable.request_id, resumable.stored, replay = held["request_id"], stored, resumable.replay
        self._begun.add_request(resumable.request_id, resumable.owner, resumable)
        if stored.ended:
            answer = json.loads(stored.answer)
            replay.ring.first = replay.ring.position = answer["first"]
            for event in unpack(stored.events):
                replay.ring.append(event)
            replay.end_events(None if answer["error"] is None else ServiceError(*answer["error"]))
            return

        async def write(resumable: Resumable) -> None:
            await self._may_begin.wait()
            assert self._journal is not None
            decided = Decided(**held["decided"], progress=await self._journal.follow_on(stored.name))
            CURRENT_CALL.set(CallRecord("", "", held["request_id"], caller=resumable.owner, decided=decided))
            await self.makers[held["door"]](resumable, body)

        replay.is_made_again = True
        self._run(resumable, write)
        self._on_change(resumable)
