"""A gRPC client in HTTP/2 frames: what is sent, and when a window opens, is the test's to decide. It shares no code with gRPC.

A connection gives back window for what it received only on calls that are `greedy`; `RawCall.open` makes one greedy later on.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import h2.errors
import h2.events
from google.protobuf.message import Message
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings

from aengine.v1.generation_pb2 import GenerationEvent
from aengine.v1.generation_service_pb2 import StreamGenerateResponse

GENERATION = "/aengine.v1.GenerationService/"
DEFAULT_WINDOW = 65535  # bytes, of the connection and of each stream

FRAME_HEADER = 9  # bytes
SETTINGS, GOAWAY = 4, 7  # types of frame

MessageT = TypeVar("MessageT", bound=Message)


def framed(message: Message | bytes, *, compressed: bool = False) -> bytes:
    """A message behind the prefix that gRPC puts before it."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return struct.pack(">BI", compressed, len(data)) + data


class RawCall:
    """One stream of a connection: what came on it so far."""

    def __init__(self, connection: RawConnection, stream_id: int, greedy: bool) -> None:
        self.stream_id = stream_id
        self.greedy = greedy
        self.headers: dict[str, str] = {}  # with the trailers, once those came
        self.num_bytes = 0
        self.reset_code: int | None = None
        self.ended = False  # by either side, or with the connection
        self._connection = connection
        self._data = b""
        self._unreturned = 0  # bytes of window
        self._news = asyncio.Event()

    @property
    def status(self) -> int | None:
        """The status of the call, if it came."""
        code = self.headers.get("grpc-status")
        return None if code is None else int(code)

    @property
    def details(self) -> bytes:
        """The serialised google.rpc.Status of a call that failed."""
        raw = self.headers["grpc-status-details-bin"]
        return base64.b64decode(raw + "=" * (-len(raw) % 4))

    async def send(self, data: bytes = b"", *, end: bool = False) -> None:
        """Bytes of the body; `end` closes the client's half."""
        await self._connection.send_data(self.stream_id, data, end)

    async def reset(self, code: int = h2.errors.ErrorCodes.CANCEL) -> None:
        self._connection.h2.reset_stream(self.stream_id, code)
        await self._connection.flush()
        self.on_end()

    async def open(self) -> None:
        """Take whatever comes from now on."""
        self.greedy = True
        missing = max(0, DEFAULT_WINDOW - self._connection.h2.remote_flow_control_window(self.stream_id))
        if missing:
            self._connection.h2.increment_flow_control_window(missing, self.stream_id)
        if self._unreturned:
            self._connection.h2.increment_flow_control_window(self._unreturned)
            self._unreturned = 0
        await self._connection.flush()

    async def message(self, kind: type[MessageT]) -> MessageT | None:
        """The next message; None when the stream ended before it."""
        while not (len(self._data) >= 5 and len(self._data) >= 5 + int.from_bytes(self._data[1:5], "big")):
            if self.ended:
                return None
            self._news.clear()
            await self._news.wait()
        size = 5 + int.from_bytes(self._data[1:5], "big")
        piece, self._data = self._data[5:size], self._data[size:]
        return kind.FromString(piece)

    async def event(self) -> GenerationEvent | None:
        """The next event of StreamGenerate."""
        response = await self.message(StreamGenerateResponse)
        return None if response is None else response.event

    async def events(self) -> list[GenerationEvent]:
        """All events to the end of the stream."""
        events = []
        while (event := await self.event()) is not None:
            events.append(event)
        return events

    async def wait_end(self) -> None:
        while not self.ended:
            self._news.clear()
            await self._news.wait()

    # ---- fed by the connection -----------------------------------------------------------------------------------------

    def on_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.headers.update((name.decode(), value.decode()) for name, value in headers)
        self._news.set()

    def on_data(self, data: bytes, window: int) -> None:
        self.num_bytes += len(data)
        self._data += data
        if self.greedy:
            self._connection.h2.acknowledge_received_data(window, self.stream_id)
        else:
            self._unreturned += window
        self._news.set()

    def on_end(self, reset_code: int | None = None) -> None:
        self.ended = True
        self.reset_code = reset_code
        self._news.set()


class RawConnection:
    """Made by `raw_connection`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, ack_settings: bool) -> None:
        self.h2 = H2Connection(H2Configuration(header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False))
        self.goaway: int | None = None  # the error code of a GOAWAY from the server
        self.num_pongs = 0
        self.closed = asyncio.Event()  # by the server, or by `close` or `abort`
        self._reader = reader
        self._writer = writer
        self._address = address
        self._ignored = () if ack_settings else (SETTINGS,)
        self._received = b""  # the beginning of a frame
        self._calls: dict[int, RawCall] = {}
        self._pong = asyncio.Event()
        self._receiving = asyncio.create_task(self._receive())

    async def call(
        self,
        method: str,
        body: bytes | None = None,
        *,
        greedy: bool = True,
        end: bool = True,
        flush: bool = True,
        headers: Iterable[tuple[str, str]] = (),
        replaced: Iterable[tuple[str, str]] = (),
    ) -> RawCall:
        """Begin a call of `method`, such as GENERATION + "Generate". `headers` are added to those of gRPC, `replaced` take their place.
        Without `flush` nothing is sent yet."""
        usual = {":method": "POST", ":scheme": "http", ":path": method, ":authority": self._address, "te": "trailers"}
        usual |= {"content-type": "application/grpc", **dict(replaced)}
        stream_id = self.h2.get_next_available_stream_id()
        call = self._calls[stream_id] = RawCall(self, stream_id, greedy)
        self.h2.send_headers(stream_id, [*usual.items(), *headers], end_stream=body is None and end)
        if not flush:
            assert body is not None
            self.h2.send_data(stream_id, body, end_stream=end)  # it is short
            return call
        if body is not None:
            await self.send_data(stream_id, body, end)
        await self.flush()
        return call

    async def send_data(self, stream_id: int, data: bytes, end: bool) -> None:
        """Send in frames, as the server's windows allow; gives up when the server ends the stream before."""
        view, call = memoryview(data), self._calls[stream_id]
        while len(view):
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            if room:
                self.h2.send_data(stream_id, bytes(view[:room]))
                view = view[room:]
            else:
                await self.flush()
                await asyncio.sleep(0.001)  # the server's update comes with the reader's task
            if call.ended:
                return
        if end:
            self.h2.end_stream(stream_id)
        await self.flush()

    async def ping(self) -> None:
        """Ping, and wait for the answer or the end of the connection."""
        if self.closed.is_set():
            return
        self._pong.clear()
        self.h2.ping(self.num_pongs.to_bytes(8, "big"))
        await self.flush()
        await self._pong.wait()

    async def write(self, data: bytes) -> None:
        """Bytes as they are, beside the protocol."""
        with suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def flush(self) -> None:
        await self.write(self.h2.data_to_send())

    def abort(self) -> None:
        """End the connection without a word: the server sees a TCP reset, or nothing but the end."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """End the connection in TCP alone: no GOAWAY, no RST_STREAM."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def fall_silent(self) -> None:
        """Neither read nor answer from now on; the connection stays."""
        self._receiving.cancel()
        await asyncio.wait((self._receiving,))

    async def finish(self) -> None:
        self.abort()
        await asyncio.wait((self._receiving,))

    async def _receive(self) -> None:
        """Take what the server sends, until it or this client ends the connection."""
        try:
            while data := await self._reader.read(65536):
                for event in self.h2.receive_data(self._heeded(data)):
                    self._on_event(event)
                await self.flush()
        except (ConnectionError, H2Error):
            pass  # a peer that was told nonsense may answer in kind
        finally:
            self.closed.set()
            self._pong.set()
            for call in self._calls.values():
                call.on_end(call.reset_code)

    def _heeded(self, data: bytes) -> bytes:
        """Whole frames but those to ignore, and GOAWAY: after one h2 would have nothing more of the streams that may still end."""
        self._received += data
        kept = b""
        while len(self._received) >= FRAME_HEADER and len(self._received) >= (
            size := FRAME_HEADER + int.from_bytes(self._received[:3], "big")
        ):
            frame, self._received = self._received[:size], self._received[size:]
            if frame[3] == GOAWAY:
                self.goaway = int.from_bytes(frame[FRAME_HEADER + 4 : FRAME_HEADER + 8], "big")
            elif frame[3] not in self._ignored:
                kept += frame
        return kept

    def _on_event(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                self._calls[event.stream_id].on_headers(event.headers)
            case h2.events.DataReceived():
                self._calls[event.stream_id].on_data(event.data, event.flow_controlled_length)
            case h2.events.StreamEnded():
                self._calls[event.stream_id].on_end()
            case h2.events.StreamReset():
                self._calls[event.stream_id].on_end(int(event.error_code))
            case h2.events.PingAckReceived():
                self.num_pongs += 1
                self._pong.set()


@asynccontextmanager
async def raw_connection(address: str, *, window: int = DEFAULT_WINDOW, ack_settings: bool = True) -> AsyncIterator[RawConnection]:
    """A connection whose streams let the server send `window` bytes each, before it is given more. `ack_settings`: heed the server's."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    connection = RawConnection(reader, writer, address, ack_settings)
    connection.h2.local_settings = Settings(client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
    connection.h2.initiate_connection()
    await connection.flush()
    try:
        yield connection
    finally:
        await connection.finish()
