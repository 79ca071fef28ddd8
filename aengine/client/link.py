"""How a server fares, followed in the background: `HealthWatch`, whether it reports that it serves, as long as the client lives; and its
load, the messages of WatchLoad as `LoadReport`s. Knows nothing of generations.

What a failed call means to this client: status and details, or an `Error` message -> the exceptions that the engine raises in process.

Owns that mapping and the waits between attempts; does not decide what is retried.

`Link`: the channel to the server, with its options and credentials, and the plain calls over it.

Must be made, used and closed in one event loop. Knows the methods of the server, not what a generation is."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio
import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from aengine.api.dataclass import dataclass
from aengine.api.errors import (
    ERROR_REASONS,
    AEngineError,
    ConfigError,
    ConnectionLostError,
    ContextLengthError,
    EngineStateError,
    FieldError,
    FieldViolation,
    KVCapacityError,
    QueueFullError,
    RequestIdInUseError,
    ServerError,
)
from aengine.api.outputs import KVPage, LoadReport
from aengine.client.client_config import ClientConfig
from aengine.v1.admin_service_pb2 import ExportKvRequest, ImportKvRequest, KvPage
from aengine.v1.admin_service_pb2_grpc import AdminServiceStub
from aengine.v1.embedding_service_pb2_grpc import EmbeddingServiceStub
from aengine.v1.engine_service_pb2 import WatchLoadRequest
from aengine.v1.engine_service_pb2_grpc import EngineServiceStub
from aengine.v1.error_pb2 import Error
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub
from aengine.v1.model_service_pb2_grpc import ModelServiceStub
from aengine.v1.tokenizer_service_pb2_grpc import TokenizerServiceStub
from aengine.wire.names import DOMAIN, PUSHBACK_KEY, field_of, seconds_of
from aengine.wire.response import read_report, write_kv_page

SERVING = health_pb2.HealthCheckResponse.SERVING


class HealthWatch:
    """Follows the health of the server of `link`. Made in a running loop; `stop()` ends it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.serving = False
        self._error: AEngineError | None = None  # why it does not serve, as far as that is known
        self._settled = asyncio.Event()  # it has reported SERVING, or never will
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def wait_serving(self, seconds: float) -> None:
        """Wait until it serves. Raises `EngineStateError`, `ConnectionLostError` or `ServerError` after `seconds`, or at once for what
        time does not change."""
        with anyio.move_on_after(seconds):
            await self._settled.wait()
        if not self.serving:
            raise self._error or self._not_serving()

    async def stop(self) -> None:
        self._task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({self._task})

    def _not_serving(self) -> AEngineError:
        return EngineStateError(f"the server at {self._link.config.address} is not serving")

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            call = self._link.health.Watch(health_pb2.HealthCheckRequest(), metadata=self._link.metadata)
            failure = None
            try:
                while (response := await call.read()) is not aio.EOF:
                    self.serving = response.status == SERVING
                    self._error = None if self.serving else self._not_serving()
                    if self.serving:
                        self._settled.set()
                    backoff.reset()
            except aio.AioRpcError as error:
                failure = self._link.failure(error)
                if failure.code is not grpc.StatusCode.UNAVAILABLE:
                    self._settled.set()
            finally:
                call.cancel()
            self.serving, self._error = False, failure.error if failure is not None else None
            await backoff.wait(failure)


async def watch_load(link: Link, request: WatchLoadRequest) -> AsyncGenerator[LoadReport, None]:
    """Without end; closing it cancels the call. Raises what the failed call means, and `EngineStateError` when the channel is closed."""
    async with aclosing(_responses(link, link.engine.WatchLoad(request, metadata=link.metadata))) as responses:
        async for response in responses:
            yield read_report(response)
    raise ServerError("the server ended the stream of its load", "DATA_LOSS")


async def exported(link: Link, request: ExportKvRequest) -> AsyncGenerator[KvPage, None]:
    """Parts of pages, up to the last one; closing it cancels the call. Raises what `watch_load` raises."""
    async with aclosing(_responses(link, link.admin.ExportKv(request, metadata=link.metadata))) as responses:
        async for response in responses:
            yield response.page


async def _responses(link: Link, call: Any) -> AsyncGenerator[Any, None]:
    """What a server sends, up to the end; closing it cancels the call. Raises what the failed call means."""
    try:
        while (response := await result_of(call.read())) is not aio.EOF:
            yield response
    except aio.AioRpcError as error:
        raise link.failure(error).error from error
    finally:
        call.cancel()


async def give_kv(link: Link, prefix: ExportKvRequest, pages: AsyncIterable[KVPage]) -> int:
    """The number of tokens whose pages the server has taken. Raises what the failed call means, and what iterating `pages` raises."""
    call = link.admin.ImportKv(metadata=link.metadata)
    try:
        with suppress(asyncio.InvalidStateError):  # the call has ended; why, awaiting it tells
            await result_of(call.write(ImportKvRequest(prefix=prefix)))
            async for page in pages:
                for part in write_kv_page(page):
                    await result_of(call.write(ImportKvRequest(page=part)))
            await result_of(call.done_writing())
        return int((await result_of(call)).num_tokens)
    except aio.AioRpcError as error:
        raise link.failure(error).error from error
    finally:
        call.cancel()


FIRST_BACKOFF = 0.1  # seconds; doubled for each attempt
LONGEST_BACKOFF = 2.0
LONGEST_PUSHBACK = 30.0  # the client does not wait longer than this

_DETAILS_KEY = "grpc-status-details-bin"
_KINDS: Mapping[str, type[AEngineError]] = {
    **{reason: kind for kind, reason in ERROR_REASONS.items()},
    "TOO_MANY_CALLS": QueueFullError,
    "DRAINING": EngineStateError,
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Failure:
    """A call to a server that failed."""

    error: AEngineError  # what to raise
    code: grpc.StatusCode
    pushback: float | None  # seconds after which the server asks to be retried; negative: not at all

    @property
    def temporary(self) -> bool:
        """Whether the same call may succeed soon, and has done nothing yet if it returned nothing."""
        return self.code is grpc.StatusCode.UNAVAILABLE and (self.pushback is None or 0 <= self.pushback <= LONGEST_PUSHBACK)


class Backoff:
    """The waits between the attempts of one call."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, after an attempt that succeeded."""
        self.count = 0  # waits so far
        self._since: float | None = None  # of the first wait, on time.monotonic

    @property
    def seconds(self) -> float:
        """How long ago the first wait began."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    async def wait(self, failure: Failure | None) -> None:
        self._since = self._since or time.monotonic()
        await asyncio.sleep(self.next_seconds(failure))

    def next_seconds(self, failure: Failure | None) -> float:
        """Return how many seconds to wait: a little longer than the server asks for, else longer each time. A random factor keeps
        clients from coming back together."""
        own = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(self.count, 10)) * random.uniform(0.5, 1.5)
        self.count += 1
        pushback = failure.pushback if failure is not None else None
        return own if pushback is None or pushback < 0 else pushback * random.uniform(1.0, 1.2)


def read_failure(error: aio.AioRpcError, address: str) -> Failure:
    """`address` is the server's, for the message where it could not be reached."""
    metadata = dict(error.trailing_metadata() or ())
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    with suppress(DecodeError):  # details that something between here and the server wrote: then the status itself is all there is
        for detail in status_pb2.Status.FromString(metadata.get(_DETAILS_KEY, b"")).details:
            for known in (info, bad, retry):
                detail.Unpack(known)
    if info.domain != DOMAIN:
        info.Clear()
    pushback = seconds_of(retry.retry_delay) if retry.HasField("retry_delay") else None
    if PUSHBACK_KEY in metadata:  # which is gRPC's own, and wins; where it is not a number, there must be no further attempt
        try:
            pushback = int(str(metadata[PUSHBACK_KEY])) / 1000
        except ValueError:
            pushback = -1.0
    fields = [(one.field, one.description) for one in bad.field_violations]
    return Failure(_exception(error.code(), error.details(), info.reason, info.metadata, fields, address), error.code(), pushback)


def read_error(message: Error, address: str) -> AEngineError:
    """The exception that a call of its own would have ended with."""
    code = _CODES.get(message.code, grpc.StatusCode.UNKNOWN)
    facts = {**message.info, "incident_id": message.incident_id} if message.incident_id else message.info
    fields = [(one.field, one.description) for one in message.field_violations]
    return _exception(code, message.message, message.reason, facts, fields, address)


def _exception(
    code: grpc.StatusCode, text: str | None, reason: str, facts: Mapping[str, str], fields: Iterable[tuple[str, str]], address: str
) -> AEngineError:
    """`fields`: their paths in the request message, and what is wrong with them."""
    text, kind = text or "no details", _KINDS.get(reason)
    violations = tuple(FieldViolation(field_of(path), description) for path, description in fields)
    if kind is not None and issubclass(kind, ContextLengthError | KVCapacityError):
        limit, got = facts.get("limit", ""), facts.get("got", "")
        if limit.isdecimal() and got.isdecimal():
            return kind(violations or [FieldViolation("prompt", text)], int(limit), int(got))
    elif kind is not None and issubclass(kind, FieldError):
        return kind(violations or [FieldViolation("request_id" if kind is RequestIdInUseError else "request", text)])
    elif kind is not None:
        return kind(text)
    if code is grpc.StatusCode.UNAVAILABLE and not reason:
        return ConnectionLostError(f"no connection to {address}: {text}")
    return ServerError(f"{code.name}: {text}", code.name, reason, facts.get("incident_id"))


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


async def every(method: Any, request: Message, **options: Any) -> list[Any]:
    """All that a streaming call brings."""
    return [message async for message in method(request, **options)]


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
