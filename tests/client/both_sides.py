"""An engine, and how a test reaches it: as it is, or through a client, a channel and a server; the client has a call for each request,
or one for all, or it runs in another event loop; or through a router, which may be behind a server of its own.

A test in trio has the engine in its own loop where it reaches it as it is; else engine and server run in a loop of asyncio in a thread, and
the client or the router in another one, as `on_asyncio` has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import sniffio
from grpc_harness import serving
from oracle_engine import OracleEngine

from aengine import AsyncEngine, EngineBase, Router, on_asyncio
from aengine.aio.edge import LoopThread
from aengine.client import AsyncClient

LOCAL, REMOTE, SHARED, BRIDGED, ROUTED, BEHIND = "engine", "client", "multiplex", "bridge", "router", "behind"
SIDES = (LOCAL, REMOTE, SHARED, BRIDGED, ROUTED, BEHIND)
CALL_EACH = (REMOTE, BRIDGED, BEHIND)  # where a request has a gRPC call of its own
T = TypeVar("T")


@asynccontextmanager
async def reached(side: str, engine: AsyncEngine, **overrides: Any) -> AsyncIterator[EngineBase]:
    """`engine`, which is started in this loop of asyncio, from one side. `overrides` are the client's."""
    if side == LOCAL:
        yield engine
        return
    async with serving(engine, limit=None, over_a_router=side == BEHIND) as serve:
        other = _other(side, serve.server.address, **overrides)
        async with on_asyncio(other) if side == BRIDGED else other as entered:
            yield entered


@dataclass
class OracleSide:
    """An oracle, and what a test reaches it by for the length of `reach()`."""

    oracle: OracleEngine
    reach: Callable[[], AbstractAsyncContextManager[EngineBase]]


@asynccontextmanager
async def oracle_side(side: str, **config: Any) -> AsyncIterator[OracleSide]:
    """An oracle with a `config`, which is closed at the end, in a test of asyncio or trio."""
    if side == LOCAL or sniffio.current_async_library() == "asyncio":
        async with OracleEngine(**config) as oracle:
            yield OracleSide(oracle, lambda: reached(side, oracle))
        return
    thread = LoopThread("the loop of the server")
    thread.start()

    @asynccontextmanager
    async def reach() -> AsyncIterator[EngineBase]:
        server = _held(thread, lambda: serving(oracle, limit=None, over_a_router=side == BEHIND))
        async with server as serve, on_asyncio(_other(side, serve.server.address)) as entered:
            yield entered

    try:
        async with _held(thread, lambda: OracleEngine(**config)) as oracle:
            yield OracleSide(oracle, reach)
    finally:
        await thread.stop()


def _other(side: str, address: str, **overrides: Any) -> AsyncClient | Router:
    return Router(backends=(address,)) if side == ROUTED else AsyncClient(address, **{"multiplex": side == SHARED, **overrides})


@asynccontextmanager
async def _held(thread: LoopThread, make: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
    """What `make` gives, entered and left in one task of the thread."""
    held: _Held = await thread.call(lambda: _begin(make))
    try:
        yield held.value
    finally:
        await thread.call(held.end)


class _Held:
    value: Any

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self.entered, self._leave = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._hold(make))

    async def _hold(self, make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        async with make() as self.value:
            self.entered.set()
            await self._leave.wait()

    async def end(self) -> None:
        self._leave.set()
        await self.task


async def _begin(make: Callable[[], AbstractAsyncContextManager[Any]]) -> _Held:
    held = _Held(make)
    entering = asyncio.create_task(held.entered.wait())
    await asyncio.wait({held.task, entering}, return_when=asyncio.FIRST_COMPLETED)
    if not held.entered.is_set():
        entering.cancel()
        await held.task  # raises what entering raised
    return held
