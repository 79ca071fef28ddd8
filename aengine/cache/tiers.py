"""`PageTiers`: what pages of KV held, by the names of their contents, in host memory and in files, from which they come back.

Owns the threads that read and write, the format of the files, and which are dropped: those that were used longest ago. A file holds a
column, the pages of all layer groups for the same tokens. It is written whole under another name and renamed, so that a process which is
killed leaves none that is half; a checksum finds what is torn, foreign or flipped, and such a file is removed, a miss and one line in the
log. All processes of a user may share a folder. Knows nothing of pools, sequences or devices.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import pathlib
import re
import struct
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass

Bytes = NDArray[np.uint8]
_MAGIC = b"aengkv1\0"
_HEAD = struct.Struct("<8s32sQQ")  # the magic, a digest of all that follows, bytes of token ids, bytes of pages
_MOST_QUEUED = 256 << 20  # bytes that wait to be written; what comes beyond is not kept
_AHEAD = 4 << 20  # that wait to be written while more of them wait in the pool, at no cost
_MOST_TOKEN_BYTES = 16 << 20  # that a file may have: the ids of a session
_UNSEEN = 1 / 16  # of the limit that is written, at most, before a look at what others have written meanwhile
_PAUSE, _SHORT_PAUSE = 100.0, 4.0  # after a write while steps run, in times of its CPU time: these wait for it where cores are few
_RETRY_SECONDS = 30.0  # after a file could not be written
_SHRUNK = 0.9  # of the limit that is left when files are dropped
_log = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A page in each layer group, for the same tokens; or a state that recurrent layers have behind them; or a note without pages."""

    name: bytes  # of the content, as of `page_name`; of a note any other one of this length
    tokens: bytes  # of the int32 ids; what a note says
    pages: Bytes  # [groups, bytes of a page], or [state_pages, bytes of a page], or none

    @property
    def nbytes(self) -> int:
        """Return the bytes of its pages; of a note those that it says."""
        return self.pages.nbytes or len(self.tokens)


@dataclass(frozen=True, slots=True)
class TierCounts:
    """What the tiers hold, and what has come from them since start."""

    host_bytes: int = 0
    disk_bytes: int = 0  # in the folder, of all models, as far as it is known
    loaded_tokens: int = 0
    saved_tokens: int = 0  # that were written to files
    broken: int = 0  # files that were removed because of what they held


class PageTiers:
    """`find`, `put_column` and `load` read and write no file; they are the steps' thread's. `StoredPrefix` is for others."""

    def __init__(
        self, identity: str, host_bytes: int, folder: pathlib.Path | None, disk_bytes: int, sizes: Sequence[int], others_wait: bool = False
    ) -> None:
        """`identity`: of all that decides what pages hold beside the names of their contents; it must be fit for a name of a file. `sizes`:
        bytes that the pages of a column may have. `others_wait`: for what is written, which does not wait for steps then. Raises OSError
        for a folder that cannot be made, or is another user's."""
        self.identity = identity
        self._host_bytes, self._root, self._disk_bytes, self._sizes = host_bytes, folder, disk_bytes, frozenset((0, *sizes))
        self._others_wait = others_wait
        self._host: OrderedDict[bytes, Column] = OrderedDict()
        self._host_used = 0
        self._known: set[bytes] = set()  # that are in files, or on the way there
        self._folder = None if folder is None else _own_folder(folder, identity)
        if self._folder is not None:
            self._known = _names_in(self._folder)
        self._forgotten: set[bytes] = set()  # since the last look at the folder began
        self._parts: set[str] = set()  # folders of files that are there
        self._disk_used = 0
        self._is_stale = folder is not None  # the thread that writes shall look at what is there
        self._unseen = 0  # bytes that were written since it did
        self._broken_until = 0.0  # no file is written before
        self._lock = threading.Lock()
        self._has_reads, self._has_writes = threading.Condition(self._lock), threading.Condition(self._lock)
        self._at_full_speed = threading.Event()  # no step runs, or these are closed
        self._at_full_speed.set()
        self._writes: OrderedDict[bytes, Column] = OrderedDict()
        self._queued = 0
        self._with_room: Callable[[], object] | None = None
        self._reads: deque[tuple[Sequence[bytes], Future[list[Column]]]] = deque()
        self._closed = False
        self._serial = itertools.count()
        self._loaded, self._saved, self._broken = 0, 0, 0  # tokens, tokens, files
        self._read_seconds = 0.0  # of a byte, of late; 0.0: none was read
        self._threads = [
            threading.Thread(target=self._run_reads, name="aengine-kv-reads", daemon=True),
            threading.Thread(target=self._run_writes, name="aengine-kv-writes", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the thread of the steps -------------------------------------------------------------------------------------

    def find(self, names: Sequence[bytes]) -> int:
        """How many of the first names are there. Where one is not known the folder is asked: another process may have written it."""
        with self._lock:
            for count, name in enumerate(names):
                if name not in self._host and name not in self._known and not self._appeared(name):
                    return count
            return len(names)

    def _appeared(self, name: bytes) -> bool:
        if self._folder is None or not _path(self._folder, name).exists():
            return False
        self._known.add(name)
        return True

    def keeps(self, name: bytes) -> bool:
        """Whether the content of this name is there, or on its way."""
        with self._lock:
            if name in self._host:
                self._host.move_to_end(name)
            return name in self._known or (self._folder is None and name in self._host)

    def holds(self, name: bytes) -> bool:
        """Whether the content of this name is there, as far as is known; it is not used by this."""
        with self._lock:
            return name in self._known or name in self._host

    def put_column(self, column: Column) -> None:
        """Keep a column, whose pages must not change any more; or a note in place of that which was before of this name."""
        with self._lock:
            if not column.pages.nbytes:
                self._known.discard(column.name)
                if (old := self._host.pop(column.name, None)) is not None:
                    self._host_used -= old.nbytes
                if (old := self._writes.pop(column.name, None)) is not None:  # the new one comes behind the KV that it speaks of
                    self._queued -= old.nbytes
            if self._host_bytes and column.name not in self._host:
                self._host[column.name] = column
                self._host_used += column.nbytes
                while self._host_used > self._host_bytes:
                    self._host_used -= self._host.popitem(last=False)[1].nbytes
            if self._folder is None or column.name in self._known or time.monotonic() < self._broken_until:
                return
            if self._queued + column.nbytes <= _MOST_QUEUED:
                self._known.add(column.name)
                self._queued += column.nbytes
                self._writes[column.name] = column
                self._has_writes.notify()

    def load(self, names: Sequence[bytes], done: Callable[[], object]) -> Future[list[Column]]:
        """The columns of the first names, up to the first one that is missing. `done` is called, from any thread, when they are there."""
        future: Future[list[Column]] = Future()
        future.add_done_callback(lambda _: done())
        with self._lock:
            if not self._closed:
                self._reads.append((names, future))
                self._has_reads.notify()
                return future
        future.set_result([])
        return future

    @property
    def has_host(self) -> bool:
        """Whether columns stay in memory, and not only until they are written."""
        return self._host_bytes > 0

    @property
    def room(self) -> float:
        """Bytes that should be put now; what waits longer should be put when it would be lost otherwise."""
        return math.inf if self.has_host or self._folder is None else max(_AHEAD - self._queued, 0)

    def call_with_room(self, call: Callable[[], object]) -> None:
        """Have `call` be called, once and from any thread, when there is room."""
        with self._lock:
            has_room = self._queued < _AHEAD // 2
            if not has_room:
                self._with_room = call
        if has_room:
            call()

    def set_idle(self, is_idle: bool) -> None:
        """Say whether no step runs: what waits is written without pauses then."""
        if is_idle:
            self._at_full_speed.set()
        else:
            self._at_full_speed.clear()

    @property
    def seconds_per_byte(self) -> float:
        """Seconds that the thread takes to load a byte; 0.0: it has loaded none."""
        return self._read_seconds

    def counts(self) -> TierCounts:
        return TierCounts(self._host_used, self._disk_used, self._loaded, self._saved, self._broken)

    def close(self, *, at_once: bool = False) -> None:
        """Write what waits, or give it up, and end the threads."""
        with self._lock:
            self._closed = True
            if at_once:
                self._writes.clear()
            self._has_reads.notify()
            self._has_writes.notify()
        self._at_full_speed.set()
        for thread in self._threads:
            thread.join()

    # ---- the threads -----------------------------------------------------------------------------------------------------

    def _run_reads(self) -> None:
        while True:
            with self._lock:
                self._has_reads.wait_for(lambda: self._reads or self._closed)
                if not self._reads:
                    return
                names, future = self._reads.popleft()
            found: list[Column] = []
            begin = time.perf_counter()
            try:
                found = self.read(names)
            except Exception as error:  # requests wait for this thread, whatever happens to it
                _log.warning("KV is not loaded: %s: %s", type(error).__name__, error)
            if num_bytes := sum(column.pages.nbytes for column in found):
                each = (time.perf_counter() - begin) / num_bytes
                self._read_seconds = each if not self._read_seconds else 0.7 * self._read_seconds + 0.3 * each
                self._loaded += sum(len(column.tokens) for column in found) // 4
            future.set_result(found)

    def _run_writes(self) -> None:
        with suppress(OSError, AttributeError):  # steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            with self._lock:
                self._has_writes.wait_for(lambda: self._writes or self._is_stale or self._closed)
                column = next(iter(self._writes.values()), None)
                if column is None and self._closed:
                    return
            begin = time.thread_time()
            try:
                if self._is_stale:
                    self._scan()
                if column is not None:
                    self._write(column)
            except Exception as error:
                _log.warning("KV is not kept in files: %s: %s", type(error).__name__, error)
            if column is not None:
                with self._lock:  # up to here it can be loaded from there
                    if self._writes.get(column.name) is column:  # and no other note of this name
                        del self._writes[column.name]
                        self._queued -= column.nbytes
                    call = None
                    if self._queued < _AHEAD // 2:
                        call, self._with_room = self._with_room, None
                if call is not None:
                    call()
                if not self._others_wait:
                    pause = _PAUSE if self._queued <= 4 * _AHEAD else _SHORT_PAUSE
                    self._at_full_speed.wait(pause * (time.thread_time() - begin))

    def read(self, names: Sequence[bytes]) -> list[Column]:
        """What `load` gives, in the thread of the caller, which waits for files."""
        found: list[Column] = []
        for name in names:
            with self._lock:
                column = self._host.get(name) or self._writes.get(name)
            if column is None:
                column = self._read(name)
            if column is None:
                break
            found.append(column)
        return found

    def _read(self, name: bytes) -> Column | None:
        if self._folder is None:
            return None
        path = _path(self._folder, name)
        try:
            with open(path, "rb") as file:
                data = file.read(_HEAD.size + max(self._sizes) + _MOST_TOKEN_BYTES)
            os.utime(path)  # it was used now
        except OSError as error:
            self._forget(name)
            if not isinstance(error, FileNotFoundError):
                _log.warning("a file of KV is left out: %s: %s", path, error.strerror)
            return None
        column = _parsed(name, data, self._sizes)
        if column is None:
            self._broken += 1
            _log.warning("a file of KV is removed, for it is not what was written: %s", path)
            self._forget(name)
            _remove(path)
        return column

    def _forget(self, name: bytes) -> None:
        with self._lock:
            self._known.discard(name)
            self._forgotten.add(name)

    def _write(self, column: Column) -> None:
        assert self._folder is not None
        path = _path(self._folder, column.name)
        partial = path.parent / f"tmp-{os.getpid()}-{next(self._serial)}"  # ext4 is slow where files were removed of late
        parts = _written(column)
        size = sum(map(len, parts))
        try:
            if self._disk_used + size > self._disk_bytes:
                self._shrink(size)
            if path.parent.name not in self._parts:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                self._parts.add(path.parent.name)
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                for part in parts:
                    _write_all(file, part)
            os.rename(partial, path)
        except OSError as error:
            self._parts.clear()
            _remove(partial)
            _log.warning("KV is not kept in files for %.0f s: %s: %s", _RETRY_SECONDS, self._folder, error.strerror)
            self._broken_until = time.monotonic() + _RETRY_SECONDS
            with self._lock:
                self._known -= {column.name, *self._writes}
                self._writes.clear()
                self._queued, self._is_stale = 0, True  # somebody may have removed the folder
            return
        self._disk_used += size
        self._unseen += size
        self._is_stale |= self._unseen > _UNSEEN * self._disk_bytes
        self._saved += len(column.tokens) // 4 if column.pages.nbytes else 0

    def _scan(self) -> None:
        """See what is in the folder, and remove what a process has left that was killed."""
        assert self._root is not None
        assert self._folder is not None
        with self._lock:
            self._unseen, self._is_stale = 0, False
            self._forgotten.clear()
        self._parts.clear()  # somebody may have removed it
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = _files(self._root)
        found = _names_in(self._folder)
        for path, _, _ in files:
            if path.name.startswith("tmp-") and not _is_alive(path.name.split("-")[1]):
                _remove(path)
        with self._lock:
            self._known = (found - self._forgotten).union(self._writes)
        self._disk_used = sum(size for _, size, _ in files)

    def _shrink(self, room: int) -> None:
        """Drop the files that were used longest ago, of any model."""
        assert self._root is not None
        assert self._folder is not None
        files = sorted(_files(self._root), key=lambda file: file[2])
        used = sum(size for _, size, _ in files)
        for path, size, _ in files:
            if used + room <= _SHRUNK * self._disk_bytes:
                break
            _remove(path)
            used -= size
            if path.parent.parent == self._folder and (name := _name_of(path.parent.name + path.name)) is not None:
                self._forget(name)
        self._disk_used = used


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """What tiers hold of a prompt, for other threads than that of the steps, which give it to other engines or take it from them."""

    tiers: PageTiers
    names: Sequence[bytes]  # of the columns of all its full pages,
    tokens: Sequence[bytes]  # and the bytes of their ids
    states: Sequence[bytes]  # the names of the states behind each of them; none for a model without recurrent layers
    num_found: int  # pages at its beginning that can be used
    sizes: tuple[int, int]  # bytes of a column, and of a state

    def contents(self, names: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """The contents and checksums of columns or states, up to the first one that is missing."""
        return [(column.pages.tobytes(), _digest(b"", column.tokens, column.pages.reshape(-1).data)) for column in self.tiers.read(names)]

    def put_page(self, index: int, is_state: bool, content: bytes, digest: bytes) -> bool:
        """Keep what another engine has given; whether it is whole."""
        names = self.states if is_state else self.names
        if index >= len(names) or len(content) != self.sizes[is_state] or _digest(b"", self.tokens[index], content) != digest:
            return False
        self.tiers.put_column(Column(names[index], self.tokens[index], np.frombuffer(content, np.uint8)))
        return True


def _own_folder(folder: pathlib.Path, identity: str) -> pathlib.Path:
    own = folder / identity
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and own.stat().st_uid != os.getuid():
        raise PermissionError(1, "it belongs to another user", str(own))
    return own


def _path(folder: pathlib.Path, name: bytes) -> pathlib.Path:
    digits = name.hex()
    return folder / digits[:2] / digits[2:]


def _written(column: Column) -> list[Any]:
    """The parts of a file."""
    content = np.ascontiguousarray(column.pages).reshape(-1).data
    sizes = len(column.tokens), len(content)
    digest = _digest(column.name, column.tokens, content)
    return [_HEAD.pack(_MAGIC, digest, *sizes), column.tokens, content]


def _digest(name: bytes, tokens: bytes | memoryview, content: Any) -> bytes:
    """32 bytes. Of the content there is a CRC-32, several times as fast to compute."""
    digest = sha256(name + struct.pack("<QQI", len(tokens), len(content), zlib.crc32(content)))
    digest.update(tokens)
    return digest.digest()


def _parsed(name: bytes, data: bytes, sizes: frozenset[int]) -> Column | None:
    """None: it is not the file of a column of this name and one of these sizes."""
    if len(data) < _HEAD.size:
        return None
    magic, digest, num_tokens, num_content = _HEAD.unpack_from(data)
    if magic != _MAGIC or num_content not in sizes or len(data) != _HEAD.size + num_tokens + num_content:
        return None
    tokens, content = memoryview(data)[_HEAD.size : _HEAD.size + num_tokens], memoryview(data)[_HEAD.size + num_tokens :]
    if _digest(name, tokens, content) != digest:
        return None
    return Column(name, bytes(tokens), np.frombuffer(content, np.uint8))


def _files(root: pathlib.Path) -> list[tuple[pathlib.Path, int, float]]:
    """The files of all models, with their sizes in bytes and when they were used."""
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = pathlib.Path(folder, name)
            try:
                stat = path.stat()
            except OSError:  # another process has removed it
                continue
            found.append((path, stat.st_size, stat.st_mtime))
    return found


def _write_all(file: Any, data: Any) -> None:
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


def _remove(path: pathlib.Path) -> None:
    with suppress(OSError):  # it is gone, or the folder cannot be written
        path.unlink()


def _names_in(folder: pathlib.Path) -> set[bytes]:
    """The names of all columns that have files."""
    parts = [entry for entry in os.scandir(folder) if len(entry.name) == 2 and entry.is_dir()]
    digits = [part.name + name for part in parts for name in os.listdir(part)]
    return {name for one in digits if (name := _name_of(one)) is not None}


def _name_of(digits: str) -> bytes | None:
    """None: no file of ours is called so."""
    return bytes.fromhex(digits) if re.fullmatch("[0-9a-f]{32}([0-9a-f]{4})?", digits) else None


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OSError):
        return True
    return True
