"""`Channel`: messages over a stream socket. The sockets of one host are pairs, those between hosts TCP; a peer that is gone is noticed by
the end of the stream."""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress

from aengine.parallel.messages import FRAME, Message, MessageError, check_header, decode, encode

FRAME_SECONDS = 60.0
"""What has begun to arrive is whole within this time."""
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000))


class ChannelClosedError(Exception):
    """The peer is gone, or sent what is no message. Nothing more can be sent or received. `how` says it without the peer's name."""

    def __init__(self, peer: str, how: str) -> None:
        self.how = how
        super().__init__(f"{peer} {how}")


class ChannelTimeoutError(Exception):
    """The peer did not send, or read, for too long."""


class Channel:
    """One thread at a time receives; any thread may send."""

    def __init__(self, stream: socket.socket, peer: str) -> None:
        """`peer` is what errors call the other side."""
        self.peer = peer
        self.own_host = "" if stream.family == socket.AF_UNIX else str(stream.getsockname()[0])
        self.peer_host = "" if stream.family == socket.AF_UNIX else str(stream.getpeername()[0])
        self._socket = stream
        self._sending = threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._kind: int | None = None  # of the message that arrives, once it is known
        self._arriving, self._arrived = bytearray(FRAME.size), 0  # its header, then what follows; and how much of that is there
        stream.setblocking(False)
        if stream.family != socket.AF_UNIX:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):
                    stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._readable.register(stream, select.POLLIN)
        self._writable.register(stream, select.POLLOUT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, timeout: float | None = None) -> None:
        """Waits at most `timeout` seconds for a peer that does not read. Raises ChannelClosedError, or ChannelTimeoutError, after which
        the channel cannot be used."""
        self.send_frame(encode(message), timeout)

    def send_frame(self, frame: bytes, timeout: float | None = None) -> None:
        """Sends an encoded message, as `send`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._sending:
            rest = memoryview(frame)
            while rest := self.send_some(rest):
                self._wait(self._writable, deadline)

    def send_some(self, data: memoryview) -> memoryview:
        """Sends as much of a frame as it can without waiting; returns the rest."""
        try:
            while data:
                data = data[self._socket.send(data, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._closed(error) from None
        return data

    def receive(self, timeout: float | None = None) -> Message:
        """Waits at most `timeout` seconds for a message to begin. Raises ChannelTimeoutError, or ChannelClosedError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self.receive_some()) is None:
            if not self._has_begun:
                self._wait(self._readable, deadline)
                continue
            try:
                self._wait(self._readable, time.monotonic() + FRAME_SECONDS)
            except ChannelTimeoutError as error:
                raise ChannelClosedError(self.peer, f"sent what is no message: {error}") from None
        return message

    def receive_some(self) -> Message | None:
        """The next message, if the rest of it has arrived."""
        while True:
            try:
                count = self._socket.recv_into(memoryview(self._arriving)[self._arrived :])
            except BlockingIOError:
                return None
            except OSError as error:
                raise self._closed(error) from None
            if count == 0:
                raise ChannelClosedError(self.peer, "closed the connection")
            self._arrived += count
            if self._arrived < len(self._arriving):
                continue
            try:
                if self._kind is None:
                    size, self._kind = check_header(self._arriving)
                    self._arriving, self._arrived = bytearray(size), 0
                    if size:
                        continue
                message = decode(self._kind, self._arriving)
            except MessageError as error:
                raise ChannelClosedError(self.peer, f"sent what is no message: {error}") from None
            self._kind, self._arriving, self._arrived = None, bytearray(FRAME.size), 0
            return message

    @property
    def _has_begun(self) -> bool:
        return self._kind is not None or self._arrived > 0

    def close(self) -> None:
        """May be called from any thread: who waits in `send` or `receive` gets ChannelClosedError."""
        with suppress(OSError):  # the peer may be faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _wait(self, poller: select.poll, deadline: float | None) -> None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not poller.poll(None if left is None else left * 1000):
            raise ChannelTimeoutError(f"{self.peer} does not answer")

    def _closed(self, error: OSError) -> ChannelClosedError:
        return ChannelClosedError(self.peer, f"is gone: {error.strerror or error}")
