"""`grpc.health.v1.Health` with all of its methods: grpcio-health-checking has no `List` for asyncio."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import (  # type: ignore[attr-defined]  # the stubs are older than List
    HealthCheckRequest,
    HealthListRequest,
    HealthListResponse,
)

if TYPE_CHECKING:
    from grpc import aio


class HealthServicer(health.aio.HealthServicer):
    """Tells the health of the services `names`, each of which must be `set` before the first call."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._names = tuple(names)

    async def List(self, request: HealthListRequest, context: aio.ServicerContext[Any, Any]) -> HealthListResponse:
        return HealthListResponse(statuses={name: await self.Check(HealthCheckRequest(service=name), context) for name in self._names})
