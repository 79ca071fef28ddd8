"""The boundary of a call: every exception of a servicer becomes a status here, and every stream is closed here.

Owns how handlers run; knows nothing of what they do. Streams are driven with the writer API of grpc.aio: a client that goes
away then shows as `CancelledError` at one place, also while a write waits for the client, and the servicer's generator is
closed at once rather than when it is garbage collected.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from grpc import aio
from grpc_status import rpc_status

from aengine.server.errors import RETRY_DELAY, to_status

PUSHBACK_KEY = "grpc-retry-pushback-ms"  # read by the retry policy of gRPC clients

Context = aio.ServicerContext[Any, Any]
Unary = Callable[[Any, Context], Awaitable[Any]]
Stream = Callable[[Any, Context], AsyncGenerator[Any, None]]


class CallInterceptor(aio.ServerInterceptor):
    """Wraps the services of this package; health and reflection pass through."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/aengine."):
            return handler
        coding = {"request_deserializer": handler.request_deserializer, "response_serializer": handler.response_serializer}
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_guard_stream(handler.unary_stream), **coding)
        return grpc.unary_unary_rpc_method_handler(_guard_unary(handler.unary_unary), **coding)


def _guard_unary(inner: Unary) -> Any:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await inner(request, context)
        except Exception as error:
            await _abort(context, error, answered=False)

    return call


def _guard_stream(inner: Stream) -> Any:
    async def call(request: Any, context: Context) -> None:
        answered = False
        try:
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    await context.write(response)
                    answered = True
        except Exception as error:
            await _abort(context, error, answered=answered)

    return call


async def _abort(context: Context, error: Exception, *, answered: bool) -> NoReturn:
    status = rpc_status.to_status(to_status(error, answered=answered))
    metadata = tuple(status.trailing_metadata or ())
    if status.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        metadata += ((PUSHBACK_KEY, str(int(RETRY_DELAY.total_seconds() * 1000))),)
    await context.abort(status.code, status.details, metadata)
