"""The gRPC door: services, health, reflection, channel options, and the life of their port.

gRPC's server for asyncio, but for how calls are accepted.

`grpc.aio` accepts one call of each method in a turn of the event loop, dies of a path that is not UTF-8, with every call that it serves,
and cannot end a call whose client takes nothing. Here several are accepted at a time, paths of methods that do not exist are not looked at,
and a `Carrier` ends its call.

Owns all that is used of grpc's private modules, in the releases that `make_server` uses it with. Does not know what calls do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import grpc
from grpc import aio
from grpc._cython import cygrpc
from grpc.aio._server import Server
from grpc_health.v1 import health_pb2, health_pb2_grpc

from aengine.server.config.options import ServerConfig
from aengine.server.core.auth import CertificateFiles, Loaded
from aengine.server.core.core import BindError, Core, address_of
from aengine.server.core.resume import ResumableStreams
from aengine.server.grpc.generation.batch import StoredBatches
from aengine.server.grpc.interceptor import CARRIER, NO_METHOD, CallInterceptor, Carrier
from aengine.server.grpc.services.admin import AdminServicer
from aengine.server.grpc.services.engine_info import EngineServicer, HealthServicer, ModelServicer, add_reflection_to_server, service_names
from aengine.server.grpc.services.generation import GenerationServicer
from aengine.server.grpc.services.text import EmbeddingServicer, TokenizerServicer
from aengine.v1 import (
    admin_service_pb2,
    embedding_service_pb2,
    engine_service_pb2,
    generation_service_pb2,
    model_service_pb2,
    tokenizer_service_pb2,
)
from aengine.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from aengine.v1.embedding_service_pb2_grpc import add_EmbeddingServiceServicer_to_server
from aengine.v1.engine_service_pb2_grpc import add_EngineServiceServicer_to_server
from aengine.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server
from aengine.v1.model_service_pb2_grpc import add_ModelServiceServicer_to_server
from aengine.v1.tokenizer_service_pb2_grpc import add_TokenizerServiceServicer_to_server

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


SCHEMA = (
    admin_service_pb2,
    embedding_service_pb2,
    engine_service_pb2,
    generation_service_pb2,
    model_service_pb2,
    tokenizer_service_pb2,
)
SERVICES: tuple[str, ...] = tuple(name for module in SCHEMA for name in service_names(module))
METHODS: Mapping[str, str] = {
    f"/{service.full_name}/{method.name}": f"{service.name}/{method.name}"
    for file in SCHEMA
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""The schema's methods, as gRPC calls them, and their labels in metrics."""

# Health watchers never end by themselves; this long the last statuses may take to reach the clients.
FLUSH_SECONDS = 0.5

MAX_PENDING_CALLS = 64 * 1024
"""Most calls of each method that wait to be accepted."""


KNOWN_RELEASES = "1.85."
"""What the version of grpcio begins with where its private server is used: the tests have passed with it."""
logger = logging.getLogger(__name__)


def make_server(interceptors: Sequence[aio.ServerInterceptor], options: Sequence[tuple[str, int]]) -> aio.Server:
    """A server of calls that the last of `interceptors` may `cut`, where the release of grpcio is one that `PrivateServer` is for; with
    any other, that of `aio.server`, which a line in the log tells."""
    if grpc.__version__.startswith(KNOWN_RELEASES):
        from aengine.server.grpc.door import PrivateServer

        return cast(aio.Server, PrivateServer(tuple(interceptors), tuple(options)))
    logger.warning(
        "grpcio %s is not one of %s*, so calls are served by its public server: it accepts one call of a method at a time, a client that "
        "takes nothing keeps its call until its connection ends, and a path that is not UTF-8 may end the server",
        *(grpc.__version__, KNOWN_RELEASES),
    )
    return aio.server(interceptors=tuple(interceptors), options=tuple(options))


class GrpcFrontend:
    """Serves `core` over gRPC. `request_drain`: asks whoever runs the server to shut it down, within so many seconds."""

    methods = METHODS
    ok = "OK"  # the code of a call that succeeded

    def __init__(self, core: Core, resumables: ResumableStreams, request_drain: Callable[[float | None], None]) -> None:
        config, engine, backend = core.config, core.engine, core.backend
        assert config.port is not None
        self._config = config
        self._port = config.port
        interceptor = CallInterceptor(config, core.life, core.decoding)
        self._server = server = make_server((interceptor,), channel_options(config))
        self._resumables = resumables
        self._batches = StoredBatches(core.journal, backend)
        add_GenerationServiceServicer_to_server(GenerationServicer(backend, resumables, self._batches), server)
        add_ModelServiceServicer_to_server(ModelServicer(backend), server)
        add_EmbeddingServiceServicer_to_server(EmbeddingServicer(backend), server)
        add_TokenizerServiceServicer_to_server(TokenizerServicer(core), server)
        add_EngineServiceServicer_to_server(EngineServicer(backend), server)
        add_AdminServiceServicer_to_server(AdminServicer(engine, core.admission, request_drain, config.weights_roots), server)
        self._health = HealthServicer(("", *SERVICES))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection_to_server((*SCHEMA, health_pb2), server)

    @property
    def address(self) -> str:
        """host:port; after `start()` with the port that the system picked for 0."""
        return address_of(self._config.host, self._port)

    async def start(self) -> None:
        """Open the port. Raises `BindError`, or `ConfigError` for files that cannot be used."""
        credentials = await asyncio.to_thread(server_credentials, self._config) if self._config.tls else None
        try:
            if credentials is None:
                self._port = self._server.add_insecure_port(self.address)
            else:
                self._port = self._server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise BindError(f"cannot listen on {self.address}: the address is in use or not one of this machine") from error
        await self._server.start()

    def set_serving(self, serving: bool) -> None:
        """Set the health of all services, and notify those who watch it."""
        self._health.set_serving(serving)
        if serving:
            self._batches.batches.resume()

    def announce_drain(self) -> None:
        """Notify health watchers that it does not serve any more."""
        self._health.shut_down()

    async def stop(self) -> None:
        """Close the port; no call of a client is under way."""
        await self._server.stop(FLUSH_SECONDS)
        await self._resumables.aclose()
        await self._batches.batches.aclose()


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


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials:
    """Connections keep the certificate that they began with. Raises `ConfigError` naming the option whose file is not usable. Blocks."""
    files = CertificateFiles(config)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls this for each handshake, in a thread of its own: a new configuration, None if nothing changed. Must not raise."""
        fresh = files.load_if_changed()
        return None if fresh is None else _configuration(fresh)

    first = _configuration(files.load())
    return grpc.dynamic_ssl_server_credentials(first, fetch, files.needs_client)  # type: ignore[arg-type]


def _configuration(loaded: Loaded) -> grpc.ServerCertificateConfiguration:
    content = loaded.content
    return grpc.ssl_server_certificate_configuration([(content["tls_key"], content["tls_cert"])], content.get("tls_client_ca"))
