"""`LoopBridge`: an engine of asyncio, used from another event loop, such as trio's.

The engine runs in an event loop of asyncio in a thread. Knows nothing of what the engine is.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio

from aengine.bridged_streams import BridgedStream, BridgedStreams
from aengine.chat_prompts import ChatFields
from aengine.errors import EngineStateError
from aengine.loop_edge import running_loop
from aengine.loop_thread import LoopThread
from aengine.outputs import Completion, Embedding, ModelInfo
from aengine.params import SamplingParams
from aengine.protocols import EngineProtocol
from aengine.requests import OptionFields, Prompt, RequestOptions, check_params

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

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


class LoopBridge(EngineProtocol):
    """`engine`, started with it and not before, in an event loop of its own. Belongs to the loop that starts it."""

    def __init__(self, engine: EngineProtocol) -> None:
        self._engine = engine
        self._thread: LoopThread | None = None
        self._closed: anyio.Event | None = None  # once somebody closes it

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

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> BridgedStream:
        """As the engine's. What is wrong with the request is raised by the first iteration, and by `started()`."""
        self._running()
        options = RequestOptions.of(options, fields)
        params = check_params(params).with_seed()
        return self._streams.open(params, options, partial(self._engine.stream, prompt, params, options))

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

    async def _close(self) -> None:
        """In the loop of the engine."""
        try:
            await self._engine.aclose()
        finally:
            self._streams.close()
