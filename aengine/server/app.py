"""The server as a whole: services, health, reflection, channel options, and the order of starting and stopping.

Owns the life of the port. Does not own the engine: it is started and closed by the caller, so that a server can be put on
an engine that also serves others in the same process.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from aengine.engine.async_engine import AsyncEngine
from aengine.server.calls.auth import Authenticator
from aengine.server.calls.errors import draining
from aengine.server.calls.in_flight import Admission, CallsInFlight
from aengine.server.calls.interceptor import CallInterceptor
from aengine.server.calls.port import BindError, address_of, make_server
from aengine.server.calls.records import Observers
from aengine.server.calls.tls import Certificates
from aengine.server.config.options import ServerConfig
from aengine.server.generation.backend import Backend
from aengine.server.generation.resume import ResumableStreams
from aengine.server.services.admin import AdminServicer
from aengine.server.services.engine_info import EngineServicer, ModelServicer
from aengine.server.services.generation import GenerationServicer
from aengine.server.services.health import HealthServicer
from aengine.server.services.reflection import add_reflection_to_server, service_names
from aengine.server.services.tokenizer import TokenizerServicer
from aengine.server.telemetry.exposition import serve_metrics
from aengine.server.telemetry.logs import log_call
from aengine.server.telemetry.metrics import SCHEMA, Metrics
from aengine.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from aengine.v1.engine_service_pb2_grpc import add_EngineServiceServicer_to_server
from aengine.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server
from aengine.v1.model_service_pb2_grpc import add_ModelServiceServicer_to_server
from aengine.v1.tokenizer_service_pb2_grpc import add_TokenizerServiceServicer_to_server

SERVICES: tuple[str, ...] = tuple(name for module in SCHEMA for name in service_names(module))

# Health watchers never end by themselves; this long the last statuses may take to reach the clients.
FLUSH_SECONDS = 0.5

# A client may ask again as soon as it has its response. Refused calls end with UNAVAILABLE, but those that reach gRPC while it shuts
# down with CANCELLED; so a server that has become idle goes on refusing for this long.
REFUSE_SECONDS = 0.1

MAX_PENDING_CALLS = 64 * 1024
"""Most calls of each method that wait to be accepted."""


class Server:
    """Serves `engine` on one address. Must be made, used and closed in one event loop.

    `start()` opens the port with health NOT_SERVING; `set_serving()` follows once the engine is started. `drain()` refuses new
    generations and waits for those that run; `stop()` ends what is left with UNAVAILABLE and closes the port.
    """

    def __init__(self, engine: AsyncEngine, config: ServerConfig | None = None, **overrides: Any) -> None:
        """`overrides` are fields of `ServerConfig`. Raises `ConfigError`."""
        self.config = ServerConfig.of(config, **overrides)
        self._port = self.config.port
        self._admission = Admission()
        self.observers = Observers()  # of calls and generations
        if self.config.access_log:
            self.observers.on_call_end.append(log_call)
        self.metrics_address: str | None = None  # host:port of the metrics, once started; None without them
        self._running = AsyncExitStack()  # what `stop()` ends beside the port
        self._authenticator = Authenticator(self.config)
        self._calls = CallsInFlight(self.config.max_calls, self.config.stall_seconds)
        self._drain_grace: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        interceptor = CallInterceptor(self.config, self._authenticator, self._calls, self.observers)
        self._server = make_server((interceptor,), channel_options(self.config))
        self._engine, server = engine, self._server
        backend = Backend(engine, self._admission, self.observers, self.config.max_message_bytes)
        self._resumables = ResumableStreams(backend)  # which outlive their calls
        add_GenerationServiceServicer_to_server(GenerationServicer(backend, self._resumables), server)
        add_ModelServiceServicer_to_server(ModelServicer(engine), server)
        self._tokenizer = TokenizerServicer(engine)
        add_TokenizerServiceServicer_to_server(self._tokenizer, server)
        engine_info = EngineServicer(engine, self._admission, max_message_bytes=self.config.max_message_bytes)
        add_EngineServiceServicer_to_server(engine_info, server)
        admin = AdminServicer(engine, self._admission, self.request_drain, self.config.weights_roots)
        add_AdminServiceServicer_to_server(admin, server)
        self._health = HealthServicer(("", *SERVICES))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection_to_server((*SCHEMA, health_pb2), server)

    @property
    def address(self) -> str:
        """host:port; after `start()` with the port that the system picked for 0."""
        return address_of(self.config.host, self._port)

    @property
    def in_flight(self) -> int:
        """Generations that have not ended."""
        return self._admission.in_flight

    async def start(self) -> None:
        """Open the port. Raises `BindError`, or `ConfigError` for files that cannot be used."""
        try:
            await asyncio.to_thread(self._authenticator.load)
            credentials = await asyncio.to_thread(Certificates(self.config).credentials) if self.config.tls else None
            if self.config.metrics_port is not None:
                metrics = Metrics(self._engine, self._admission, self._calls)
                server = serve_metrics(metrics, self.config.metrics_host, self.config.metrics_port)
                self.metrics_address = await self._running.enter_async_context(server)
                self.observers.on_call_end.append(metrics.on_call_end)
                self.observers.on_generation_end.append(metrics.on_generation_end)
            try:
                if credentials is None:
                    self._port = self._server.add_insecure_port(self.address)
                else:
                    self._port = self._server.add_secure_port(self.address, credentials)
            except RuntimeError as error:
                raise BindError(f"cannot listen on {self.address}: the address is in use or not one of this machine") from error
            await self._server.start()
        except BaseException:
            await self.stop()
            raise
        watching = asyncio.create_task(self._calls.watch(), name="aengine-stalled-calls")
        self._running.callback(watching.cancel)

    async def set_serving(self, serving: bool = True) -> None:
        """Notify health watchers whether the engine can take requests. Ignored once draining."""
        self._health.set_serving(serving)

    def request_drain(self, grace: float | None = None) -> None:
        """Ask whoever runs the server to shut it down, as a signal does: `wait_drain_requested()` returns. `grace`: how long requests
        may still run, in seconds; None: the configuration's `drain_seconds`. Only the first call counts."""
        if not self._drain_grace.done():
            self._drain_grace.set_result(self.config.drain_seconds if grace is None else grace)

    async def wait_drain_requested(self) -> float:
        """Wait for `request_drain()`; returns the grace in seconds."""
        return await asyncio.shield(self._drain_grace)

    async def drain(self, seconds: float | None = None) -> bool:
        """Shut down gently; returns whether all generations finished.

        Notifies health watchers, waits for `drain_delay`, refuses new generations, and waits up to `seconds` for those that run. None:
        the configuration's `drain_seconds`.
        """
        self._health.shut_down()
        await asyncio.sleep(self.config.drain_delay)
        self._admission.closed = True
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._admission.idle.wait(), self.config.drain_seconds if seconds is None else seconds)
            await asyncio.sleep(REFUSE_SECONDS)
        return not self._admission.in_flight

    async def stop(self, reason: Exception | None = None) -> None:
        """Close the port; calls in flight end with `reason`. None: UNAVAILABLE (DRAINING)."""
        self._admission.closed = True
        if len(self._calls):
            await self._calls.end_all(reason or draining(), FLUSH_SECONDS)
            await asyncio.sleep(REFUSE_SECONDS)
        await self._server.stop(FLUSH_SECONDS)
        await self._resumables.aclose()
        self._tokenizer.close()
        await self._running.aclose()


def channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    """The options of gRPC. Core ignores a key that it does not know without a word, so a test compares them with the strings of its
    binary."""
    options: list[tuple[str, int | None]] = [
        ("grpc.so_reuseport", 0),  # or a second server shares the port silently
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_metadata_size", config.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", config.max_metadata_bytes),  # between the two core refuses at random
        # Clients ping during long silent calls; core's own floor of 5 minutes responds with GOAWAY too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(config.min_ping_interval)),
        ("grpc.http2.max_ping_strikes", config.max_ping_strikes),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", _milliseconds(config.keepalive_time)),  # finds dead peers, whose requests are then cancelled
        ("grpc.keepalive_timeout_ms", _milliseconds(config.keepalive_timeout)),
        ("grpc.http2.ping_timeout_ms", _milliseconds(config.keepalive_timeout)),  # what core heeds; its own is a minute
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),  # per connection
        # Beyond these core cancels calls that nobody has seen yet, whose ever they are; so they are far above what is accepted and refused.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.max_connection_age_ms", _milliseconds(config.max_connection_age)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(config.max_connection_age_grace)),
    ]
    return [(name, value) for name, value in options if value is not None]


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else min(max(int(seconds * 1000), 1), 2**31 - 1)
