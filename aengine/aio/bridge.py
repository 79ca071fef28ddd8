"""`LoopBridge`: an engine of asyncio, used from another event loop, such as trio's; `BridgedStreams`: its streams, read there;
`ServedBridge`: the bridge of a `ServedEngine`.

The engine runs in an event loop of asyncio in a thread. Tokens come over in batches: one wake-up for all that came in one turn of the
engine's loop. A reader that lags holds the stream there, which parks the request as that engine does. Knows nothing of what the engine is.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import anyio

from aengine.aio.edge import LoopThread, running_loop
from aengine.api.engine import EmbeddingFields, EngineBase, ServedEngine, seeded
from aengine.api.errors import EngineStateError
from aengine.api.outputs import (
    AdapterInfo,
    Embedding,
    EngineInfo,
    EngineStats,
    FinishReason,
    ModelInfo,
    RenderedChat,
    ReplicaInfo,
    RequestInfo,
    RequestState,
    Timing,
    Token,
)
from aengine.api.params import SamplingParams
from aengine.api.request import ChatFields, ForkPoint, OptionFields, Prompt, RequestOptions
from aengine.api.stream import StreamSource, end_from_outside

if TYPE_CHECKING:
    from typing import Concatenate

    from typing_extensions import ParamSpec, Self, Unpack

    P = ParamSpec("P")
    T = TypeVar("T")


MOST_UNREAD = 256
"""Most tokens of a stream that wait for a slow reader; those that follow stay in the loop of the engine."""


class BridgedStreams:
    """The streams of the engine in the loop of `thread`, read from another loop. All methods but `open` are called in the engine's loop."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._feeds: dict[_Feed, None] = {}  # of streams whose end has not come over
        self._noted: dict[_Feed, None] = {}  # those with something new

    def open(self, params: SamplingParams, options: RequestOptions, make: Callable[[], StreamSource]) -> StreamSource:
        """That of what `make` will submit. What that raises is raised by the first iteration, and by `started()`."""
        source = _BridgedSource(self._thread, params, options)
        source.feed = feed = _Feed(self, source)
        self._thread.post(feed.submit, make)
        return source

    def add_feed(self, feed: _Feed) -> None:
        self._feeds[feed] = None
        self.mark_ready(feed)

    def discard(self, feed: _Feed) -> None:
        self._feeds.pop(feed, None)

    def mark_ready(self, feed: _Feed) -> None:
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
    """The reader of a request in the loop of the engine. All but `__init__`, and what is read of it, is done there."""

    inner: StreamSource | None = None  # None also where the engine refused the request

    def __init__(self, streams: BridgedStreams, source: _BridgedSource) -> None:
        self.source = source
        self.submitted = threading.Event()
        self.streams = streams
        self._room = MOST_UNREAD
        self._error: BaseException | None = None

    def submit(self, make: Callable[[], StreamSource]) -> None:
        try:
            self.inner = make()
        except Exception as error:
            self._error = error
        else:
            self.inner.waiter = self._note
        self.submitted.set()
        self.streams.add_feed(self)

    def grant(self, count: int) -> None:
        """Make room for `count` more tokens, since the reader has taken as many."""
        self._room += count
        self._note()

    def cancel(self) -> None:
        if self.inner is not None:
            self.inner.cancel()

    def give_way(self, successor: _Feed) -> None:
        if self.inner is not None and successor.inner is not None:
            self.inner.give_way(successor.inner)
        else:
            self.cancel()

    def close(self) -> None:
        """The engine is closed: what the stream has left comes over, however much that is, and its end."""
        self._room = sys.maxsize
        if self.inner is None or not self.inner.finished:
            self._error = self._error or EngineStateError("the engine was closed")
        self._note()

    async def started(self) -> None:
        if self.inner is not None:
            await self.inner.wait_started()
        elif self._error is not None:
            raise self._error

    async def release(self) -> None:
        if self.inner is not None:
            self.inner.cancel()
            self.inner.discard(())
            await self.inner.wait_released()

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
            self.streams.discard(self)
            if inner is not None:
                inner.waiter = None
        return _Batch(tokens, error, is_last) if tokens or is_last else None

    def _note(self) -> None:
        self.streams.mark_ready(self)


class _BridgedSource(StreamSource):
    """The stream of `feed` in the loop of its reader. Plain values of the other side are read as they are."""

    feed: _Feed

    def __init__(self, thread: LoopThread, params: SamplingParams, options: RequestOptions) -> None:
        super().__init__(options.request_id or "", params, options, self._fork, None)
        self._thread = thread
        self._tokens: deque[Token] = deque()  # `_Feed` bounds them, also while this loop is blocked
        self._num_read = 0  # since the last grant
        self._finished = False
        self._arrival_time = time.time()  # in seconds

    @property
    def request_id(self) -> str:
        """A random one is known once the other thread has submitted the request, which this waits for."""
        if not self._request_id:
            self.feed.submitted.wait()
            self._request_id = uuid.uuid4().hex if self.feed.inner is None else self.feed.inner.request_id
        return self._request_id

    @property
    def timing(self) -> Timing:
        return Timing() if self.feed.inner is None else self.feed.inner.timing

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def unread(self) -> int:
        return len(self._tokens)

    @property
    def gone(self) -> bool:
        return self._finished and (self.feed.inner is None or self.feed.inner.gone)

    def info(self) -> RequestInfo:
        inner = self.feed.inner
        if inner is not None:
            return inner.info()
        state = RequestState.FINISHED if self._finished else RequestState.PREPARING
        return RequestInfo(self.request_id, state, self.usage_with(0), Timing(), self._arrival_time)

    def pop(self) -> Token | None:
        if not self._tokens:
            return None
        self._num_read += 1
        if self._num_read >= MOST_UNREAD // 2:
            self._thread.post(self.feed.grant, self._num_read)
            self._num_read = 0
        return self._tokens.popleft()

    def cancel(self) -> None:
        """Cancel the request; may be called from any thread."""
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

    async def wait_started(self) -> None:
        if not self.ready.is_set():
            await self._thread.call(self.feed.started)
            self._copy()
        elif self.error is not None:
            raise self.error

    def give_way(self, successor: StreamSource) -> None:
        assert isinstance(successor, _BridgedSource)
        self._thread.post(self.feed.give_way, successor.feed)

    def _fork(self, point: ForkPoint, params: SamplingParams, fields: OptionFields) -> StreamSource:
        """What is wrong with it is raised by the first iteration of the fork."""

        def submit() -> StreamSource:
            inner = self.feed.inner
            if inner is None:
                raise EngineStateError("the request was refused, and cannot be forked")
            return inner.fork(point, params, fields)

        return self.feed.streams.open(params, RequestOptions.of(None, fields), submit)

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
            self.reasoning_tokens, self.image_tokens = inner.reasoning_tokens, inner.image_tokens
            self.rewritten_tokens, self.loaded_prompt_tokens = inner.rewritten_tokens, inner.loaded_prompt_tokens
            self.drafts, self.prompt_logprobs = inner.drafts, inner.prompt_logprobs
            self.params = inner.params if self.params.seed is None else self.params
            self.known_lengths = inner.known_lengths


class LoopBridge(EngineBase):
    """`engine`, started with it and not before, in an event loop of its own. Belongs to the loop that starts it."""

    def __init__(self, engine: EngineBase) -> None:
        self._engine = engine
        self._thread: LoopThread | None = None
        self._closed: anyio.Event | None = None  # once somebody closes it

    # ---- life cycle ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._thread is not None or self._closed is not None:
            raise EngineStateError("the engine was started before; make a new one")
        self._thread = LoopThread("aengine-asyncio")
        self._streams = BridgedStreams(self._thread)
        self._thread.start()
        try:
            await self._thread.call(self._engine.start)
        except BaseException:
            await self._thread.stop()
            if self._closed is None:  # else whoever closes it meanwhile goes on
                self._closed = anyio.Event()
                self._closed.set()
            raise

    async def aclose(self) -> None:
        if self._closed is None:
            self._closed = closed = anyio.Event()
            if self._thread is not None:
                with anyio.CancelScope(shield=True):
                    try:
                        await self._thread.call(self._close)
                    finally:
                        await self._thread.stop()
            closed.set()
        await self._closed.wait()

    @property
    def healthy(self) -> bool:
        return self._closed is None and self._engine.healthy

    @property
    def model_info(self) -> ModelInfo:
        return self._engine.model_info

    # ---- requests ------------------------------------------------------------------------------------------------------

    def _open(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None, fields: OptionFields, *, whole: bool
    ) -> StreamSource:
        """What is wrong with the request is raised by the first iteration, and by `started()`."""
        self._running()
        options = RequestOptions.of(options, fields)
        params = seeded(prompt, params)
        return self._streams.open(params, options, partial(self._engine._open, prompt, params, options, {}, whole=whole))

    async def _embed(self, prompt: Prompt, options: RequestOptions | None, fields: OptionFields, wanted: EmbeddingFields) -> Embedding:
        return await self._running().call(partial(self._engine._embed, prompt, options, fields, wanted))

    async def cancel(self, request_id: str) -> bool:
        return await self._running().call(partial(self._engine.cancel, request_id))

    async def touch(self, session: str, tenant: str = "") -> int:
        return await self._running().call(partial(self._engine.touch, session, tenant))

    async def tokenize(self, text: str, **fields: Any) -> list[int]:
        return await self._running().call(partial(self._engine.tokenize, text, **fields))

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, session: str | None = None, tenant: str = "", **fields: Unpack[ChatFields]
    ) -> RenderedChat:
        return await self._running().call(partial(self._engine.render_chat, messages, session=session, tenant=tenant, **fields))

    def _running(self) -> LoopThread:
        if self._closed is not None or self._thread is None:
            raise EngineStateError("the engine is not started" if self._closed is None else "the engine is closed")
        self._thread.edge.check_current()
        return self._thread

    async def _close(self) -> None:
        """In the loop of the engine."""
        try:
            await self._engine.aclose()
        finally:
            self._streams.close()


def asked(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[LoopBridge, P], Coroutine[Any, Any, T]]:
    """The method of a bridge that calls the coroutine `method` of its engine, in the loop of the engine."""

    async def ask(self: LoopBridge, /, *args: P.args, **fields: P.kwargs) -> T:
        return await self._running().call(partial(getattr(self._engine, method.__name__), *args, **fields))

    ask.__name__, ask.__doc__ = method.__name__, method.__doc__
    return ask


def iterated(
    method: Callable[Concatenate[Any, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[LoopBridge, P], AsyncGenerator[T, None]]:
    """The method of a bridge that iterates the asynchronous generator `method` of its engine, one item at a time, in the loop of the
    engine. Closing the generator closes that of the engine."""

    async def iterate(self: LoopBridge, /, *args: P.args, **fields: P.kwargs) -> AsyncGenerator[T, None]:
        thread = self._running()

        async def begin() -> AsyncGenerator[T, None]:
            found: AsyncGenerator[T, None] = getattr(self._engine, method.__name__)(*args, **fields)
            return found

        items = await thread.call(begin)
        try:
            while True:
                try:
                    item = await thread.call(items.__anext__)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            with anyio.CancelScope(shield=True), suppress(EngineStateError):
                await thread.call(items.aclose)

    iterate.__name__, iterate.__doc__ = method.__name__, method.__doc__
    return iterate


class ServedBridge(LoopBridge, ServedEngine):
    """The bridge of a `ServedEngine`. What an engine tells at once is read from this loop, but for `request_info`, which is for its own."""

    _engine: ServedEngine

    @property
    def engine_info(self) -> EngineInfo:
        return self._engine.engine_info

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self._engine.adapters

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        return self._engine.replicas()

    def request_info(self, request_id: str) -> RequestInfo | None:
        return self._engine.request_info(request_id)

    wait_stopped = asked(ServedEngine.wait_stopped)
    watch_pages = iterated(ServedEngine.watch_pages)
    find_kv = asked(ServedEngine.find_kv)
    export_kv = iterated(ServedEngine.export_kv)
    import_kv = asked(ServedEngine.import_kv)
    drain_replica = asked(ServedEngine.drain_replica)
    violations = asked(ServedEngine.violations)
    locate = asked(ServedEngine.locate)
    detokenize = asked(ServedEngine.detokenize)
    token_bytes = asked(ServedEngine.token_bytes)
    profile = asked(ServedEngine.profile)
    flush_cache = asked(ServedEngine.flush_cache)
    pause = asked(ServedEngine.pause)
    unpause = asked(ServedEngine.unpause)
    sleep = asked(ServedEngine.sleep)
    wake = asked(ServedEngine.wake)
    update_weights = asked(ServedEngine.update_weights)
    load_adapter = asked(ServedEngine.load_adapter)
    unload_adapter = asked(ServedEngine.unload_adapter)


class AsyncioEngine(EngineBase):
    """An engine that needs asyncio. Entered in another event loop, `async with` gives its bridge, a `bridge_class`."""

    bridge_class: ClassVar[type[LoopBridge]] = LoopBridge
    _bridge: LoopBridge | None = None

    async def __aenter__(self) -> Self:
        if isinstance(running_loop(), asyncio.AbstractEventLoop):
            await self.start()
            return self
        self._bridge = self.bridge_class(self)
        await self._bridge.start()
        return cast("Self", self._bridge)

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await (self if self._bridge is None else self._bridge).aclose()


EngineT = TypeVar("EngineT", bound=EngineBase)


def on_asyncio(engine: EngineT) -> EngineT:
    """`engine`, which needs asyncio and is not started, for use from any event loop: start, use and close what is returned in its place.

    It runs in an event loop of asyncio in a thread, which begins with `start()`. `async with AsyncClient(...)` does the same by itself
    where the loop is trio's."""
    kind: type[LoopBridge] = ServedBridge if isinstance(engine, ServedEngine) else LoopBridge
    if isinstance(engine, AsyncioEngine):
        kind = engine.bridge_class
    return cast("EngineT", kind(engine))
