"""Batches: many requests whose answers are stored, and that go on without whoever asked, in this process or in the next one.

Owns which requests have no answer yet, how many run at a time, and what is kept in the journal meanwhile. Must not know what a request or
an answer is: the door says that. The lines of a file in the form of OpenAI's batches.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from aengine.api.dataclass import dataclass
from aengine.api.errors import AEngineError
from aengine.server.core.calls_in_flight import CURRENT_CALL, Caller, CallRecord, Decided
from aengine.server.core.core import Backend
from aengine.server.core.errors import describe
from aengine.server.core.journal import Journal, StoredAnswer, pack, unpack

_log = logging.getLogger("aengine")
BATCH_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
PRIORITY = 50
"""The priority of requests that ask for none: those that somebody waits for come first."""
MOST_AT_ONCE = 256
"""Requests of all batches together in the engine, at most."""
SHARE_AT_ONCE = 0.75
"""The part of the sequences that the engine runs at a time; the others are for those who wait for their answers."""


class BatchError(AEngineError):
    """A file of requests cannot be used. The message is one sentence."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a file."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def read_lines(lines: Iterable[str | bytes], where: str, urls: Sequence[str] = BATCH_URLS) -> Iterator[BatchLine]:
    """The requests in the lines of a file, which is named `where`; empty lines are none. Raises `BatchError`, naming the line, for what is
    no request of one of the `urls`, or has the id of another one."""
    known: set[str] = set()
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        place = f"{where}, line {number}"
        try:
            line = _read_line(json.loads(raw), urls)
            if line.custom_id in known:
                raise ValueError(f"custom_id {line.custom_id!r} is that of an earlier line")
        except (ValueError, RecursionError) as error:
            what = f"no JSON ({error})" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError) else str(error)
            raise BatchError(f"{place}: {what}", number) from None
        known.add(line.custom_id)
        yield line


def _read_line(value: Any, urls: Sequence[str]) -> BatchLine:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    identity, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(identity, str) or not identity:
        raise ValueError("custom_id is not a string that says something")
    if value.get("method", "POST") != "POST":
        raise ValueError("method is not POST")
    if not isinstance(url, str) or url not in urls:
        raise ValueError(f"url {url!r} is not one of {', '.join(urls)}")
    if not isinstance(body, dict):
        raise ValueError("body is not an object")
    if body.get("stream"):
        raise ValueError("body.stream is true, and a file has whole answers")
    return BatchLine(identity, url, body)


# ---- what runs -----------------------------------------------------------------------------------------------------------


class Answered(NamedTuple):
    """What came of a request."""

    is_ok: bool
    body: bytes
    delay: float | None = None  # seconds after which it is to be asked again, in place of this answer


class Batch:
    """One that runs. `entry` is what the journal has of it; its `asked` is the door's, and may be set anew."""

    def __init__(self, entry: StoredAnswer, owner: Caller, requests: Sequence[bytes]) -> None:
        self.entry, self.owner, self.requests = entry, owner, requests
        self.answered: dict[int, bool] = {}  # in the order of the answers: whether the request was served
        self.stopped = ""  # why no more requests are begun: "cancelled", "expired"
        self.task: asyncio.Task[None] | None = None
        self.workers: list[asyncio.Task[None]] = []
        self.changed = asyncio.Event()

    def decided(self, index: int) -> Decided:
        """What request `index` would leave to chance."""
        own_id = f"{self.entry.name}-{index}"
        seed = int.from_bytes(blake2b(own_id.encode(), digest_size=8).digest(), "little") >> 2
        return Decided(seed, own_id, self.entry.created)

    def part(self, index: int) -> str:
        """The entry of an answer."""
        return f"{self.entry.name}/{index:08d}"


def _stop_workers(batch: Batch, why: str) -> None:
    batch.stopped = batch.stopped or why
    for worker in batch.workers:
        worker.cancel()


class BatchDoor(Protocol):
    """What the batches of one door are made of."""

    async def answer(self, batch: Batch, index: int) -> Answered:
        """Serve a request of it, in the name of the caller of the present call."""

    async def finish(self, batch: Batch, answers: Sequence[bytes | None]) -> StoredAnswer:
        """The entry of a batch that has ended, in place of that before; None for requests that have no answer."""

    def expiry(self, batch: Batch) -> float | None:
        """When it ends, if it has not before, on time.time."""


class Batches:
    """The batches of one door that run, and how their answers are stored. Names begin with `start`, and were given by no client."""

    def __init__(self, journal: Journal, backend: Backend, door: BatchDoor, start: str) -> None:
        self._journal, self._backend, self._door, self._start = journal, backend, door, start
        self.running: dict[str, Batch] = {}
        self._rooms: asyncio.Semaphore | None = None  # one for each request in the engine
        self._resuming: asyncio.Task[None] | None = None

    async def begin(self, entry: StoredAnswer, owner: Caller, requests: Sequence[bytes]) -> Batch:
        """Store a batch, and run it. Raises `OSError` where it cannot be stored."""
        batch = Batch(entry, owner, requests)
        await self._journal.put_answer(replace(entry, name=f"{entry.name}/requests", asked=b"", answer=pack(requests)))
        try:
            await self._journal.put_answer(entry)
        except OSError:
            await self._journal.delete_parts(entry.name)
            raise
        self._run(batch)
        return batch

    def resume(self) -> None:
        """Go on with those that were running when the process ended that had the journal before. The engine takes requests."""
        if self._resuming is None:
            self._resuming = asyncio.create_task(self._resume(), name="aengine-batches")

    async def find(self, name: str) -> Batch | None:
        """The one of this name that runs; those of the process before count as soon as this one may go on with them."""
        if name not in self.running and self._resuming is not None:
            await asyncio.wait((self._resuming,))
        return self.running.get(name)

    async def aclose(self) -> None:
        """What runs stays unfinished in the journal."""
        tasks = [batch.task for batch in self.running.values() if batch.task is not None]
        tasks += [] if self._resuming is None else [self._resuming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop_batch(self, batch: Batch, why: str) -> None:
        """End it: what runs is cancelled. Returns when that is stored."""
        _stop_workers(batch, why)
        if batch.task is not None:
            await asyncio.wait((batch.task,))

    async def answers(self, batch: Batch) -> AsyncGenerator[tuple[int, bytes], None]:
        """The answers with the indexes of their requests, in the order of their ends, up to the last."""
        number = 0
        while True:
            changed = batch.changed
            for index in list(batch.answered)[number:]:
                number += 1
                if (stored := await self._journal.get_answer(batch.part(index), Caller())) is None:
                    return  # it has ended, and its entry has them
                yield index, stored.answer
            if batch.task is None or batch.task.done() or number == len(batch.requests):
                return
            await changed.wait()

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _run(self, batch: Batch) -> None:
        self.running[batch.entry.name] = batch
        batch.task = asyncio.create_task(self._answer_all(batch), name="aengine-batch")
        batch.task.add_done_callback(lambda _: self._on_end(batch))

    def _on_end(self, batch: Batch) -> None:
        self.running.pop(batch.entry.name, None)
        batch.changed.set()

    async def _resume(self) -> None:
        for stored in await self._journal.left_behind(self._start):
            held = await self._journal.get_answer(f"{stored.name}/requests", Caller())
            batch = Batch(stored, Caller.of_owner(stored.owner), [] if held is None else unpack(held.answer))
            for part in await self._journal.list_parts(stored.name):
                number = part.name.rpartition("/")[2]
                if number.isdecimal():
                    batch.answered[int(number)] = part.asked == b"ok"
            self._run(batch)

    async def _answer_all(self, batch: Batch) -> None:
        limits = self._backend.engine.engine_info
        queue = limits.max_queued_requests or MOST_AT_ONCE
        at_once = max(1, min(int(limits.max_num_seqs * SHARE_AT_ONCE), queue, MOST_AT_ONCE))
        rooms = self._rooms = self._rooms or asyncio.Semaphore(at_once)
        left = iter([index for index in range(len(batch.requests)) if index not in batch.answered])
        batch.workers = [asyncio.create_task(self._work(batch, left, rooms)) for _ in range(min(at_once, len(batch.requests)))]
        expiry, timer = self._door.expiry(batch), None
        if expiry is not None:
            timer = asyncio.get_running_loop().call_later(expiry - time.time(), _stop_workers, batch, "expired")
        try:
            if batch.workers:
                await asyncio.wait(batch.workers)
        finally:
            if timer is not None:
                timer.cancel()
            for worker in batch.workers:
                worker.cancel()
            for ended in await asyncio.gather(*batch.workers, return_exceptions=True):
                if isinstance(ended, Exception):
                    _log.error("a request of %s has no answer", batch.entry.name, exc_info=ended)
        answers = [await self._answer_of(batch, index) for index in range(len(batch.requests))]
        try:
            batch.entry = await self._door.finish(batch, answers)
            await self._journal.put_answer(replace(batch.entry, ended=True))
            await self._journal.delete_parts(batch.entry.name)
        except OSError as error:
            _log.error("the answers of %s cannot be stored: %s", batch.entry.name, error)

    async def _answer_of(self, batch: Batch, index: int) -> bytes | None:
        stored = await self._journal.get_answer(batch.part(index), Caller()) if index in batch.answered else None
        return None if stored is None else stored.answer

    async def _work(self, batch: Batch, left: Iterator[int], rooms: asyncio.Semaphore) -> None:
        for index in left:
            decided = batch.decided(index)
            while True:
                again = replace(decided, progress=await self._journal.follow_on(batch.part(index)))
                CURRENT_CALL.set(CallRecord("", "", decided.request_id, caller=batch.owner, decided=again))
                async with rooms:
                    answered = await self._answer(batch, index)
                if answered.delay is None:
                    break
                await asyncio.sleep(answered.delay)
            entry, word = batch.entry, b"ok" if answered.is_ok else b""
            await self._store(StoredAnswer(batch.part(index), entry.owner, entry.created, False, word, answered.body))
            batch.answered[index] = answered.is_ok
            changed, batch.changed = batch.changed, asyncio.Event()
            changed.set()

    async def _answer(self, batch: Batch, index: int) -> Answered:
        try:
            return await self._door.answer(batch, index)
        except Exception as error:  # a bug, which is logged
            return Answered(False, describe(error).message.encode())

    async def _store(self, part: StoredAnswer) -> None:
        while True:
            try:
                await self._journal.put_answer(part)
                return
            except OSError as error:
                _log.warning("an answer of a batch waits for room in the journal: %s", error)
            await asyncio.sleep(1.0)
