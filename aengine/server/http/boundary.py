"""The HTTP side of a call's life, which `CallLife` has: which route serves it, which hosts and origins it may name, how its handler is run,
and how its error reaches the client.

Knows nothing of what handlers do. A client that goes away shows as `CancelledError` at one place.

A page of any site can have a browser send requests to this machine, and one whose name is made to mean this machine's address can read the
answers, too. Both show in headers that the page does not write: Origin, and Host.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, aclosing, contextmanager
from copy import copy
from typing import Any

from aengine.api.dataclass import dataclass
from aengine.api.errors import InvalidRequestError
from aengine.server.config.options import ServerConfig, is_loopback
from aengine.server.core.calls_in_flight import CURRENT_CALL, Call, CallRecord, current_caller
from aengine.server.core.core import Core
from aengine.server.core.errors import ServiceError, clip, draining, request_not_found
from aengine.server.core.resume import AskedAgain, Resumable, ResumableStreams
from aengine.server.http.connection import Connection
from aengine.server.http.http_errors import CLIENT_LEFT, OPENAI, ErrorStyle, HttpError, error_headers, to_json
from aengine.server.http.http_exchange import EVENT_END, HttpExchange, Receive, Send, split_events

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
_LOCAL_NAMES = ("localhost.localdomain", ".localhost")
"""Names, or their ends, that no public name server knows."""
ANY = "*"


class Origins:
    """Checks which hosts and origins a request names, as a configuration allows them."""

    def __init__(self, config: ServerConfig) -> None:
        self._checks = config.checks_origins
        self._hosts = frozenset(host.lower().rstrip(".") for host in config.http_hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.http_cors_origins)

    def check(self, headers: Mapping[str, list[str]], version: str, *, is_for_all: bool) -> None:
        """`headers` of a request in a `version` of HTTP: raises `HttpError` (400) for one that does not name one host, and `ServiceError`
        (FOREIGN_HOST, FOREIGN_ORIGIN) unless `is_for_all`."""
        hosts = headers.get("host", [])
        matches = [_HOST.fullmatch(host) for host in hosts]
        if len(hosts) > 1 or (version != "1.0" and not hosts) or None in matches:
            raise HttpError("INVALID_FIELD", "a request has one header Host, the name and port that it is for", 400)
        if is_for_all or not self._checks:
            return
        if hosts and matches[0] is not None and not self._is_ours(matches[0]["name"].lower().rstrip(".")):
            raise ServiceError("FOREIGN_HOST", f"Host {clip(hosts[0])!r} is neither this machine nor one of the server's http_hosts")
        for origin in headers.get("origin", []):
            given = origin.lower()
            if given.partition("://")[2] != "".join(hosts).lower() and self._origins.isdisjoint((given, ANY)):
                raise ServiceError("FOREIGN_ORIGIN", f"pages of {clip(origin)!r} may not call this server: see http_cors_origins")

    def _is_ours(self, name: str) -> bool:
        return is_loopback(name.strip("[]")) or name.endswith(_LOCAL_NAMES) or not self._hosts.isdisjoint((name, ANY))


DOOR = "http"
_SECRET_HEADERS = ("authorization", "x-api-key", "cookie", "proxy-authorization", "content-length")
ERROR_SECONDS = 1.0
"""How long an error may take to reach a client that has had its time."""
ENTRY_BYTES = 32
"""Bytes that a header counts for beside its own, as in HTTP/2."""
NO_ROUTE = "other"
"""The method of calls of paths that do not exist."""

Handler = Callable[[HttpExchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """A verb and a path, and the handler that serves them."""

    verb: str  # "GET", "POST"; GET serves HEAD too
    path: str  # "/v1/models/{model}": a variable at the end takes all that is left
    handler: Handler
    is_apart: bool = False  # for everyone, not recorded, and not counted among the others
    is_public: bool = False  # for everyone
    is_polled: bool = False  # asked again and again, so that its calls are not logged like others
    errors: ErrorStyle = OPENAI

    @property
    def method(self) -> str:
        """The name of the route in records and metrics, for example "GET /v1/models"."""
        return f"{self.verb} {self.path}"


class HttpApp:
    """The ASGI application that uvicorn runs for each request of a `Connection`."""

    def __init__(self, core: Core, routes: list[Route], resumables: ResumableStreams) -> None:
        self._core = core
        self._resumables = resumables
        resumables.makers[DOOR] = self._make_again
        self._life = core.life
        self._config = core.config
        self._origins = Origins(core.config)
        self._beginning = asyncio.Lock()  # of hundreds that come at once each leaves the streams a turn of the event loop
        self._routes: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}  # of paths that end with a variable
        for route in routes:
            prefix, brace, _ = route.path.partition("{")
            (self._prefixes if brace else self._routes).setdefault(prefix, {})[route.verb] = route
        self._styles = {f"{route.path}/": route.errors for route in routes if route.errors is not OPENAI}

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
        call = self._life.begin(
            route.method if route is not None else NO_ROUTE,
            connection.peer,
            lambda name: headers.get(name, ()),
            num_bytes,
            is_polled=route is not None and route.is_polled,
            is_apart=route is not None and route.is_apart,
        )
        exchange = HttpExchange(
            scope,
            receive,
            send,
            call,
            headers,
            self._core.decoding,
            self._config.max_message_bytes,
            self._core.admission,
            lambda status: self._life.end_call(call, str(status)),
        )
        exchange.rest = rest
        assert call.task is not None
        connection.on_lost = call.task.cancel
        with self._life.hold(call):
            try:
                with exchange.held:
                    await self._serve(scope, num_bytes, found, route, exchange)
            finally:
                connection.on_lost = None
                exchange.stop_beat()

    async def _serve(
        self,
        scope: Mapping[str, Any],
        num_bytes: int,
        found: Mapping[str, Route],
        route: Route | None,
        exchange: HttpExchange,
    ) -> None:
        call, connection, headers = exchange.call, exchange.connection, exchange.headers
        try:
            self._life.admit(call, num_bytes)
            if scope["http_version"] not in ("1.0", "1.1"):
                raise HttpError("INVALID_FIELD", f"HTTP/{scope['http_version']} is not spoken here", 505)
            self._origins.check(headers, scope["http_version"], is_for_all=call.is_apart)
            if route is None or not (route.is_apart or route.is_public):
                await self._life.authorize(call, _credentials(headers), connection.certificate())
            if route is None:
                raise _no_route(scope, found)
            if not route.is_apart:
                async with self._beginning:
                    await asyncio.sleep(0)
            retain = read_retain(exchange)
            if retain is None or route.verb != "POST" or route.errors.end != EVENT_END:
                await route.handler(exchange)
            else:
                await self._serve_kept(route, exchange, scope["path"], retain)
            assert exchange.ended, f"{route.method} has no response"
            return
        except asyncio.CancelledError:
            if call.error is None:
                self._life.end_call(call, str(CLIENT_LEFT))
                connection.abort()
                return
            error = call.error
        except Exception as raised:
            error = raised
        await self._fail(exchange, error, self.style_of(scope["path"]))

    async def _serve_kept(self, route: Route, exchange: HttpExchange, path: str, retain: float) -> None:
        """Serve a request whose stream of events, if there is one, can be read again: it goes on without its reader, so long."""
        kept, begun, failed = copy(exchange), asyncio.Event(), list[Exception]()
        kept.held = ExitStack()

        async def write(resumable: Resumable) -> None:
            try:
                with kept.held:
                    await self._write_kept(route, kept, path, resumable, begun)
            except Exception as error:
                failed.append(error)
                raise

        resumable = self._resumables.start(retain, write)
        assert resumable.pump is not None
        waiting = asyncio.create_task(begun.wait())
        try:
            await asyncio.wait((resumable.pump, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            if not begun.is_set() and resumable.pump is not None:
                resumable.pump.cancel()  # no client knows how to go on
        if not begun.is_set():
            if failed:
                raise failed[0]
            if not kept.ended:
                raise draining()
            exchange.ended, exchange.answered = kept.ended, kept.answered
            return
        exchange.warning = kept.warning
        await _send_kept(exchange, resumable, 0)

    async def _write_kept(self, route: Route, kept: HttpExchange, path: str, resumable: Resumable, begun: asyncio.Event) -> None:
        """Have the events of a response be kept; `begun` is set once there is one. Raises what the handler raises before."""
        replay = resumable.replay

        def ask() -> AskedAgain:
            headers = {name: values for name, values in kept.headers.items() if name not in _SECRET_HEADERS}
            held = to_json({"path": path, "headers": headers, "query": kept.query.decode("latin-1")})
            return AskedAgain(DOOR, held + b"\n" + kept.body)

        async def keep(events: bytes) -> None:
            if not begun.is_set():
                await self._resumables.begin(resumable, resumable.token.hex(), ask)
                begun.set()
            for event in split_events(events):
                await replay.append(b"id: %d\n" % replay.ring.end + event)

        kept.keep = keep
        try:
            await route.handler(kept)
        except Exception as error:
            if not begun.is_set():
                raise
            failure = self._life.fail(error, answered=True)
            tell = kept.error_event or (lambda failure: route.errors.stream_event(failure, self._config.debug_errors))
            await keep(tell(failure))

    # ---- requests that come from no connection ---------------------------------------------------------------------------

    async def _make_again(self, resumable: Resumable, asked: bytes) -> None:
        header, _, body = asked.partition(b"\n")
        held = json.loads(header)
        found, rest = self._find(held["path"])
        with self._exchange_within(held["headers"], body, rest, None) as exchange:
            exchange.query = held["query"].encode("latin-1")
            await self._write_kept(found["POST"], exchange, held["path"], resumable, asyncio.Event())

    async def answer_within(self, path: str, body: bytes) -> tuple[int, bytes, float | None]:
        """What a POST of `body` to `path` gets that is made in the name of the caller of the present call: the status, the body, and the
        seconds after which another try may get more, if there are any."""
        found, rest = self._find(path)
        parts: list[bytes] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            parts.append(message.get("body", b""))

        with self._exchange_within({}, body, rest, send) as exchange:
            try:
                await found["POST"].handler(exchange)
            except Exception as error:
                style = self.style_of(path)
                failure = self._life.fail(error, answered=False)
                return style.status(failure), style.body(failure), failure.may_pass
        return 200, b"".join(parts), None

    @contextmanager
    def _exchange_within(self, headers: Mapping[str, list[str]], body: bytes, rest: str, send: Send | None) -> Iterator[HttpExchange]:
        """The exchange of a request of this process, in whose task it is used."""

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def drop(message: MutableMapping[str, Any]) -> None:
            """Nobody is told."""

        now = CURRENT_CALL.get() or CallRecord("", "", "")
        call = Call(now.method, now.peer, now.request_id, now.trace_id, caller=now.caller, decided=now.decided)
        CURRENT_CALL.set(call)
        lengths = {**headers, "content-length": [str(len(body))]}
        shared = (self._core.decoding, max(self._config.max_message_bytes, len(body)), self._core.admission)
        exchange = HttpExchange({}, receive, send or drop, call, lengths, *shared, lambda status: None)
        exchange.rest = rest
        try:
            with exchange.held:
                yield exchange
        finally:
            call.answered()

    def style_of(self, path: str) -> ErrorStyle:
        """How errors of `path`, and of all below it, are told."""
        return next((style for start, style in self._styles.items() if f"{path}/".startswith(start)), OPENAI)

    def _find(self, path: str) -> tuple[Mapping[str, Route], str]:
        """The routes of a path by verb, and the value of the variable at its end."""
        if path in self._routes:
            return self._routes[path], ""
        for prefix, routes in self._prefixes.items():
            if path.startswith(prefix) and (rest := path.removeprefix(prefix)):
                return routes, rest
        return {}, ""

    async def _fail(self, exchange: HttpExchange, error: Exception, style: ErrorStyle) -> None:
        failure = self._life.fail(error, answered=exchange.answered)
        status = style.status(failure)
        self._life.end_call(exchange.call, str(status), failure.reason)
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


MOST_RETAIN_SECONDS = 600.0  # as for gRPC


def read_retain(exchange: HttpExchange) -> float | None:
    """Seconds that the events of a response are to be kept without a reader; None: it ends with its client. Raises `HttpError`."""
    given = exchange.headers.get("x-stream-retain")
    if not given:
        return None
    try:
        seconds = float(given[0])
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_RETAIN_SECONDS:
        message = f"x-stream-retain: {clip(given[0])!r} is not a number of seconds in (0, {MOST_RETAIN_SECONDS:.0f}]"
        raise HttpError("INVALID_FIELD", message, 400)
    return seconds


async def read_stream(resumables: ResumableStreams, exchange: HttpExchange) -> None:
    """`/v1/streams/{id}`: respond with the events of a stream, those behind `Last-Event-ID`, or from `?from=N` on; without either from the
    first. Raises `ServiceError` (REQUEST_NOT_FOUND, EVENTS_DROPPED) and `HttpError`."""
    resumable = resumables.find(exchange.rest, current_caller())
    if resumable is None:
        raise request_not_found(exchange.rest)
    asked = exchange.query_fields().get("from")
    last = next(iter(exchange.headers.get("last-event-id", ())), None)
    text, behind = (asked, 0) if asked is not None else (last or "-1", 1)
    if not re.fullmatch(r"-1|[0-9]{1,9}", text):
        raise HttpError("INVALID_FIELD", f"{'from' if not behind else 'last-event-id'}: {clip(text)!r} is not the number of an event", 400)
    try:
        resumable.replay.seek(int(text) + behind)
    except InvalidRequestError as error:
        raise error.moved(lambda field: "from") from error
    await _send_kept(exchange, resumable, int(text) + behind)


async def _send_kept(exchange: HttpExchange, resumable: Resumable, number: int) -> None:
    exchange.stream_id = resumable.request_id
    await exchange.begin_events()
    async with aclosing(resumable.replay.read(number)) as events:
        async for event in events:
            await exchange.send(event)
    await exchange.end_events()


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
