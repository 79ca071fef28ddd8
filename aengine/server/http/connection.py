"""`Connection`: uvicorn's protocol of HTTP/1.1, with bounds on what a client can have it hold.

Owns one connection: how much of a request is held before its headers are whole, how much of a body is discarded, when a connection is
idle, how many one address may have, that every request before one that is refused is answered, and that the request under way learns of
its end. Knows nothing of what requests mean.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from aengine.server.core.auth import CertificateName
from aengine.server.http.http_errors import ErrorStyle, HttpError, error_headers

IDLE_SECONDS = 75.0
"""A connection that has no request under way for so long is closed."""
LINGER_SECONDS = 2.0
"""How long what a client still sends is dropped after a last answer. Closed at once, the connection would be reset, and the answer lost."""
MAX_HELD_BYTES = 64 * 1024
"""Most bytes that are taken in without a whole request line with its headers, or a part of a body, coming of them."""
MAX_TARGET_BYTES = 8192
"""Most of what stands between method and version."""
MAX_PIPELINED = 64
"""Most requests that wait for the one before them."""
MAX_BUFFERED_BYTES = 64 * 1024
"""Most bytes that wait in this process for a client to take them, before writing waits."""

# What uvicorn says of single requests is for their clients, who are told.
_logger = logging.getLogger(__name__)
_logger.setLevel(logging.CRITICAL)


class ConnectionCounts:
    """Counts connections by the addresses of clients. Of IPv6 the first 64 bits count, which is what one host has."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._connections: Counter[str] = Counter()

    def enter_connection(self, host: str) -> bool:
        """Whether `host` may have another connection, which is counted until `leave_connection`."""
        key = _network_of(host)
        if self._connections[key] >= self.most:
            return False
        self._connections[key] += 1
        return True

    def leave_connection(self, host: str) -> None:
        key = _network_of(host)
        self._connections[key] -= 1
        if not self._connections[key]:
            del self._connections[key]


class Connection(HttpToolsProtocol):
    """Its `scope` has the connection itself as "connection"."""

    max_discarded_bytes = 16 * 1024 * 1024
    """Most bytes of a body that are read and dropped after its request was answered."""

    def __init__(self, config: Config, state: ServerState, addresses: ConnectionCounts, style_of: Callable[[str], ErrorStyle]) -> None:
        """`style_of`: how errors of a path are told."""
        super().__init__(config, state, {})
        self._addresses = addresses
        self._style_of = style_of

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.logger = _logger
        self.on_lost: Callable[[], Any] | None = None  # called once the connection is gone, while a request is under way
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self.url = b""
        self._body_head: bytes | None = None  # of a request that asks for an upgrade: what is said of its body, which is yet to come
        self._resumes = False  # the parser is given that again
        self.refusal: HttpError | None = None  # of what is no request; nothing more is read
        self._running: Any = None  # the cycle of the request under way; that of `self.cycle` may be behind it
        self._held = 0
        self._discarded = 0
        self._idle_since = time.monotonic()
        self._unsent = 0  # when it was last looked at
        self._lingering: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        transport.set_write_buffer_limits(MAX_BUFFERED_BYTES)
        self._is_counted = self._addresses.enter_connection(self._host)
        if not self._is_counted:
            self.refuse(HttpError("TOO_MANY_CALLS", f"{self._addresses.most} connections of one address are the limit", 429))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_counted:
            self._addresses.leave_connection(self._host)
        if self._lingering is not None:
            self._lingering.cancel()
        if self._running is not None:
            self._running.disconnected = True
        super().connection_lost(exc)
        # They hold it, and would until garbage is collected.
        self._running = self.cycle = self.scope = self.refusal = None  # type: ignore[assignment]
        self.pipeline.clear()
        self.closed.set_result(None)
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    @property
    def _host(self) -> str:
        return (self.client or ("", 0))[0]

    @property
    def peer(self) -> str:
        """The address of the client as gRPC writes it, for example "ipv4:127.0.0.1:40000"."""
        host, port = self.client or ("", 0)
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def certificate(self) -> CertificateName | None:
        """The name in the client's certificate; None: it has none. Raises `ServiceError` for a name that cannot be shown."""
        tls = self.transport.get_extra_info("ssl_object")
        if tls is None or not (found := tls.getpeercert()):
            return None
        names = [value for part in found.get("subject", ()) for key, value in part if key == "commonName"]
        return CertificateName.of(names, ssl.DER_cert_to_PEM_cert(tls.getpeercert(True)).encode())

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def abort(self) -> None:
        """End it, and drop what the client has not taken."""
        self.transport.abort()

    def close_if_idle(self, now: float) -> None:
        """`now`: on time.monotonic. To be called now and then: headers that come byte by byte are idle time too."""
        unsent = self.transport.get_write_buffer_size()
        if self.is_busy or unsent != self._unsent:
            self._unsent, self._idle_since = unsent, now
        elif now - self._idle_since >= IDLE_SECONDS:
            self.abort()

    # ---- bounds --------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self.refusal is not None:
            self._discard(len(data))
            return
        self._held += len(data)
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:  # to what is not spoken here, so it goes on as it is (RFC 9110, 7.8)
                data = data[upgrade.args[0] :]
                self._continue_upgraded()
            except httptools.HttpParserError as error:
                cause = error.__context__
                self.refuse(cause if isinstance(cause, HttpError) else HttpError("INVALID_FIELD", "this is not HTTP/1.1", 400))
                return
        if self._held > MAX_HELD_BYTES:
            message = f"the request line and the headers have more than {MAX_HELD_BYTES} bytes"
            self.refuse(HttpError("METADATA_TOO_LARGE", message, 431))

    def _continue_upgraded(self) -> None:
        """The parser has left a request that asks for an upgrade behind its headers: a new one goes on there."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        head, self._body_head = self._body_head, None
        if head is not None:
            self._resumes = True
            self.parser.feed_data(head)
            self._resumes = False

    def on_message_begin(self) -> None:
        if self._resumes:
            return
        super().on_message_begin()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise HttpError("TOO_MANY_CALLS", f"more than {MAX_PIPELINED} requests wait for the one before them", 429)
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]
        self._discarded = 0

    def on_url(self, url: bytes) -> None:
        if self._resumes:
            return
        super().on_url(url)
        if len(self.url) > MAX_TARGET_BYTES:
            raise HttpError("METADATA_TOO_LARGE", f"the target of a request has at most {MAX_TARGET_BYTES} bytes", 414)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._resumes:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._resumes:
            return
        self._held = 0
        super().on_headers_complete()
        if self.parser.should_upgrade():
            lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
            self._body_head = b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines) if lines else None

    def on_body(self, body: bytes) -> None:
        self._held = 0
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held = 0
        if self._body_head is None:
            super().on_message_complete()

    def _discard(self, num_bytes: int) -> None:
        self._discarded += num_bytes
        if self._discarded > self.max_discarded_bytes:
            self.abort()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._idle_since = time.monotonic()
        super().on_response_complete()
        if self.refusal is not None and not self.is_busy and not self.transport.is_closing():
            self._end_refused()

    # ---- refusals ------------------------------------------------------------------------------------------------------

    def refuse(self, error: HttpError) -> None:
        """Answer what is no request, once every request before it is answered, and close. One whose body is no more than begun is told of
        `refusal` where its body is read."""
        error.__traceback__ = None  # it holds this
        self.refusal = error
        self._discarded = 0
        if self.is_busy:
            self.cycle.message_event.set()
        else:
            self._end_refused()

    def _end_refused(self) -> None:
        error = self.refusal
        assert error is not None
        if self.cycle is None or not self.cycle.more_body:  # else it is the body of what was answered
            body = self._style_of(self.url.decode("latin-1").partition("?")[0]).body(error)
            headers = [*error_headers(error, error.status), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            lines = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
            lines += [name + b": " + value for name, value in (*headers, (b"connection", b"close"))]
            self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.end_sending()

    def end_sending(self) -> None:
        """Close once the client has taken what was sent and has seen that it was the last."""
        if not self.transport.can_write_eof():  # of TLS
            self.transport.close()
            return
        self.transport.write_eof()
        self._lingering = self.loop.call_later(LINGER_SECONDS, self.transport.abort)


def _network_of(host: str) -> str:
    if ":" not in host:
        return host
    return str(ipaddress.ip_network((int(ipaddress.IPv6Address(host.partition("%")[0])) >> 64 << 64, 64)))
