"""`AdminService`: what an operator can change while the server runs.

Knows nothing of who may call it: calls that come here were let through.
"""

from __future__ import annotations

from collections.abc import Callable

from grpc import ServicerContext

from aengine.checks import FieldChecks
from aengine.engine.async_engine import AsyncEngine
from aengine.errors import InvalidRequestError
from aengine.server.calls.in_flight import Admission
from aengine.server.generation.convert import read_seconds
from aengine.v1 import admin_service_pb2 as messages
from aengine.v1.admin_service_pb2_grpc import AdminServiceServicer

_CANCELS = {messages.PAUSE_MODE_UNSPECIFIED: False, messages.PAUSE_MODE_KEEP: False, messages.PAUSE_MODE_CANCEL: True}


class AdminServicer(AdminServiceServicer):
    """Operates `engine` and its server, whose generations `admission` counts.

    `drain` begins to shut the server down and returns at once; its argument is the grace in seconds, None for that of the
    server's configuration.
    """

    def __init__(self, engine: AsyncEngine, admission: Admission, drain: Callable[[float | None], None]) -> None:
        self._engine = engine
        self._admission = admission
        self._drain = drain

    async def FlushCache(self, request: messages.FlushCacheRequest, context: ServicerContext) -> messages.FlushCacheResponse:
        return messages.FlushCacheResponse(freed_pages=await self._engine.flush_cache())

    async def PauseGeneration(self, request: messages.PauseGenerationRequest, context: ServicerContext) -> messages.PauseGenerationResponse:
        if request.mode not in _CANCELS:
            names = f"{messages.PAUSE_MODE_KEEP} (PAUSE_MODE_KEEP), {messages.PAUSE_MODE_CANCEL} (PAUSE_MODE_CANCEL)"
            raise InvalidRequestError.of("mode", f"{request.mode} is none of {names}")
        return messages.PauseGenerationResponse(cancelled_requests=await self._engine.pause(cancel=_CANCELS[request.mode]))

    async def ContinueGeneration(
        self, request: messages.ContinueGenerationRequest, context: ServicerContext
    ) -> messages.ContinueGenerationResponse:
        self._engine.unpause()
        return messages.ContinueGenerationResponse()

    async def Drain(self, request: messages.DrainRequest, context: ServicerContext) -> messages.DrainResponse:
        check = FieldChecks()
        grace = read_seconds(request.grace, "grace", check, 0) if request.HasField("grace") else None
        check.finish(InvalidRequestError)
        response = messages.DrainResponse(requests_in_flight=self._admission.in_flight)
        self._drain(grace)
        return response
