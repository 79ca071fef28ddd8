"""gRPC's server for asyncio, but for how calls are accepted.

`grpc.aio` accepts one call of each method in a turn of the event loop, dies of a path that is not UTF-8, with every call that it serves,
and cannot end a call whose client takes nothing. Here several are accepted at a time, paths of methods that do not exist are not looked at,
and a `Carrier` ends its call.

Owns all that is used of grpc's private modules, in the releases that `make_server` uses it with. Does not know what calls do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from grpc import aio
from grpc._cython import cygrpc
from grpc.aio._server import Server

from aengine.server.grpc.interceptor import CARRIER, NO_METHOD, Carrier

ACCEPT_AT_ONCE = 8
"""Calls of one method that are accepted in a turn of the event loop."""


class PrivateServer(Server):
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

        def forget(task: asyncio.Task[None]) -> None:
            self._carried.discard(task)
            carrier.task = None

        carrier.task.add_done_callback(forget)
