"""`LoopBridge`: an engine of asyncio, used from another event loop, such as trio's.

The engine runs in an event loop of asyncio in a thread. Tokens come over in batches: one wake-up for all that came in one turn of that
loop. A reader that lags holds the stream there, which parks the request as that engine does. Knows nothing of what the engine is.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import anyio

from aengine.chat_prompts import ChatFields
from aengine.errors import EngineStateError
from aengine.loop_edge import running_loop
from aengine.loop_thread import LoopThread
from aengine.outputs import Completion, Embedding, FinishReason, ModelInfo, Timing, Token
from aengine.params import SamplingParams
from aengine.protocols import EngineProtocol
from aengine.requests import OptionFields, Prompt, RequestOptions, check_params
from aengine.stream_base import StreamProtocol, StreamSource, end_from_outside

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

MOST_UNREAD = 256
"""So many tokens of a stream wait for a slow reader; the next stay in the loop of the engine."""

EngineT = TypeVar("EngineT", bound=EngineProtocol)


def on_asyncio(engine: EngineT) -> EngineT:
    """`engine`, which needs asyncio and is not started, for use from any event loop: start, use and close what is returned in its place.

    It runs in an event loop of asyncio in a thread, which begins with `start()`. Its coroutines, and what it declares to give asynchronous
    generators, are run there; its other functions are called as they are. `async with AsyncClient(...)` does the same by itself where the
    loop is trio's."""
    return cast("EngineT", LoopBridge(engine))


class AsyncioEngine(EngineProtocol):
    """An engine that needs asyncio. Entered in another event loop, `async with` gives its `LoopBridge`."""

    _bridge: LoopBridge | None = None

    async def __aenter__(self) -> Self:
        if isinstance(running_loop(), asyncio.AbstractEventLoop):
            await self.start()
            return self
        self._bridge = LoopBridge(self)
        await self._bridge.start()
        return cast("Self", self._bridge)

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await (self if self._bridge is None else self._bridge).aclose()


class BridgedStream(StreamProtocol):
    """The tokens of one request of an engine in another event loop."""

    _source: _BridgedSource

    @property
    def request_id(self) -> str:
        return self._source.known_id()

    async def started(self) -> None:
        await self._source.started()


class LoopBridge(EngineProtocol):
    """`engine`, started with it and not before, in an event loop of its own. Belongs to the loop that starts it."""

    def __init__(self, engine: EngineProtocol) -> None:
        self._engine = engine
        self._thread: LoopThread | None = None
        self._closed: anyio.Event | None = None  # once somebody closes it
        self._feeds: dict[_Feed, None] = {}  # of streams whose end has not come over; from here on in the loop of the engine
        self._noted: dict[_Feed, None] = {}  # those with something new

    def __getattr__(self, name: str) -> Any:
        """What the engine has beyond `EngineProtocol`."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._engine, name)
        if inspect.iscoroutinefunction(found):
            return partial(self._ask, found)
        if inspect.isasyncgenfunction(found) or str(getattr(found, "__annotations__", {}).get("return")).startswith("AsyncGenerator["):
            return partial(self._iterate, found)
        return found

    # ---- life cycle ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._thread is not None or self._closed is not None:
            raise EngineStateError("the engine was started before; make a new one")
        self._thread = LoopThread("aengine-asyncio")
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

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> BridgedStream:
        """As the engine's. What is wrong with the request is raised by the first iteration, and by `started()`."""
        thread = self._running()
        options = RequestOptions.of(options, fields)
        source = _BridgedSource(thread, check_params(params).with_seed(), options)
        feed = _Feed(self, source)
        source.feed = feed
        thread.post(feed.submit, partial(self._engine.stream, prompt, source.params, options))
        return BridgedStream(source)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion:
        return await self._running().call(partial(self._engine.generate, prompt, params, options, **fields))

    async def embed(
        self,
        prompt: Prompt,
        options: RequestOptions | None = None,
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        **fields: Unpack[OptionFields],
    ) -> Embedding:
        embed = partial(self._engine.embed, prompt, options, pooling=pooling, normalize=normalize, dimensions=dimensions, **fields)
        return await self._running().call(embed)

    async def cancel(self, request_id: str) -> bool:
        return await self._running().call(partial(self._engine.cancel, request_id))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, for_prompt: bool = False) -> list[int]:
        tokenize = partial(self._engine.tokenize, text, add_special_tokens=add_special_tokens, for_prompt=for_prompt)
        return await self._running().call(tokenize)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Unpack[ChatFields]) -> str:
        return await self._running().call(partial(self._engine.render_chat, messages, **fields))

    def _running(self) -> LoopThread:
        if self._closed is not None or self._thread is None:
            raise EngineStateError("the engine is not started" if self._closed is None else "the engine is closed")
        self._thread.edge.check_current()
        return self._thread

    async def _ask(self, function: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        return await self._running().call(partial(function, *args, **fields))

    async def _iterate(self, function: Callable[..., Any], *args: Any, **fields: Any) -> AsyncIterator[Any]:
        """One item at a time."""
        thread = self._running()

        async def begin() -> Any:
            return function(*args, **fields)

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

    # ---- in the loop of the engine -------------------------------------------------------------------------------------

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
            assert self._thread is not None
            self._thread.edge.call_soon(_receive, batches)

    async def _close(self) -> None:
        try:
            await self._engine.aclose()
        finally:
            for feed in list(self._feeds):  # what is left comes now or never
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

    def __init__(self, bridge: LoopBridge, source: _BridgedSource) -> None:
        self.source = source
        self.submitted = threading.Event()
        self._bridge = bridge
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
        self._bridge.add(self)

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
            self._bridge.discard(self)
            if inner is not None:
                inner.waiter = None
        return _Batch(tokens, error, is_last) if tokens or is_last else None

    def _note(self) -> None:
        self._bridge.note(self)


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
