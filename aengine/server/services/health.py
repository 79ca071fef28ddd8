"""`grpc.health.v1.Health`: whether this server can take requests. All its services can, or none of them.

The servicer for asyncio of grpcio-health-checking has no `List`, and holds a lock while it writes: a watcher that does not read would keep
the server from notifying anyone else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1.health_pb2 import (  # type: ignore[attr-defined]  # the stubs are older than List
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)
from grpc_health.v1.health_pb2_grpc import HealthServicer as Base

from aengine.server.core.errors import clip


class HealthServicer(Base):
    """The health of the services `names`. NOT_SERVING at first. To be used from one event loop."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._serving = False
        self._final = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Notify all who watch. Ignored after `shut_down`."""
        if serving != self._serving and not self._final:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    def shut_down(self) -> None:
        """NOT_SERVING, for good."""
        self.set_serving(False)
        self._final = True

    async def Check(self, request: HealthCheckRequest, context: aio.ServicerContext[Any, Any]) -> HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {clip(request.service)!r} here")
        return self._response()

    async def List(self, request: HealthListRequest, context: aio.ServicerContext[Any, Any]) -> HealthListResponse:
        return HealthListResponse(statuses=dict.fromkeys(self._names, self._response()))

    async def Watch(self, request: HealthCheckRequest, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[HealthCheckResponse]:
        known = request.service in self._names
        sent: HealthCheckResponse | None = None
        while True:
            changed = self._changed
            response = self._response() if known else HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
            if response != sent:
                yield response
                sent = response
            else:
                await changed.wait()

    def _response(self) -> HealthCheckResponse:
        return HealthCheckResponse(status=HealthCheckResponse.SERVING if self._serving else HealthCheckResponse.NOT_SERVING)
