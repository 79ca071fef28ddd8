"""The boundary of a call: who may make it, how it runs, what its exceptions become, and what is recorded of it.

Owns how handlers run; knows nothing of what they do. Every call, whatever its kind, begins here before its first message is read, so
that a stranger's message is never taken in. Streams are driven with the writer API of grpc.aio: a client that goes away then shows as
`CancelledError` at one place, also while a write waits for the client, and the servicer's generator is closed at once rather than when
it is garbage collected.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_status import rpc_status

from aengine.errors import FieldViolation, InvalidRequestError
from aengine.server.auth import Authenticator, common_name
from aengine.server.errors import describe, to_status
from aengine.server.observers import CURRENT_CALL
from aengine.server.records import CallRecord, Observer
from aengine.server.tracing import parse_traceparent
from aengine.server.underway import Call, CallsUnderWay
from aengine.wire import PUSHBACK_KEY

REQUEST_ID_KEY = "x-request-id"
HEALTH_PREFIX = "/grpc.health."
ABORT_SECONDS = 1.0
"""How long the end of a failed call waits for the client to take its status. It is on its way then, and gRPC keeps it."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Context = aio.ServicerContext[Any, Any]
Unary = Callable[[Any, Context], Awaitable[Any]]
Stream = Callable[[Any, Context], AsyncGenerator[Any, None]]
Coder = Callable[[Any], Any]


class CallInterceptor(aio.ServerInterceptor):
    """Wraps all services but health, which load balancers ask without credentials."""

    def __init__(self, authenticator: Authenticator, under_way: CallsUnderWay, observer: Observer, *, with_certificates: bool, debug: bool):
        """`with_certificates`: clients have certificates. `debug`: they are told tracebacks."""
        self._authenticator = authenticator
        self._under_way = under_way
        self._observer = observer
        self._with_certificates = with_certificates
        self._debug = debug
        self._handlers: dict[str, Any] = {}  # only of methods that exist

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        wrapped = self._handlers.get(method)
        if wrapped is None:
            wrapped = await continuation(handler_call_details)
            if wrapped is None:
                return None
            if not method.startswith(HEALTH_PREFIX):
                wrapped = _Method(self, method, wrapped).handler()
            self._handlers[method] = wrapped
        return wrapped

    async def run(self, method: str, context: Context, work: Callable[[Call], Awaitable[Any]]) -> Any:
        """One call, from its headers to its last status. Its record is complete and told before the client learns how it ended."""
        metadata = context.invocation_metadata() or ()
        call = Call(CallRecord(method, context.peer(), _request_id(metadata), _trace_id(metadata)))
        record = call.record
        context.set_trailing_metadata(((REQUEST_ID_KEY, record.request_id),))
        CURRENT_CALL.set(record)
        self._under_way.add(call)
        try:
            certificate = common_name(context.auth_context()) if self._with_certificates else None
            record.principal = await self._authenticator.authorize(method, _values(metadata, "authorization"), certificate)
            response = await work(call)
        except asyncio.CancelledError:
            if call.error is None:
                passed = context.time_remaining() == 0
                self._end(call, grpc.StatusCode.DEADLINE_EXCEEDED if passed else grpc.StatusCode.CANCELLED)
                raise
            error = call.error
        except aio.AbortError:
            self._end(call, context.code() or grpc.StatusCode.UNKNOWN)
            raise
        except aio.BaseError:  # the client went away while a message was on its way to it
            self._end(call, grpc.StatusCode.CANCELLED)
            raise
        except Exception as raised:
            error = raised
        else:
            self._end(call, grpc.StatusCode.OK)
            return response
        finally:
            self._under_way.discard(call)
        await self._abort(call, context, error)

    async def _abort(self, call: Call, context: Context, error: Exception) -> NoReturn:
        record = call.record
        failure = describe(error, answered=record.messages_sent > 0)
        status = rpc_status.to_status(to_status(failure, debug=self._debug))
        metadata = (*(status.trailing_metadata or ()), (REQUEST_ID_KEY, record.request_id))
        if failure.retry_delay is not None:
            metadata += ((PUSHBACK_KEY, str(int(failure.retry_delay.total_seconds() * 1000))),)
        self._end(call, failure.code, failure.reason)
        try:
            await asyncio.wait_for(context.abort(status.code, status.details, metadata), ABORT_SECONDS)
        except asyncio.TimeoutError:
            raise asyncio.CancelledError from error  # which gRPC takes as the end, without a word in the log
        raise AssertionError("abort() raises")

    def _end(self, call: Call, code: grpc.StatusCode, reason: str = "") -> None:
        record = call.record
        record.code = code
        record.reason = reason
        record.seconds = time.monotonic() - record.start
        self._observer.on_call_end(record)


class _Method:
    """How one method is run. A request that is not a stream is read here, after the caller was checked."""

    def __init__(self, interceptor: CallInterceptor, name: str, inner: Any) -> None:
        self._interceptor = interceptor
        self._name = name
        self._inner = inner

    def handler(self) -> Any:
        decode, encode = _decoder(self._inner.request_deserializer), _encoder(self._inner.response_serializer)
        if self._inner.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._answer_stream, decode, encode)
        return grpc.stream_unary_rpc_method_handler(self._answer_once, decode, encode)

    async def _answer_once(self, requests: AsyncIterator[Any], context: Context) -> Any:
        answer: Unary = self._inner.stream_unary if self._inner.request_streaming else self._inner.unary_unary

        async def work(call: Call) -> Any:
            response = await answer(await self._request(requests, context), context)
            call.record.messages_sent = 1
            return response

        return await self._interceptor.run(self._name, context, work)

    async def _answer_stream(self, requests: AsyncIterator[Any], context: Context) -> None:
        answer: Stream = self._inner.stream_stream if self._inner.request_streaming else self._inner.unary_stream

        async def work(call: Call) -> None:
            write, record = context.write, call.record
            async with aclosing(answer(await self._request(requests, context), context)) as responses:
                async for response in responses:  # for every token of every stream: what is added here is paid often
                    if not record.messages_sent:  # apart: while they wait with the first message, gRPC takes no status
                        await context.send_initial_metadata(())
                    call.writing = True
                    await write(response)
                    call.writing = False
                    record.messages_sent += 1

        await self._interceptor.run(self._name, context, work)

    async def _request(self, requests: AsyncIterator[Any], context: Context) -> Any:
        if self._inner.request_streaming:
            return requests
        request = await context.read()
        if request is aio.EOF:  # the client sent none, or one that gRPC has refused and ended the call for
            raise InvalidRequestError((FieldViolation("request", "there is no message"),))
        return request


def _decoder(decode: Coder) -> Coder:
    def read(raw: bytes) -> Any:
        try:
            return decode(raw)
        except DecodeError as error:
            raise InvalidRequestError((FieldViolation("request", "it is not a message of the method's type"),)) from error

    return read


def _encoder(encode: Coder) -> Coder:
    """Servicers may answer with what they have serialised themselves."""

    def write(message: Any) -> bytes:
        raw: bytes = message if type(message) is bytes else encode(message)
        return raw

    return write


def _values(metadata: Any, name: str) -> list[str]:
    return [value for key, value in metadata if key == name]


def _request_id(metadata: Any) -> str:
    """The client's, if it is usable; else one that is drawn."""
    given = _values(metadata, REQUEST_ID_KEY)
    return given[0] if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]) else uuid.uuid4().hex


def _trace_id(metadata: Any) -> str | None:
    given = _values(metadata, "traceparent")
    parent = parse_traceparent(given[0]) if len(given) == 1 else None
    return None if parent is None else parent.trace_id
