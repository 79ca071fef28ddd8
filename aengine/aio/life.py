"""`AsyncioLife`: that something starts once and ends once, in one event loop of asyncio, whoever closes it and whenever."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable

import anyio

from aengine.api.errors import EngineStateError

Work = Callable[[], Awaitable[object]]


class _Phase(enum.Enum):
    NEW = enum.auto()
    STARTING = enum.auto()
    RUNNING = enum.auto()
    CLOSED = enum.auto()


class AsyncioLife:
    """`name`: what it is the life of, in errors. `close` gives back all that there is; it is called once, and cannot be cancelled."""

    def __init__(self, name: str, close: Work) -> None:
        self._name = name
        self._close = close
        self._phase = _Phase.NEW
        self._closed = asyncio.Event()

    @property
    def running(self) -> bool:
        return self._phase is _Phase.RUNNING

    def check_running(self) -> None:
        """Raises `EngineStateError` unless it runs, in this loop."""
        if self._phase is not _Phase.RUNNING:
            raise EngineStateError(f"the {self._name} is {'closed' if self._phase is _Phase.CLOSED else 'not started'}")
        if asyncio.get_running_loop() is not self._loop:
            raise EngineStateError(f"the {self._name} belongs to another event loop")

    async def start(self, work: Work) -> None:
        """Do `work`. Raises what it raises, when all is given back, and `EngineStateError` if it is closed meanwhile."""
        if self._phase is not _Phase.NEW:
            raise EngineStateError(f"the {self._name} was started before; make a new one")
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise EngineStateError(f"the {self._name} needs the event loop of asyncio: use `async with`, or aengine.on_asyncio") from None
        self._phase = _Phase.STARTING
        self._starting = anyio.CancelScope()
        try:
            with self._starting:
                await work()
            if self._starting.cancel_called:
                raise EngineStateError(f"the {self._name} was closed while it was starting")
        except BaseException:
            await self._end()
            raise
        self._phase = _Phase.RUNNING

    async def aclose(self, finish: Work) -> None:
        """Returns when it is closed, whoever closes it. `finish`: what is done first where it runs; it can be cancelled."""
        phase, self._phase = self._phase, _Phase.CLOSED
        match phase:
            case _Phase.NEW:
                self._closed.set()
            case _Phase.STARTING:
                self._starting.cancel()  # and `start()` ends it
            case _Phase.RUNNING:
                try:
                    await finish()
                finally:
                    await self._end()
            case _Phase.CLOSED:
                pass
        await self._closed.wait()

    async def wait_closed(self) -> None:
        """Raises `EngineStateError` if it was not started."""
        if self._phase is _Phase.NEW:
            raise EngineStateError(f"the {self._name} is not started")
        await self._closed.wait()

    async def _end(self) -> None:
        self._phase = _Phase.CLOSED
        try:
            with anyio.CancelScope(shield=True):
                await self._close()
        finally:
            self._closed.set()
