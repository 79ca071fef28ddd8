"""`BridgedStreams`: streams of an engine that are read in another event loop.

Tokens come over in batches: one wake-up for all that came in one turn of the engine's loop. A reader that lags holds the stream there,
which parks the request as that engine does. Knows nothing of what the engine is.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import anyio

from aengine.errors import EngineStateError
from aengine.loop_thread import LoopThread
from aengine.outputs import FinishReason, Timing, Token
from aengine.params import SamplingParams
from aengine.requests import RequestOptions
from aengine.stream_base import StreamProtocol, StreamSource, end_from_outside

MOST_UNREAD = 256
"""So many tokens of a stream wait for a slow reader; the next stay in the loop of the engine."""


class BridgedStream(StreamProtocol):
    """The tokens of one request of an engine in another event loop."""

    _source: _BridgedSource

    @property
    def request_id(self) -> str:
        return self._source.known_id()

    async def started(self) -> None:
        await self._source.started()


class BridgedStreams:
    """Of the engine in the loop of `thread`. All but `open` is done in that loop."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._feeds: dict[_Feed, None] = {}  # of streams whose end has not come over
        self._noted: dict[_Feed, None] = {}  # those with something new

    def open(self, params: SamplingParams, options: RequestOptions, make: Callable[[], StreamProtocol]) -> BridgedStream:
        """What `make` will make. What that raises is raised by the first iteration, and by `started()`."""
        source = _BridgedSource(self._thread, params, options)
        source.feed = feed = _Feed(self, source)
        self._thread.post(feed.submit, make)
        return BridgedStream(source)

    def add(self, feed: _Feed) -> None:
        self._feeds[feed] = None
        self.note(feed)

    def discard(self, feed: _Feed) -> None:
        self._feeds.pop(feed, None)

    def note(self, feed: _Feed) -> None:
        """There is something to bring over."""
        if not self._noted:
            asyncio.get_running_loop().call_soon(self._bring)
        self._noted[feed] = None

    def _bring(self) -> None:
        noted, self._noted = self._noted, {}
        batches = [(feed.source, batch) for feed in noted if (batch := feed.take()) is not None]
        if batches:
            self._thread.edge.call_soon(_receive, batches)

    def close(self) -> None:
        """The engine is closed: what is left comes over now or never."""
        for feed in list(self._feeds):
            feed.close()
        self._bring()


class _Batch(NamedTuple):
    tokens: list[Token]
    error: BaseException | None
    is_last: bool


def _receive(batches: list[tuple[_BridgedSource, _Batch]]) -> None:
    for source, batch in batches:
        source.receive(batch)


class _Feed:
    """A stream in the loop of the engine. All but `__init__`, and what is read of it, is done there."""

    stream: StreamProtocol | None = None  # None also where the engine refused the request
    inner: StreamSource | None = None  # that of `stream`

    def __init__(self, streams: BridgedStreams, source: _BridgedSource) -> None:
        self.source = source
        self.submitted = threading.Event()
        self._streams = streams
        self._room = MOST_UNREAD
        self._error: BaseException | None = None

    def submit(self, make: Callable[[], StreamProtocol]) -> None:
        try:
            self.stream = make()
        except Exception as error:
            self._error = error
        else:
            self.inner = self.stream._source
            self.inner.waiter = self._note
        self.submitted.set()
        self._streams.add(self)

    def grant(self, count: int) -> None:
        """So many tokens were read."""
        self._room += count
        self._note()

    def cancel(self) -> None:
        if self.inner is not None:
            self.inner.cancel()

    def close(self) -> None:
        """The engine is closed: what the stream has left comes over, however much that is, and its end."""
        self._room = sys.maxsize
        if self.inner is None or not self.inner.finished:
            self._error = self._error or EngineStateError("the engine was closed")
        self._note()

    async def started(self) -> None:
        if self.stream is not None:
            await self.stream.started()
        elif self._error is not None:
            raise self._error

    async def release(self) -> None:
        if self.stream is not None:
            await self.stream.aclose()

    def take(self) -> _Batch | None:
        """What there is room for; None if there is nothing."""
        tokens: list[Token] = []
        error, is_last, inner = self._error, self._error is not None, self.inner
        if inner is not None:
            while self._room and (token := inner.pop()) is not None:
                tokens.append(token)
                self._room -= 1
            if self._room:  # these were all
                error = inner.error or error
                is_last = inner.finished or error is not None
        if is_last:
            self._streams.discard(self)
            if inner is not None:
                inner.waiter = None
        return _Batch(tokens, error, is_last) if tokens or is_last else None

    def _note(self) -> None:
        self._streams.note(self)


class _BridgedSource(StreamSource):
    """The stream of `feed` in the loop of its reader. Plain values of the other side are read as they are."""

    feed: _Feed

    def __init__(self, thread: LoopThread, params: SamplingParams, options: RequestOptions) -> None:
        super().__init__(options.request_id or "", params, options, anyio.Event)
        self._thread = thread
        self._tokens: deque[Token] = deque()
        self._num_read = 0  # since the last grant
        self._finished = False

    def known_id(self) -> str:
        """A random one is known once the other thread has submitted the request, which this waits for."""
        if not self.request_id:
            self.feed.submitted.wait()
            self.request_id = uuid.uuid4().hex if self.feed.inner is None else self.feed.inner.request_id
        return self.request_id

    @property
    def timing(self) -> Timing:
        return Timing() if self.feed.inner is None else self.feed.inner.timing

    @property
    def finished(self) -> bool:
        return self._finished

    def pop(self) -> Token | None:
        if not self._tokens:
            return None
        self._num_read += 1
        if self._num_read >= MOST_UNREAD // 2:
            self._thread.post(self.feed.grant, self._num_read)
            self._num_read = 0
        return self._tokens.popleft()

    def cancel(self) -> None:
        """From any thread."""
        if not self._finished:
            self._thread.post(self.feed.cancel)

    def discard(self, indexes: Iterable[int]) -> None:
        self._tokens.clear()
        self._finished = True
        if self.error is None:
            self._tokens.extend(end_from_outside(index, FinishReason.CANCELLED) for index in indexes)
        self.notify()

    async def wait_released(self) -> None:
        with anyio.CancelScope(shield=True), suppress(EngineStateError):  # a closed engine holds nothing
            await self._thread.call(self.feed.release)
        self._copy()

    async def started(self) -> None:
        """Raises what the stream would raise."""
        if not self.ready.is_set():
            await self._thread.call(self.feed.started)
            self._copy()
        elif self.error is not None:
            raise self.error

    def receive(self, batch: _Batch) -> None:
        if self._finished:
            return  # it was discarded
        self._tokens.extend(batch.tokens)
        self.error, self._finished = batch.error, batch.is_last
        self._copy()
        self.ready.set()
        self.notify()

    def _copy(self) -> None:
        """What the other side knows of the request by now."""
        inner = self.feed.inner
        if inner is not None:
            self.prompt_tokens, self.cached_prompt_tokens = inner.prompt_tokens, inner.cached_prompt_tokens
            self.reasoning_tokens, self.drafts, self.prompt_logprobs = inner.reasoning_tokens, inner.drafts, inner.prompt_logprobs
