"""`Journal`: what a server is to remember, by name, in memory or in a file that outlives the process.

Knows nothing of what it holds: stored responses, streams that can be read again, files, batches and their lines.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pathlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError
from aengine.server.core.calls_in_flight import Caller, Progress

T = TypeVar("T")
WRITE_SECONDS = 0.25
"""Between two writes of what came: a process that is killed loses so much, which comes again."""
ENTRY_BYTES = 4096
"""What an entry counts for beside its own bytes."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer, with what is needed to give it again."""

    name: str  # which begins with what it is, as "resp_" or "file-"; "batch_1/7" is a part of "batch_1"
    owner: str | None  # of the caller who asked for it
    created: float  # on time.time
    ended: bool  # False: whoever opens the journal next makes it again
    asked: bytes  # what it is made of
    answer: bytes
    events: bytes = b""  # in which it was told

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + len(self.asked) + len(self.answer) + len(self.events)


_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (name TEXT PRIMARY KEY, owner TEXT, created REAL, ended INTEGER, num_bytes INTEGER, asked BLOB,
    answer BLOB, events BLOB);
CREATE INDEX IF NOT EXISTS by_age ON answers (ended, created);
CREATE INDEX IF NOT EXISTS by_owner ON answers (owner, ended, num_bytes);
CREATE TABLE IF NOT EXISTS progress (name TEXT, place INTEGER, tokens BLOB, PRIMARY KEY (name, place)) WITHOUT ROWID;
"""
_COLUMNS = "name, owner, created, ended, asked, answer, events"


class Journal:
    """Entries by name, in SQLite. What is older than `max_seconds` is gone; where all take more than `max_bytes`, the oldest that
    has ended is dropped of the owner who has most. Its methods work in a thread of its own, so that the event loop waits for no disk. They
    raise `OSError` where the disk fails."""

    def __init__(self, folder: str | None, max_bytes: int, max_seconds: float) -> None:
        """`folder`: of the file, which one process has at a time; None: what is stored ends with the process."""
        self._folder, self._max_bytes, self.max_seconds = folder, max_bytes, max_seconds
        self._thread = ThreadPoolExecutor(1, "aengine-journal")
        self._lock: int | None = None
        self._database: sqlite3.Connection | None = None
        self._used = 0  # bytes
        self._before: set[str] = set()  # entries that had not ended when the file was opened, and were not put since
        self._followed: dict[str, Progress] = {}  # of entries that have not ended
        self._writing: asyncio.Task[None] | None = None

    async def open_file(self) -> None:
        """Raises ConfigError (journal)."""
        try:
            await self._run(self._open)
        except OSError as error:
            await self.close_file()
            raise ConfigError.of("journal", f"{self._folder} cannot be used: {error}") from None
        if self._folder is not None:
            self._writing = asyncio.create_task(self._write_progress(), name="aengine-journal")

    async def put_answer(self, stored: StoredAnswer) -> None:
        """In place of that of the same name, whose progress is forgotten."""
        self._followed.pop(stored.name, None)
        self._before.discard(stored.name)
        await self._run(self._put, stored)

    async def get_answer(self, name: str, caller: Caller) -> StoredAnswer | None:
        """None: there is none of this name that the caller may see."""
        found = await self._run(self._select, "name = ? AND created > ?", name, time.time() - self.max_seconds)
        return next((stored for stored in found if caller.may_see(stored.owner)), None)

    def follow(self, name: str, written: Sequence[tuple[int, str]] = ()) -> Progress | None:
        """The progress of an entry, which is written now and then until the entry is put or deleted. None: it ends with the process."""
        if self._folder is None:
            return None
        progress = self._followed[name] = Progress(written)
        return progress

    async def follow_on(self, name: str) -> Progress | None:
        """The progress of an entry that was written before."""
        return self.follow(name, await self._run(self._written, name))

    async def delete_answer(self, name: str) -> None:
        self._followed.pop(name, None)
        await self._run(self._delete, name)

    async def delete_parts(self, name: str) -> None:
        """All parts of an entry. A name that has parts was not given by a client."""
        for part in [one for one in self._followed if one.startswith(f"{name}/")]:
            del self._followed[part]
        await self._run(self._remove_parts, name)

    async def list_answers(self, start: str, caller: Caller, most: int = -1, after: str = "") -> list[StoredAnswer]:
        """Entries whose names begin with `start` and that the caller may see, newest first, `most` of those behind `after`, which is one of
        them; without their answers and events. Parts are none of them."""
        behind = "(created, name) < (SELECT created, name FROM answers WHERE name = ?5) AND" if after else ""
        where = f"{behind} created > ?1 AND substr(name, 1, length(?2)) = ?2 AND instr(name, '/') = 0 AND (?3 OR owner IS ?4)"
        values = (time.time() - self.max_seconds, start, caller.sees_all, caller.name, *((after,) if after else ()))
        columns = "name, owner, created, ended, asked, x'', x''"
        return await self._run(self._select, f"{where} ORDER BY created DESC, name DESC LIMIT {most}", *values, columns=columns)

    async def list_parts(self, name: str) -> list[StoredAnswer]:
        """The parts of an entry in the order of their names, without their answers and events."""
        where = "name > ?1 || '/' AND name < ?1 || '0' ORDER BY name"
        return await self._run(self._select, where, name, columns="name, owner, created, ended, asked, x'', x''")

    async def unfinished(self, start: str) -> list[StoredAnswer]:
        """Entries whose names begin with `start` that have not ended. Parts are none of them."""
        where = "NOT ended AND substr(name, 1, length(?1)) = ?1 AND instr(name, '/') = 0 ORDER BY created"
        return await self._run(self._select, where, start)

    async def left_behind(self, start: str) -> list[StoredAnswer]:
        """What the process was at that had the journal before: of `unfinished` all that this process has not put itself."""
        return [stored for stored in await self.unfinished(start) if stored.name in self._before]

    async def close_file(self) -> None:
        """May be called again."""
        if self._writing is not None:
            self._writing.cancel()
        with suppress(OSError, RuntimeError):  # the thread has ended
            await self._run(self._write, self._take_unwritten())
            await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *arguments, **named))
        except sqlite3.Error as error:
            raise OSError(str(error)) from error

    async def _write_progress(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            if rows := self._take_unwritten():
                with suppress(OSError):  # they will come again
                    await self._run(self._write, rows)

    def _take_unwritten(self) -> list[tuple[str, bytes]]:
        rows = []
        for name, progress in self._followed.items():
            if progress.unwritten:
                rows.append((name, json.dumps(progress.unwritten).encode()))
                progress.unwritten = []
        return rows

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
        self._before = {name for (name,) in database.execute("SELECT name FROM answers WHERE NOT ended")}

    def _put(self, stored: StoredAnswer) -> None:
        database = self._opened()
        database.execute("BEGIN IMMEDIATE")
        try:
            self._remove("ended AND created <= ?", time.time() - self.max_seconds)
            self._remove("name = ?", stored.name)
            self._remove_progress(stored.name)
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
        removed = self._opened().execute(f"DELETE FROM answers WHERE {where} RETURNING num_bytes, name", (value,)).fetchall()
        self._used -= sum(num_bytes for num_bytes, _ in removed)
        for _, name in removed:
            self._remove_progress(name)
        return len(removed)

    def _remove_parts(self, name: str) -> None:
        of_parts = "name > ?1 || '/' AND name < ?1 || '0'"
        self._remove(of_parts, name)
        self._remove_progress(name, of_parts)

    def _remove_progress(self, name: str, where: str = "name = ?") -> None:
        told = self._opened().execute(f"DELETE FROM progress WHERE {where} RETURNING length(tokens)", (name,)).fetchall()
        self._used -= sum(num_bytes for (num_bytes,) in told)

    def _count(self) -> None:
        sizes = "SELECT num_bytes FROM answers UNION ALL SELECT length(tokens) FROM progress"
        self._used = self._opened().execute(f"SELECT COALESCE(SUM(num_bytes), 0) FROM ({sizes})").fetchone()[0]

    def _write(self, rows: list[tuple[str, bytes]]) -> None:
        database = self._opened()
        with database:
            for name, tokens in rows:
                place = "(SELECT COALESCE(MAX(place), -1) + 1 FROM progress WHERE name = ?1)"
                database.execute(f"INSERT INTO progress VALUES (?1, {place}, ?2)", (name, tokens))
                self._used += len(tokens)

    def _written(self, name: str) -> list[tuple[int, str]]:
        rows = self._opened().execute("SELECT tokens FROM progress WHERE name = ? ORDER BY place", (name,))
        return [(token_id, text) for (tokens,) in rows for token_id, text in json.loads(tokens)]

    def _select(self, where: str, *values: Any, columns: str = _COLUMNS) -> list[StoredAnswer]:
        rows = self._opened().execute(f"SELECT {columns} FROM answers WHERE {where}", values)
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


def pack(parts: Iterable[bytes]) -> bytes:
    """Parts in one, each behind its length in 4 bytes."""
    return b"".join([len(part).to_bytes(4, "little") + part for part in parts])


def unpack(packed: bytes) -> list[bytes]:
    """The parts that were packed together."""
    place, parts = 0, list[bytes]()
    while place < len(packed):
        end = place + 4 + int.from_bytes(packed[place : place + 4], "little")
        parts.append(packed[place + 4 : end])
        place = end
    return parts
