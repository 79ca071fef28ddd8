"""Resumable streams: generations that outlive the call that asked for them, and the calls that read them.

Each runs in a task of its own, the pump, which writes events into a `Replay`; the call that began it is its first reader. Owns how long
a generation goes on without a reader, how long its events are kept, and how many bytes that may take.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from aengine.checks import FieldChecks
from aengine.errors import InvalidRequestError
from aengine.outputs import RequestInfo
from aengine.served_stream import ServedStream
from aengine.server.core.backend import Backend, RequestIndex
from aengine.server.core.errors import ServiceError, clip, describe, draining, request_not_found
from aengine.server.core.generation import Generation
from aengine.server.core.records import Caller, current_caller
from aengine.server.generation.convert import read_stream_options
from aengine.server.generation.events import stream_responses
from aengine.server.generation.replay import Replay
from aengine.v1.generation_service_pb2 import ResumeGenerateRequest, StreamGenerateRequest

TOKEN_BYTES = 16
GENERATION_BYTES = 4096
"""The memory that a generation takes beside its events."""


@dataclass(frozen=True, slots=True)
class ResumeLimits:
    """How much a server keeps."""

    events: int = 8192  # of a generation
    bytes: int = 2 * 1024 * 1024  # of its events, with EVENT_BYTES for each
    kept_bytes: int = 64 * 1024 * 1024  # of all generations that have ended, with GENERATION_BYTES for each


class Resumable:
    """One resumable generation."""

    def __init__(self, limits: ResumeLimits, retain_seconds: float, owner: Caller, changed: Callable[[Resumable], None]) -> None:
        self.owner = owner
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.retain_seconds = retain_seconds
        self.replay = Replay(limits.events, limits.bytes, lambda: changed(self))
        self.request_id = ""  # until its first event
        self.dropped = False
        self.pump: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None  # runs out when nobody comes to read
        self.stream: ServedStream | None = None  # while its events come
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

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
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

    async def generate(self, request: StreamGenerateRequest) -> AsyncGenerator[bytes, None]:
        """Begin a generation and read it: serialised responses. Raises the `ServiceError` that it fails with, or READER_REPLACED."""
        retain = read_stream_options(request.spec.stream, FieldChecks()).retain_seconds  # out of range, it is refused before it matters
        resumable = Resumable(self._limits, retain, current_caller(), self._on_change)
        pump = resumable.pump = asyncio.create_task(self._pump(resumable, request))
        pump.add_done_callback(lambda _: self._on_pump_end(resumable, pump))
        self._pumps.add(pump)
        try:
            async with aclosing(resumable.replay.read(0)) as events:
                async for event in events:
                    yield event
        finally:
            if not resumable.request_id:
                pump.cancel()  # no client knows how to resume it

    def resume(self, request: ResumeGenerateRequest) -> AsyncGenerator[bytes, None]:
        """The rest of a generation: serialised responses, which raise what `generate` raises.

        Raises `InvalidRequestError` or `ServiceError` (REQUEST_NOT_FOUND, NOT_RESUMABLE, EVENTS_DROPPED) for the request.
        """
        check = FieldChecks()
        for name in ("request_id", "resume_token"):
            if not getattr(request, name):
                check.add(name, "must not be empty")
        check.finish(InvalidRequestError)
        caller = current_caller()
        found = self._begun.find(request.request_id, caller)
        if not found and self._backend.find(request.request_id, caller) is not None:
            raise ServiceError("NOT_RESUMABLE", f"request {clip(request.request_id)!r} was not asked to be resumable")
        resumable = next((one for one in found if secrets.compare_digest(one.token, request.resume_token)), None)
        if resumable is None:
            raise request_not_found(request.request_id)
        return resumable.replay.read(request.next_event_number)

    async def aclose(self) -> None:
        """Cancel what runs and drop what is kept; returns when nothing of it is left."""
        for resumable in list(self._begun):
            self._drop(resumable)
        pumps = list(self._pumps)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    # ---- inside --------------------------------------------------------------------------------------------------------

    async def _pump(self, resumable: Resumable, request: StreamGenerateRequest) -> None:
        """Write the events of a generation, whoever reads them. It counts as in flight until a reader there is was sent them."""
        replay = resumable.replay

        def begin(generation: Generation) -> None:
            resumable.request_id, resumable.stream = generation.request_id, generation.stream
            self._begun.add(resumable.request_id, resumable.owner, resumable)
            self._on_change(resumable)

        try:
            generated = stream_responses(self._backend, request, resume_token=resumable.token, on_begin=begin)
            async with aclosing(generated) as responses:
                async for response in responses:
                    await replay.append(response.SerializeToString())
                    if response.event.HasField("finished"):
                        await replay.wait_sent()
            replay.end()
        except Exception as error:  # every reader gets the same one
            replay.end(describe(error, answered=replay.ring.end > 0))

    def _on_pump_end(self, resumable: Resumable, pump: asyncio.Task[None]) -> None:
        self._pumps.discard(pump)
        resumable.pump = None
        if resumable.stream is not None:  # which holds all its tokens
            resumable.last_info, resumable.stream = resumable.stream.info(), None
        resumable.replay.end(draining())  # where it was cancelled: a reader must not wait for ever

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
