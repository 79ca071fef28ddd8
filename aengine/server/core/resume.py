"""Resumable streams: generations that outlive the call that asked for them, and the calls that read them.

Each runs in a task of its own, the pump, which writes its serialised events into a `Replay`, kept within limits so that they can be read
again; the call that began it is its first reader. Owns how long a generation goes on without a reader, how long its events are kept, how
many bytes that may take, and back-pressure between whoever writes the events and the reader, with or without a connection. To be used from
one event loop.

`Journal`: answers that are stored, and those that are to be, in memory or in a file that outlives the process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pathlib
import secrets
import sqlite3
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from aengine.api.errors import ConfigError, InvalidRequestError
from aengine.api.outputs import RequestInfo
from aengine.api.stream import TokenStream
from aengine.server.core.calls_in_flight import Caller, current_caller
from aengine.server.core.core import RequestIndex
from aengine.server.core.errors import ServiceError, describe, draining

T = TypeVar("T")
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

    def take_events(self, most: int) -> list[bytes]:
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

    def end_events(self, error: ServiceError | None = None) -> None:
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
                if events := self.ring.take_events(READ_EVENTS):
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


TOKEN_BYTES = 16
GENERATION_BYTES = 4096
"""The memory that a generation takes beside its events."""


@dataclass(frozen=True, slots=True)
class ResumeLimits:
    """How many events and bytes a server keeps of resumable generations."""

    events: int = 8192  # of a generation
    bytes: int = 2 * 1024 * 1024  # of its events, with EVENT_BYTES for each
    kept_bytes: int = 64 * 1024 * 1024  # of all generations that have ended, with GENERATION_BYTES for each


class Resumable:
    """A resumable generation: its events, and who may read them."""

    def __init__(self, limits: ResumeLimits, retain_seconds: float, owner: Caller, changed: Callable[[Resumable], None]) -> None:
        self.owner = owner
        self.token = secrets.token_bytes(TOKEN_BYTES)
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


class ResumableStreams:
    """The resumable generations of a server: those that run, and those that have ended and are still kept.

    Without a reader, one that runs is cancelled and one that has ended dropped, when its `retain` has passed since the last reader left
    or, if that is later, since its end. The deadline of a call ends the call alone; `time_limit` is what bounds the request.

    One of the same id takes nothing from those before it: each is resumed with its own token. Where those that have ended take too much
    room, the oldest of the caller that has most of them is dropped, so that nobody drops another's by keeping much.
    """

    def __init__(self) -> None:
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
        resumable = Resumable(self._limits, retain_seconds, current_caller(), self._on_change)
        pump = resumable.pump = asyncio.create_task(self._pump(resumable, write))
        pump.add_done_callback(lambda _: self._on_pump_end(resumable, pump))
        self._pumps.add(pump)
        return resumable

    def begin(self, resumable: Resumable, request_id: str, stream: TokenStream | None = None) -> None:
        """It can be resumed from now on, under this id."""
        resumable.request_id, resumable.stream = request_id, stream
        self._begun.add_request(request_id, resumable.owner, resumable)
        self._on_change(resumable)

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
        """Cancel what runs and drop what is kept; returns when nothing of it is left."""
        for resumable in list(self._begun):
            self._drop(resumable)
        pumps = list(self._pumps)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    # ---- inside --------------------------------------------------------------------------------------------------------

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


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer, with what is needed to give it again."""

    name: str
    owner: str | None  # of the caller who asked for it
    created: float  # on time.time
    ended: bool  # False: whoever opens the journal next makes it again
    asked: bytes  # what it is made of
    answer: bytes
    events: bytes = b""  # in which it was told

    @property
    def num_bytes(self) -> int:
        return GENERATION_BYTES + len(self.asked) + len(self.answer) + len(self.events)


_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (name TEXT PRIMARY KEY, owner TEXT, created REAL, ended INTEGER, num_bytes INTEGER, asked BLOB,
    answer BLOB, events BLOB);
CREATE INDEX IF NOT EXISTS by_age ON answers (ended, created);
CREATE INDEX IF NOT EXISTS by_owner ON answers (owner, ended, num_bytes);
"""
_COLUMNS = "name, owner, created, ended, asked, answer, events"


class Journal:
    """Stored answers by name, in SQLite. What is older than `max_seconds` is gone; where all take more than `max_bytes`, the oldest that
    has ended is dropped of the owner who has most. Its methods work in a thread of its own, so that the event loop waits for no disk. They
    raise `OSError` where the disk fails."""

    def __init__(self, folder: str | None, max_bytes: int, max_seconds: float) -> None:
        """`folder`: of the file, which one process has at a time; None: what is stored ends with the process."""
        self._folder, self._max_bytes, self._max_seconds = folder, max_bytes, max_seconds
        self._thread = ThreadPoolExecutor(1, "aengine-journal")
        self._lock: int | None = None
        self._database: sqlite3.Connection | None = None
        self._used = 0  # bytes

    async def open_file(self) -> None:
        """Raises ConfigError (journal)."""
        try:
            await self._run(self._open)
        except OSError as error:
            await self.close_file()
            raise ConfigError.of("journal", f"{self._folder} cannot be used: {error}") from None

    async def put_answer(self, stored: StoredAnswer) -> None:
        """In place of that of the same name."""
        await self._run(self._put, stored)

    async def get_answer(self, name: str, caller: Caller) -> StoredAnswer | None:
        """None: there is none of this name that the caller may see."""
        found = await self._run(self._select, "name = ? AND created > ?", name, time.time() - self._max_seconds)
        return next((stored for stored in found if caller.may_see(stored.owner)), None)

    async def delete_answer(self, name: str) -> None:
        await self._run(self._delete, name)

    async def unfinished(self) -> list[StoredAnswer]:
        """What the process was at that had the journal before."""
        return await self._run(self._select, "NOT ended")

    async def close_file(self) -> None:
        """May be called again."""
        with suppress(OSError, RuntimeError):  # the thread has ended
            await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
        except sqlite3.Error as error:
            raise OSError(str(error)) from error

    # ---- in the thread ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        path = ":memory:"
        if self._folder is not None:
            folder = pathlib.Path(self._folder).expanduser()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError("another process uses it") from None
            path = str(folder / "journal.sqlite3")
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        database = self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA secure_delete = ON;" + _SCHEMA)
        self._count()

    def _put(self, stored: StoredAnswer) -> None:
        database = self._opened()
        database.execute("BEGIN IMMEDIATE")
        try:
            self._remove("ended AND created <= ?", time.time() - self._max_seconds)
            self._remove("name = ?", stored.name)
            row = (stored.name, stored.owner, stored.created, stored.ended, stored.num_bytes, stored.asked, stored.answer, stored.events)
            database.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._used += stored.num_bytes
            while (left := self._used - self._max_bytes) > 0:
                others = "FROM answers WHERE ended AND name != ?1"
                most = f"SELECT owner {others} GROUP BY owner ORDER BY SUM(num_bytes) DESC LIMIT 1"
                if not self._remove(f"name = (SELECT name {others} AND owner IS ({most}) ORDER BY created LIMIT 1)", stored.name):
                    raise OSError(f"it and those that have not ended take {left} bytes more than the journal may have")
            database.execute("COMMIT")
        except BaseException:
            database.execute("ROLLBACK")
            self._count()
            raise

    def _remove(self, where: str, value: Any) -> int:
        """How many were removed."""
        removed = self._opened().execute(f"DELETE FROM answers WHERE {where} RETURNING num_bytes", (value,)).fetchall()
        self._used -= sum(num_bytes for (num_bytes,) in removed)
        return len(removed)

    def _count(self) -> None:
        self._used = self._opened().execute("SELECT COALESCE(SUM(num_bytes), 0) FROM answers").fetchone()[0]

    def _select(self, where: str, *values: Any) -> list[StoredAnswer]:
        rows = self._opened().execute(f"SELECT {_COLUMNS} FROM answers WHERE {where} ORDER BY created", values)
        return [StoredAnswer(row[0], row[1], row[2], bool(row[3]), *row[4:]) for row in rows]

    def _delete(self, name: str) -> None:
        self._remove("name = ?", name)
        if self._folder is not None:
            self._opened().execute("PRAGMA wal_checkpoint(TRUNCATE)")  # nothing of it is left there, either

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            raise OSError("the journal is closed")
        return self._database

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
        if self._lock is not None:
            os.close(self._lock)
        self._database = self._lock = None
