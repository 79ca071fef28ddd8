"""The gRPC side of a call's life, which `CallLife` has: how its handler is run, and how its error reaches the client.

Knows nothing of what handlers do. Every call, whatever its kind, begins here before its first message is read, so
that a stranger's message is never taken in. All are driven with the reader and writer API of grpc.aio: a client that goes away then shows
as `CancelledError` at one place, also while a write waits for the client, the servicer's generator is closed at once rather than when it
is garbage collected.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_status import rpc_status

from aengine.api.errors import InvalidRequestError
from aengine.server.config.options import ServerConfig
from aengine.server.core.auth import certificate_name
from aengine.server.core.calls_in_flight import REQUEST_ID_KEY, Call
from aengine.server.core.core import CallLife
from aengine.server.core.decoding import Decoding
from aengine.server.core.errors import ServiceError
from aengine.server.grpc.status import check_fields, code_of, size_of, to_status, values_of
from aengine.wire.names import PUSHBACK_KEY

ADMIN_PREFIX = "/aengine.v1.AdminService/"
HEALTH_PREFIX = "/grpc.health."
ABORT_SECONDS = 1.0
"""How long the status of a failed call may take to reach a client when nothing is in its way, or when the client has had its time."""
_METADATA: ContextVar[Any] = ContextVar("_METADATA")  # of the call that a task runs: gRPC makes a new copy at each access

Context = aio.ServicerContext[Any, Any]
Work = Callable[[Call, AsyncIterator[Any], Context], Awaitable[None]]
Coder = Callable[[Any], Any]


NO_METHOD = "none"
"""Stands for the path of a call of a method that does not exist."""


class Carrier:
    """gRPC's part of a call, which lasts until the client has taken the last of it."""

    task: asyncio.Task[None] | None = None  # until it is done: its context holds this

    def cut(self) -> None:
        """End it whatever the client does, once the task that calls this is done, which must be the call's own: what the client has not
        taken is dropped, and it gets CANCELLED."""
        own = asyncio.current_task()
        assert own is not None
        loop = own.get_loop()
        # Later, not here: should the client end the call meanwhile, gRPC would see its task cancelled while that reads the end of `own`.
        own.add_done_callback(lambda _: loop.call_soon(self._cancel))

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


CARRIER: ContextVar[Carrier | None] = ContextVar("CARRIER", default=None)
"""The carrier of the call that a task runs."""


class CallInterceptor(aio.ServerInterceptor):
    """Wraps all methods. Those of health, which load balancers ask without credentials, are neither recorded nor for some callers only."""

    def __init__(self, config: ServerConfig, life: CallLife, decoding: Decoding) -> None:
        self._config = config
        self._life = life
        self._decoding = decoding
        self._handlers: dict[str, Any] = {}  # only of methods that exist
        self._no_handler = self._handler(NO_METHOD, _refuse)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method = handler_call_details.method
        _METADATA.set(handler_call_details.invocation_metadata or ())
        handler = self._handlers.get(method)
        if handler is None:
            inner = await continuation(handler_call_details)
            if inner is None:
                return self._no_handler
            encode = _encoder(inner.response_serializer, self._config.max_message_bytes)
            decode = _decoder(inner.request_deserializer)
            work = _work_of(inner, self._decoding, decode, encode)
            handler = self._handler(method, work, decode if inner.request_streaming else None, encode)
            self._handlers[method] = handler
        return handler

    def _handler(self, method: str, work: Work, decode: Coder | None = None, encode: Coder | None = None) -> Any:
        async def run(requests: AsyncIterator[Any], context: Context) -> None:
            await self._run(method, requests, context, work)

        return grpc.stream_stream_rpc_method_handler(run, decode, encode)

    async def _run(self, method: str, requests: AsyncIterator[Any], context: Context, work: Work) -> None:
        """One call, from its headers to its last status."""
        metadata = _METADATA.get()
        num_bytes = size_of(metadata)
        header = functools.partial(values_of, metadata)
        call = self._life.begin(method, context.peer(), header, num_bytes, is_apart=method.startswith(HEALTH_PREFIX))
        context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
        with self._life.hold(call):
            try:
                self._life.admit(call, num_bytes)
                if not call.is_apart:
                    certificate = certificate_name(context.auth_context()) if self._config.tls_client_ca else None
                    administrates = method.startswith(ADMIN_PREFIX)
                    await self._life.authorize(call, header("authorization"), certificate, administrates=administrates)
                await work(call, requests, context)
            except asyncio.CancelledError:
                if call.error is None:
                    passed = context.time_remaining() == 0
                    self._life.end_call(call, "DEADLINE_EXCEEDED" if passed else "CANCELLED")
                    raise
                error = call.error
            except aio.AbortError:
                self._life.end_call(call, (context.code() or grpc.StatusCode.UNKNOWN).name)
                raise
            except aio.BaseError as gone:  # while a message was on its way to the client
                self._life.end_call(call, "CANCELLED")
                _cut(gone)
            except Exception as raised:
                error = raised
            else:
                self._life.end_call(call, "OK")
                return
            await self._abort(call, context, error)

    async def _abort(self, call: Call, context: Context, error: Exception) -> NoReturn:
        answered = call.messages_sent > 0 or call.waits == "READER_STALLED"  # the client may have what is on its way to it
        failure = self._life.fail(error, answered=answered)
        status = rpc_status.to_status(to_status(failure, debug=self._config.debug_errors))
        metadata = (*(status.trailing_metadata or ()), (REQUEST_ID_KEY, call.request_id))
        if failure.retry_delay is not None:
            metadata += ((PUSHBACK_KEY, str(int(failure.retry_delay.total_seconds() * 1000))),)
        self._life.end_call(call, code_of(failure).name, failure.reason)
        if not call.mute:
            # In HTTP/2 the status comes after all messages, so where the client reads slowly it waits behind them.
            waits_behind = answered and failure.reason != "READER_STALLED"
            seconds = self._config.stall_seconds if waits_behind else ABORT_SECONDS
            try:
                await asyncio.wait_for(context.abort(status.code, status.details, metadata), seconds)
            except aio.AbortError as aborted:
                _forget(aborted)
                raise
            except (asyncio.TimeoutError, aio.BaseError):
                pass  # the client does not take the status either, or went away
        _cut(error)


def _work_of(inner: Any, decoding: Decoding, decode: Coder, encode: Coder) -> Work:
    """The work of a call of the method with the handler `inner`. A request that is no stream is read here, after the caller was checked."""
    serve = inner.unary_unary or inner.unary_stream or inner.stream_unary or inner.stream_stream

    async def read(call: Call, requests: AsyncIterator[Any], context: Context) -> Any:
        if inner.request_streaming:
            return requests
        call.waits = "SENDER_STALLED"
        raw = await context.read()
        call.waits = None
        if raw is aio.EOF:  # the client sent none, or one that gRPC has refused and ended the call for
            raise InvalidRequestError.of("request", "there is no message")
        await call.take_room(decoding, len(raw))
        return decode(raw)

    async def respond(call: Call, requests: AsyncIterator[Any], context: Context) -> None:
        message = encode(await serve(await read(call, requests, context), context))
        call.waits, call.mute = "READER_STALLED", True  # the headers go with it, which saves a turn
        await context.write(message)
        call.messages_sent = 1

    async def stream(call: Call, requests: AsyncIterator[Any], context: Context) -> None:
        write = context.write
        async with aclosing(serve(await read(call, requests, context), context)) as responses:
            async for response in responses:  # for every token of every stream: what is added here is paid often
                if not call.messages_sent:  # apart: while they wait with a message, the call could be sent no status
                    await _send_headers(call, context)
                call.waits = "READER_STALLED"
                await write(response)
                call.waits = None
                call.messages_sent += 1

    return stream if inner.response_streaming else respond


async def _refuse(call: Call, requests: AsyncIterator[Any], context: Context) -> NoReturn:
    raise ServiceError("METHOD_NOT_FOUND", "the server has no such method")


async def _send_headers(call: Call, context: Context) -> None:
    call.answered()
    call.waits, call.mute = "READER_STALLED", True
    await context.send_initial_metadata(())
    call.waits, call.mute = None, False
    if call.error is not None:
        raise call.error


def _cut(error: Exception) -> NoReturn:
    """End the call without a status. gRPC has not a word in the log for a cancellation."""
    carrier = CARRIER.get()
    if carrier is not None:
        carrier.cut()
    raise asyncio.CancelledError from error


def _forget(aborted: aio.AbortError) -> None:
    """gRPC's part of the call holds it, and its traceback holds that: without this, until garbage is collected."""
    own = asyncio.current_task()
    assert own is not None
    own.add_done_callback(lambda _: aborted.with_traceback(None))


def _decoder(decode: Coder) -> Coder:
    """`decode`: the `FromString` of a message."""
    kind = decode.__self__.DESCRIPTOR  # type: ignore[attr-defined]

    def read(raw: bytes) -> Any:
        check_fields(raw, kind)
        try:
            return decode(raw)
        except DecodeError as error:
            raise InvalidRequestError.of("request", "it is not a message of the method's type") from error

    return read


def _encoder(encode: Coder, max_bytes: int) -> Coder:
    """Servicers may return what they have serialised themselves."""

    def write(message: Any) -> bytes:
        raw: bytes = message if type(message) is bytes else encode(message)
        if len(raw) > max_bytes:
            raise ServiceError("ANSWER_TOO_LARGE", f"the answer takes {len(raw)} bytes in one message, which are more than {max_bytes}")
        return raw

    return write
