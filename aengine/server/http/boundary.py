"""The boundary of an HTTP request: who may make it, how its handler runs, what its exceptions become, and what is recorded of it.

Owns how handlers run; knows nothing of what they do. A client that goes away shows as `CancelledError` at one place, and nothing waits for
a client for longer than `CallsInFlight` lets it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aengine.server.core.core import Core
from aengine.server.core.errors import ServiceError, clip, describe
from aengine.server.core.ids import REQUEST_ID_KEY, request_id_of, trace_id_of
from aengine.server.core.in_flight import Call
from aengine.server.core.records import CURRENT_CALL, notify
from aengine.server.http.connection import Connection
from aengine.server.http.errors import CLIENT_LEFT, OPENAI, ErrorStyle, HttpError, error_headers
from aengine.server.http.exchange import Exchange, Receive, Send

ERROR_SECONDS = 1.0
"""How long an error may take to reach a client that has had its time."""
ENTRY_BYTES = 32
"""Bytes that a header counts for beside its own, as in HTTP/2."""
NO_ROUTE = "other"
"""The method of calls of paths that do not exist."""

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """What serves a path."""

    verb: str  # "GET", "POST"; GET serves HEAD too
    path: str  # "/v1/models/{model}": a variable at the end takes all that is left
    handler: Handler
    is_apart: bool = False  # for everyone, not recorded, and not counted among the others
    is_public: bool = False  # for everyone
    is_polled: bool = False  # asked again and again, so that its calls are not logged like others
    errors: ErrorStyle = OPENAI

    @property
    def method(self) -> str:
        """As records have it."""
        return f"{self.verb} {self.path}"


class Boundary:
    """The ASGI application of `Connection`s."""

    def __init__(self, core: Core, routes: list[Route]) -> None:
        self._core = core
        self._config = core.config
        self._beginning = asyncio.Lock()  # of hundreds that come at once each leaves the streams a turn of the event loop
        self._routes: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}  # of paths that end with a variable
        for route in routes:
            prefix, brace, _ = route.path.partition("{")
            (self._prefixes if brace else self._routes).setdefault(prefix, {})[route.verb] = route

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        connection: Connection = scope["connection"]
        if connection.transport.is_closing():
            return
        headers: dict[str, list[str]] = {}
        num_bytes = 0
        for name, value in scope["headers"]:
            num_bytes += len(name) + len(value) + ENTRY_BYTES
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        found, rest = self._find(scope["path"])
        route = found.get("GET" if scope["method"] == "HEAD" else scope["method"])
        call = Call(
            route.method if route is not None else NO_ROUTE,
            connection.peer,
            request_id_of(headers.get(REQUEST_ID_KEY, ())),
            trace_id_of(headers.get("traceparent", ())),
            is_polled=route is not None and route.is_polled,
            is_apart=route is not None and route.is_apart,
        )
        exchange = Exchange(
            scope,
            receive,
            send,
            call,
            headers,
            self._config.max_message_bytes,
            self._core.admission,
            lambda status: self._end(call, status),
        )
        exchange.rest = rest
        CURRENT_CALL.set(call)
        assert call.task is not None
        connection.on_lost = call.task.cancel
        try:
            try:
                self._core.calls.add(call)
                if num_bytes > (most := self._config.max_metadata_bytes):
                    raise ServiceError("METADATA_TOO_LARGE", f"{num_bytes} bytes of headers are more than {most}")
                if route is None or not (route.is_apart or route.is_public):
                    call.caller = await self._core.authenticator.authorize(_credentials(headers), connection.certificate())
                if route is None:
                    raise _no_route(scope, found)
                if not route.is_apart:
                    async with self._beginning:
                        await asyncio.sleep(0)
                await route.handler(exchange)
                assert exchange.ended, f"{route.method} has no response"
                return
            except asyncio.CancelledError:
                if call.error is None:
                    self._end(call, CLIENT_LEFT)
                    connection.abort()
                    return
                error = call.error
            except Exception as raised:
                error = raised
            await self._fail(exchange, error, route)
        finally:
            connection.on_lost = None
            exchange.stop_beat()
            self._core.calls.discard(call)

    def _find(self, path: str) -> tuple[Mapping[str, Route], str]:
        """The routes of a path by verb, and the value of the variable at its end."""
        if path in self._routes:
            return self._routes[path], ""
        for prefix, routes in self._prefixes.items():
            if path.startswith(prefix) and (rest := path.removeprefix(prefix)):
                return routes, rest
        return {}, ""

    async def _fail(self, exchange: Exchange, error: Exception, route: Route | None) -> None:
        call = exchange.call
        failure = describe(error, answered=exchange.answered)
        error.__traceback__ = None  # it holds this call, which holds it
        style = OPENAI if route is None else route.errors
        status = style.status(failure)
        self._end(call, status, failure.reason)
        if exchange.ended or failure.reason == "READER_STALLED":
            exchange.connection.abort()
            return
        exchange.closes |= failure.reason == "SENDER_STALLED"
        if exchange.answered:
            write = exchange.error_event or (lambda failure: style.stream_event(failure, self._config.debug_errors))
            sending = exchange.end_events(write(failure), status)
        else:
            body = style.body(failure, self._config.debug_errors)
            sending = exchange.respond(body, status=status, headers=error_headers(failure, status))
        try:
            await asyncio.wait_for(sending, ERROR_SECONDS if failure.reason == "SENDER_STALLED" else self._config.stall_seconds)
        except (asyncio.TimeoutError, asyncio.CancelledError):
            exchange.connection.abort()

    def _end(self, call: Call, status: int, reason: str = "") -> None:
        """Complete the record of a call, and pass it on. Only the first time counts."""
        if call.code:
            return
        call.code, call.reason, call.seconds = str(status), reason, time.monotonic() - call.start
        if not call.is_apart:
            notify(self._core.observers.on_call_end, call)


def _credentials(headers: Mapping[str, list[str]]) -> list[str]:
    """The values of `authorization`, in whose place Anthropic's clients have a key."""
    given = headers.get("authorization", [])
    return given or [f"Bearer {key}" for key in headers.get("x-api-key", [])]


def _no_route(scope: Mapping[str, Any], found: Mapping[str, Route]) -> ServiceError:
    verb, path = scope["method"], clip(scope["path"])
    if not found:
        return ServiceError("METHOD_NOT_FOUND", f"there is no {verb} {path}")
    allowed = ", ".join([*found, *(["HEAD"] if "GET" in found else [])])
    return HttpError("METHOD_NOT_FOUND", f"{path} takes {allowed}, not {verb}", 405, [(b"allow", allowed.encode())])
