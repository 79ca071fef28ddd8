"""The server as a whole: services, health, reflection, channel options, and the order of starting and stopping.

Owns the life of the port. Does not own the engine: it is started and closed by the caller, so that a server can be put on
an engine that also serves others in the same process.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from aengine.errors import AEngineError
from aengine.server.admission import Admission
from aengine.server.calls import CallInterceptor
from aengine.server.generation import GenerationServicer
from aengine.server.model import ModelServicer
from aengine.v1 import generation_service_pb2, model_service_pb2
from aengine.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server
from aengine.v1.model_service_pb2_grpc import add_ModelServiceServicer_to_server

if TYPE_CHECKING:
    from aengine.engine.async_engine import AsyncEngine

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# Core ignores a key that it does not know without a word, so a test compares these with the strings of its binary.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),  # or a second server shares the port silently
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    # Clients ping during long silent calls; the default floor of 5 minutes answers that with GOAWAY too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),  # finds dead peers, whose requests are then cancelled
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_concurrent_streams", 1024),  # per connection
)

SERVICES: tuple[str, ...] = (
    generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    model_service_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)

# Health watchers never end by themselves; this long the last statuses may take to reach the clients.
FLUSH_SECONDS = 0.5


class BindError(AEngineError):
    """The address cannot be bound."""


class Server:
    """Serves `engine` on one address, in plain text. Must be made, used and closed in one event loop.

    `start()` opens the port with health NOT_SERVING; `set_serving()` follows once the engine is started. `drain()` refuses new
    generations and waits for those under way; `stop()` ends what is left with UNAVAILABLE and closes the port.
    """

    def __init__(self, engine: AsyncEngine, *, host: str = "127.0.0.1", port: int = 50051) -> None:
        self._host = f"[{host}]" if ":" in host else host
        self._port = port
        self._admission = Admission()
        self._health = health.aio.HealthServicer()
        self._server = aio.server(interceptors=(CallInterceptor(),), options=CHANNEL_OPTIONS)
        add_GenerationServiceServicer_to_server(GenerationServicer(engine, self._admission), self._server)
        add_ModelServiceServicer_to_server(ModelServicer(engine), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    @property
    def address(self) -> str:
        """host:port; after `start()` with the port that the system picked for 0."""
        return f"{self._host}:{self._port}"

    @property
    def in_flight(self) -> int:
        """Generations under way."""
        return self._admission.in_flight

    async def start(self) -> None:
        """Open the port. Raises `BindError`."""
        try:
            self._port = self._server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise BindError(f"cannot listen on {self.address}: the address is in use or not one of this machine") from error
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool = True) -> None:
        """Tell health watchers whether the engine can take requests. Ignored once draining."""
        response = health_pb2.HealthCheckResponse
        for name in ("", *SERVICES):
            await self._health.set(name, response.SERVING if serving else response.NOT_SERVING)

    async def drain(self, seconds: float) -> bool:
        """Refuse new generations and wait up to `seconds` for those under way; returns whether all of them finished."""
        await self._health.enter_graceful_shutdown()
        self._admission.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._admission.wait_idle(), seconds)
        return not self._admission.in_flight

    async def stop(self) -> None:
        """Close the port; calls under way end with UNAVAILABLE."""
        await self._server.stop(None if self._admission.in_flight else FLUSH_SECONDS)
