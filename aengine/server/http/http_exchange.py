"""`HttpExchange`: one HTTP request and its response. Owns how bytes are read and written, and what is marked while
that waits for the client.

Handlers get one; what they raise becomes an error elsewhere. Knows no path and no API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import ExitStack
from email.utils import formatdate
from typing import Any, cast
from urllib.parse import parse_qsl

from aengine.server.core.calls_in_flight import Admission, Call
from aengine.server.core.decoding import UNCOUNTED_BYTES, Decoding
from aengine.server.core.errors import ServiceError
from aengine.server.http.connection import Connection
from aengine.server.http.http_errors import Headers, HttpError, to_json

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
EVENT_END = b"\n\n"  # behind a server-sent event
COMMENT = b"3\r\n:\n\n\r\n"
"""One that clients skip, as a chunk of a response."""
DRIP_SECONDS = 75.0
MIN_BYTES_PER_SECOND = 1024
"""A body that comes more slowly than this on average is ended once it has had `DRIP_SECONDS`."""
BEAT_SECONDS = 15.0
"""A stream of events that is silent for so long gets a comment, so that nobody on the way takes it for dead."""


class HttpExchange:
    """To be used by one task, which leaves it with a response that has ended, or raises.

    `on_end` is called with the status just before the last bytes of a response are sent.
    """

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Receive,
        send: Send,
        call: Call,
        headers: Mapping[str, list[str]],
        decoding: Decoding,
        max_body_bytes: int,
        admission: Admission,
        on_end: Callable[[int], None],
    ) -> None:
        self.call = call
        self.headers = headers  # values by name, in lower case
        self.rest = ""  # the end of the path, where the route has a variable
        self.body = b""  # where the events are kept, or it was read ahead
        self.is_held = False
        self.held = ExitStack()  # closed when the call ends
        self.connection = cast(Connection, scope.get("connection"))  # none where the request is one of this process
        self.answered = False  # whether a part of the response was sent
        self.ended = False
        self.warning = ""  # told in a header, where there is one
        self.stream_id = ""  # by which its events can be read again, told in a header
        self.query: bytes = scope.get("query_string", b"")
        self.keep: Callable[[bytes], Awaitable[None]] | None = None  # takes events, where they are not sent
        self.closes = False  # whether the connection ends with the response, whatever `admission` says
        self.error_event: Callable[[ServiceError], bytes] | None = None  # writes an error in a stream; by default as the API does
        self.decoding = decoding
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._admission = admission
        self._on_end = on_end
        self._read_all = False
        self._beat: asyncio.TimerHandle | None = None
        self._beat_sent = 0

    def query_fields(self) -> dict[str, str]:
        """What stands behind the `?` of the path, by name."""
        return dict(parse_qsl(self.query.decode("latin-1")))

    async def read(self) -> bytes:
        """Read the body. Raises `HttpError` as soon as it shows that it is too large (413), in a coding (415, 501) or no HTTP (400), and
        `ServiceError` (SENDER_STALLED) when it comes too slowly."""
        if self.is_held:
            return self.body
        parts = [part async for part in self.parts()]
        body = b"".join(parts)
        if self.keep is not None:
            self.body = body
        return body

    async def read_ahead(self) -> bytes:
        """The body, which `read` then gives again."""
        self.body, self.is_held = await self.read(), True
        return self.body

    async def parts(self, most_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        """Read the body, which is not held here. `most_bytes`: of one that is not held in memory. Raises what `read` raises."""
        self._check_codings()
        most = self._max_body_bytes = most_bytes or self._max_body_bytes
        for length in self.headers.get("content-length", ()):  # the parser lets one through, a number
            self._check_size(int(length))
            if not most_bytes:
                await self.call.take_room(self.decoding, int(length))
        num_bytes, start = 0, time.monotonic()
        while not self._read_all:
            self.call.waits = "SENDER_STALLED"
            message = await self._receive()
            self.call.waits = None
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            num_bytes += len(message["body"])
            self._check_size(num_bytes)
            if num_bytes > UNCOUNTED_BYTES and self.call.release is None and not most_bytes:
                await self.call.take_room(self.decoding, most)  # it comes in chunks, and could be as large as any
            yield message["body"]
            self._read_all = not message["more_body"]
            if self._read_all:
                break
            if self.connection.refusal is not None:
                self.closes = True
                raise self.connection.refusal
            if (seconds := time.monotonic() - start) > DRIP_SECONDS and num_bytes < seconds * MIN_BYTES_PER_SECOND:
                raise ServiceError("SENDER_STALLED", f"the client has sent {num_bytes} bytes of its body in {seconds:.0f} s")

    def _check_codings(self) -> None:
        """A body comes as it is."""
        if _codings(self.headers, "content-encoding") - {"identity"}:
            raise HttpError("INVALID_FIELD", "a body must have no Content-Encoding", 415, [(b"accept-encoding", b"identity")])
        if _codings(self.headers, "transfer-encoding") - {"chunked"}:
            raise HttpError("INVALID_FIELD", "Transfer-Encoding is chunked or none", 501)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise HttpError("INVALID_FIELD", f"the body has more than {self._max_body_bytes} bytes", 413)

    # ---- responses -----------------------------------------------------------------------------------------------------

    async def respond(self, body: bytes, *, status: int = 200, content_type: bytes = JSON, headers: Headers = ()) -> None:
        """Send a whole response, and end it."""
        self.call.messages_sent += 1
        self._end(status)
        length = [] if status == 304 else [(b"content-length", b"%d" % len(body))]
        await self._start(status, [(b"content-type", content_type), *length, *headers])
        await self._write(body, more=False)

    async def respond_json(self, value: Any) -> None:
        await self.respond(to_json(value))

    async def begin_events(self, content_type: bytes = EVENTS) -> None:
        """Start a response that is a stream of server-sent events, or of something that knows no comments."""
        if self.keep is not None:
            await self.keep(b"")
            return
        if self.answered:  # while its model was loaded
            return
        await self._start(200, [(b"content-type", content_type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        if content_type == EVENTS:
            self._beat = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._on_beat)

    async def send(self, events: bytes) -> None:
        """Send one or several whole events; waits while the client does not take what was sent before."""
        if self.keep is not None:
            await self.keep(events)
            return
        await self._write(events, more=True)
        self.call.messages_sent += 1

    async def end_events(self, events: bytes = b"", status: int = 200) -> None:
        """End the response, with the last events."""
        if self.keep is not None:
            await self.keep(events)
            return
        self.stop_beat()
        self.call.messages_sent += bool(events)
        self._end(status)
        await self._write(events, more=False)

    def stop_beat(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None

    def _on_beat(self) -> None:
        """Write a comment if nothing was sent since the last time."""
        silent, self._beat_sent = self._beat_sent == self.call.messages_sent, self.call.messages_sent
        if silent and self.call.waits is None and not self.connection.flow.write_paused:
            self.connection.transport.write(COMMENT)
        self._beat = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._on_beat)

    def _end(self, status: int) -> None:
        self.ended = True
        self._on_end(status)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        request_id = self.call.request_id.encode()
        headers += (b"x-request-id", request_id), (b"request-id", request_id)  # the second is Anthropic's
        if self.closes or self._admission.closed or (not self._read_all and "expect" in self.headers):
            headers.append((b"connection", b"close"))  # whoever asks before it sends a body may send none now, or still do
        if self.stream_id:
            headers.append((b"x-stream-id", self.stream_id.encode()))
        if self.warning:
            headers.append((b"warning", f'199 aengine "{self.warning}"'.encode()))
        headers.append((b"date", formatdate(usegmt=True).encode()))
        self.answered = True
        self.call.answered()
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, *, more: bool) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": more})

    async def _put(self, message: dict[str, Any]) -> None:
        """Waits while the client does not take what was written before."""
        self.call.waits = "READER_STALLED"
        await self._send(message)
        self.call.waits = None


def _codings(headers: Mapping[str, list[str]], name: str) -> set[str]:
    return {coding.strip().lower() for coding in ",".join(headers.get(name, ())).split(",")} - {""}


def split_events(events: bytes) -> list[bytes]:
    """Divide server-sent events that were written together."""
    return [event + EVENT_END for event in events.split(EVENT_END) if event]
