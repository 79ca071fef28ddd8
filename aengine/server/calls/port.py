"""gRPC's server for asyncio, but for how calls are accepted.

`grpc.aio` accepts one call of each method in a turn of the event loop, dies of a path that is not UTF-8, with every call that it serves,
and cannot end a call whose client takes nothing. Here several are accepted at a time, paths of methods that do not exist are not looked at,
and a `Carrier` ends its call.

Owns all that is used of grpc's private module, in the releases that pyproject.toml allows. Does not know what calls do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

from grpc import aio
from grpc._cython import cygrpc
from grpc.aio._server import Server

ACCEPT_AT_ONCE = 8
"""Calls of one method that are accepted in a turn of the event loop."""
NO_METHOD = "none"
"""Stands for the path of a call of a method that does not exist."""


class Carrier:
    """gRPC's part of a call, which lasts until the client has taken the last of it."""

    task: asyncio.Task[None]

    def cut(self) -> None:
        """End it whatever the client does, once the task that calls this is done, which must be the call's own: what the client has not
        taken is dropped, and it gets CANCELLED."""
        own = asyncio.current_task()
        assert own is not None
        loop = own.get_loop()
        # Later, not here: should the client end the call meanwhile, gRPC would see its task cancelled while that reads the end of `own`.
        own.add_done_callback(lambda _: loop.call_soon(self.task.cancel))


CARRIER: ContextVar[Carrier | None] = ContextVar("CARRIER", default=None)
"""The carrier of the call that a task runs."""


def make_server(interceptors: Sequence[aio.ServerInterceptor], options: Sequence[tuple[str, int]]) -> aio.Server:
    """A server like that of `aio.server`."""
    return cast(aio.Server, _Server(tuple(interceptors), tuple(options)))


class _Server(Server):
    def __init__(self, interceptors: tuple[aio.ServerInterceptor, ...], options: tuple[tuple[str, int], ...]) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, interceptors, options)


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """The methods that it overrides are those that its base class waits with for the next call; here they do so for good."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interceptors: tuple[aio.ServerInterceptor, ...], options: tuple[tuple[str, int], ...]
    ) -> None:
        super().__init__(loop, None, (), interceptors, options, None)
        self._accept_loop = loop
        self._chain = interceptors
        self._methods: dict[str, Any] = {}
        self._carried: set[asyncio.Task[None]] = set()

    def add_registered_method_handlers(self, handlers: Mapping[str, Any]) -> None:
        super().add_registered_method_handlers(handlers)
        self._methods.update(handlers)

    def resolve_handler(self, details: Any) -> Any:
        """Called by grpc: the handler of a method, None if there is none."""
        return self._methods.get(details.method)

    async def _request_registered_call(self, method: bytes) -> None:
        request = super()._request_registered_call
        await self._accept(lambda: request(method), method.decode())

    async def _request_call(self) -> None:
        await self._accept(super()._request_call, NO_METHOD)

    async def _accept(self, request: Callable[[], Awaitable[Any]], method: str) -> None:
        """Take calls until the server shuts down, and `request` raises."""

        async def accept() -> None:
            while True:
                self._begin(await request(), method)

        await asyncio.gather(*(accept() for _ in range(ACCEPT_AT_ONCE)))

    def _begin(self, state: Any, method: str) -> None:
        carrier = Carrier()
        CARRIER.set(carrier)
        work = cygrpc._handle_rpc(method, self, self._chain, state, self._accept_loop, False)
        carrier.task = self._accept_loop.create_task(cygrpc._schedule_rpc_coro(work, state, self._accept_loop, method))
        self._carried.add(carrier.task)
        carrier.task.add_done_callback(self._carried.discard)
