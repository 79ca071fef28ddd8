"""`Link`: the channel to the server, with its options and credentials, and the plain calls over it.

Must be made, used and closed in one event loop. Knows the methods of the server, not what a generation is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2_grpc

from aengine.api.errors import ConfigError, EngineStateError
from aengine.client.config import ClientConfig
from aengine.client.failures import Backoff, Failure, read_failure
from aengine.v1.admin_service_pb2_grpc import AdminServiceStub
from aengine.v1.embedding_service_pb2_grpc import EmbeddingServiceStub
from aengine.v1.engine_service_pb2_grpc import EngineServiceStub
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub
from aengine.v1.model_service_pb2_grpc import ModelServiceStub
from aengine.v1.tokenizer_service_pb2_grpc import TokenizerServiceStub

T = TypeVar("T")

UNARY_SECONDS = 30.0
"""The deadline of unary calls that do not wait for the model."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# Core ignores a key that it does not know without a word, so a test compares these with the strings of its binary.
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", 30_000),  # finds a server that is gone, so that no read waits for ever
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # what core heeds; its own is a minute
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A lost server is looked for at once and often; the default waits a second, then up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # All calls go to one server, which alone knows the requests that were sent to it. After a lost connection they go to the first that
    # accepts one, which is the same server if it is still there. Retries are ours: they must not repeat what has begun.
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"pick_first": {}}]})),
)


class Link:
    """The channel to the server of `config`. Made by `open_link`."""

    def __init__(self, config: ClientConfig, channel: aio.Channel) -> None:
        self.config = config
        self.channel = channel
        self.metadata: Sequence[tuple[str, str]] = () if config.token is None else (("authorization", f"Bearer {config.token}"),)
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.generation: Any = GenerationServiceStub(channel)
        self.model: Any = ModelServiceStub(channel)
        self.admin: Any = AdminServiceStub(channel)
        self.engine: Any = EngineServiceStub(channel)
        self.embedding: Any = EmbeddingServiceStub(channel)
        self.tokenizer: Any = TokenizerServiceStub(channel)

    async def ask(self, method: Any, request: Message, seconds: float | None = UNARY_SECONDS) -> Any:
        """A unary call that can be repeated safely, `seconds` each time; None: as long as it takes. Raises `AEngineError`."""
        backoff = Backoff()
        while True:
            try:
                return await result_of(method(request, timeout=seconds, metadata=self.metadata))
            except aio.AioRpcError as error:
                failure = self.failure(error)
            if not failure.temporary or backoff.count >= self.config.max_retries:
                raise failure.error
            await backoff.wait(failure)

    def failure(self, error: aio.AioRpcError) -> Failure:
        return read_failure(error, self.config.address)


async def result_of(awaited: Awaitable[T]) -> T:
    """What gRPC answers. Cancelling the caller cancels the call. Raises `EngineStateError` when the channel is closed.

    It runs in a task of its own because gRPC ends a cancelled call by a CancelledError that it makes itself: a scope of anyio does not know
    that for its own, so the caller would end with it. A closed channel shows as one, too.
    """
    calling = asyncio.ensure_future(awaited)
    try:
        await asyncio.wait({calling})
    finally:
        calling.cancel()
        calling.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else may ask for it any more
    if calling.cancelled():
        raise EngineStateError("the client is closed")
    return calling.result()


async def open_link(config: ClientConfig) -> Link:
    """Does not connect yet. Raises `ConfigError` if a file cannot be read."""
    if config.tls is False:
        return Link(config, aio.insecure_channel(config.address, options=CHANNEL_OPTIONS))
    options = CHANNEL_OPTIONS
    if config.server_name is not None:
        options += (("grpc.ssl_target_name_override", config.server_name), ("grpc.default_authority", config.server_name))
    credentials = await asyncio.to_thread(_credentials, config)
    return Link(config, aio.secure_channel(config.address, credentials, options=options))


def _credentials(config: ClientConfig) -> grpc.ChannelCredentials:
    """Blocks."""
    authorities = None if config.tls is True else _read("tls", str(config.tls))
    if config.client_cert is None or config.client_key is None:
        return grpc.ssl_channel_credentials(authorities)
    return grpc.ssl_channel_credentials(authorities, _read("client_key", config.client_key), _read("client_cert", config.client_cert))


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError.of(field, f"cannot read {path}: {error.strerror}") from error
