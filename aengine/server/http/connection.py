"""`Connection`: uvicorn's protocol of HTTP/1.1, with bounds on what a client can have it hold.

Owns one connection: how much of a request is held before its headers are whole, how much of a body is discarded, when a connection is
idle, and that the request under way learns of its end. Knows nothing of what requests mean.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aengine.server.core.auth import CertificateName

IDLE_SECONDS = 75.0
"""A connection that has no request under way for so long is closed."""
MAX_HELD_BYTES = 64 * 1024
"""Most bytes that are taken in without a whole request line with its headers, or a part of a body, coming of them."""
MAX_PIPELINED = 64
"""Most requests that wait for the one before them."""
MAX_BUFFERED_BYTES = 64 * 1024
"""Most bytes that wait in this process for a client to take them, before writing waits."""

# What uvicorn says of single requests is for their clients, who are told.
_logger = logging.getLogger(__name__)
_logger.setLevel(logging.CRITICAL)


class Connection(HttpToolsProtocol):
    """Its `scope` has the connection itself as "connection"."""

    max_discarded_bytes = 16 * 1024 * 1024
    """Most bytes of a body that are read and dropped after its request was answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.logger = _logger
        self.on_lost: Callable[[], Any] | None = None  # called once the connection is gone, while a request is under way
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self._running: Any = None  # the cycle of the request under way; that of `self.cycle` may be behind it
        self._held = 0
        self._discarded = 0
        self._idle_since = time.monotonic()
        self._unsent = 0  # when it was last looked at
        super().connection_made(transport)
        transport.set_write_buffer_limits(MAX_BUFFERED_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running is not None:
            self._running.disconnected = True
        super().connection_lost(exc)
        self._running = self.cycle = self.scope = None  # type: ignore[assignment]  # they hold it, and would until garbage is collected
        self.closed.set_result(None)
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    @property
    def peer(self) -> str:
        """As gRPC writes it: "ipv4:127.0.0.1:40000"."""
        host, port = self.client or ("", 0)
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def certificate(self) -> CertificateName | None:
        """Of the client. Raises `ServiceError` for one whose name cannot be shown."""
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
        self._held += len(data)
        super().data_received(data)
        if self._held > MAX_HELD_BYTES and not self.transport.is_closing():
            self.refuse(431, "METADATA_TOO_LARGE", f"the request line and the headers have more than {MAX_HELD_BYTES} bytes")

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError  # which the parser takes for a wrong request
        super().on_message_begin()
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]
        self._discarded = 0

    def on_headers_complete(self) -> None:
        self._held = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._held = 0
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > self.max_discarded_bytes:
                self.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._idle_since = time.monotonic()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "INVALID_FIELD", "this is not HTTP/1.1")

    def refuse(self, status: int, reason: str, message: str) -> None:
        """Answer what is no request, and close."""
        if self.is_busy:  # its response is on its way
            self.abort()
            return
        body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":"%s"}}' % (
            message.encode(),
            reason.lower().encode(),
        )
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        words = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}[status]
        self.transport.write(head % (status, words, len(body)) + body)
        self.transport.close()
