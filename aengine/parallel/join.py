"""How ranks of other hosts join the driver: a TCP port that is open until all are there, and a secret that both sides know.

The driver sends `_GREETING` and 32 random bytes. The rank answers with 32 random bytes of its own and an HMAC of both, and the driver with
another HMAC. Until then it reads 64 bytes of a connection and no more. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import random
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aengine.api.errors import ConfigError, ModelLoadError
from aengine.parallel.channel import Channel, ChannelClosedError, ChannelTimeoutError
from aengine.parallel.messages import Hello, Refused

_log = logging.getLogger("aengine")
_GREETING = b"aengine rank 1\n"
_NONCE = 32  # bytes
_PROOF = hashlib.sha256().digest_size
SHORTEST_SECRET = 16  # bytes
JOIN_SECONDS = 600.0
"""All ranks have joined within this time."""
ANSWER_SECONDS = 10.0
"""Between two messages of the handshake."""
MOST_STRANGERS = 64
"""Connections that have not shown that they know the secret; the oldest ones give way."""
_CHECK_SECONDS = 0.2
_NOT_EPHEMERAL = 20000, 32000  # ports that neither connections nor others that ask for any port get


class JoinError(Exception):
    """A rank cannot join the driver."""


def read_secret(path: str) -> bytes:
    """Returns the content of a secret file without white space around it. Raises ConfigError about rank_secret_file if it cannot be read or
    has fewer than `SHORTEST_SECRET` bytes."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError.of("rank_secret_file", f"{path!r} cannot be read: {error.strerror}") from None
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError.of("rank_secret_file", f"{path!r} has {len(secret)} bytes; a secret has at least {SHORTEST_SECRET}")
    return secret


def split_address(address: str) -> tuple[str, int]:
    """host:port, where the host may be an IPv6 address in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this host that nobody gets who asks for any, so that it is free until it is listened on, unless somebody chooses it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = random.randrange(*_NOT_EPHEMERAL)
        with suppress(OSError), socket.create_server((host, port), family=family):
            return port


def listen(address: str) -> socket.socket:
    """Opens the TCP port that ranks of other hosts join at. Raises ConfigError about rank_address."""
    host, port = split_address(address)
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError.of("rank_address", f"{address!r} cannot be listened on: {error.strerror or error}") from None


def _proof(secret: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, who + first + second, "sha256")


@dataclass(eq=False, slots=True)
class _Stranger:
    """A connection that has not shown yet that it knows the secret."""

    stream: socket.socket
    host: str
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE))
    since: float = field(default_factory=time.monotonic)
    received: bytes = b""


def accept_ranks(
    port: socket.socket, secret: bytes, wanted: set[int], version: str, check: Callable[[], object], silent: float = 0.0
) -> Iterator[tuple[int, Channel, Hello]]:
    """The ranks in `wanted`, as they join. Others, and connections without the secret, are refused and logged. `check` may raise to end the
    waiting, which is logged after `silent` seconds. Raises ModelLoadError for ranks that do not come."""
    missing = set(wanted)
    began = logged = time.monotonic()
    host, number = port.getsockname()[:2]
    port.setblocking(False)
    strangers: list[_Stranger] = []
    with selectors.DefaultSelector() as selector:
        selector.register(port, selectors.EVENT_READ)

        def drop(stranger: _Stranger, why: str = "") -> None:
            strangers.remove(stranger)
            selector.unregister(stranger.stream)
            if why:
                stranger.stream.close()
                _log.warning("a connection from %s is refused: %s", stranger.host, why)

        try:
            while missing:
                check()
                now = time.monotonic()
                if now - began > JOIN_SECONDS:
                    raise ModelLoadError(f"rank {min(missing)} did not join at {host}:{number} within {JOIN_SECONDS:g} s")
                if now - began >= silent and (now - logged >= 30 or logged == began):
                    logged = now
                    _log.info("waiting at %s:%d for rank %s", host, number, ", ".join(map(str, sorted(missing))))
                for stranger in [each for each in strangers if now - each.since > ANSWER_SECONDS]:
                    drop(stranger, "it does not answer")
                for key, _ in selector.select(_CHECK_SECONDS):
                    if key.fileobj is port:
                        new = _accept(port)
                        if new is not None:
                            if len(strangers) == MOST_STRANGERS:
                                drop(strangers[0], "too many others come after it")
                            strangers.append(new)
                            selector.register(new.stream, selectors.EVENT_READ, new)
                        continue
                    stranger = key.data
                    proven = _read_proof(stranger, secret)
                    if proven is None:
                        continue
                    drop(stranger, "" if proven else "it does not know the secret")
                    if proven and (found := _hello(stranger, missing, wanted, version)) is not None:
                        missing.discard(found[0])
                        yield found
        finally:
            for stranger in strangers:
                stranger.stream.close()


def _accept(port: socket.socket) -> _Stranger | None:
    try:
        stream, address = port.accept()
    except OSError:
        return None  # it went away
    stranger = _Stranger(stream, str(address[0]))
    stream.setblocking(False)
    with suppress(OSError):
        stream.send(_GREETING + stranger.nonce)
    return stranger


def _read_proof(stranger: _Stranger, secret: bytes) -> bool | None:
    """Whether it knows the secret; None: it has not said everything yet."""
    try:
        data = stranger.stream.recv(_NONCE + _PROOF - len(stranger.received))
    except BlockingIOError:
        return None
    except OSError:
        return False
    stranger.received += data
    if data and len(stranger.received) < _NONCE + _PROOF:
        return None
    nonce, proof = stranger.received[:_NONCE], stranger.received[_NONCE:]
    if not data or not hmac.compare_digest(proof, _proof(secret, b"rank", stranger.nonce, nonce)):
        return False
    with suppress(OSError):
        stranger.stream.send(_proof(secret, b"driver", nonce, stranger.nonce))
    return True


def _hello(stranger: _Stranger, missing: set[int], wanted: set[int], version: str) -> tuple[int, Channel, Hello] | None:
    """Receives the `Hello` of a connection that knows the secret, and returns its rank, channel and message. None: the rank was refused and
    told why, and the connection is closed."""
    channel = Channel(stranger.stream, f"the rank at {stranger.host}")
    try:
        hello = channel.receive(ANSWER_SECONDS)
        if not isinstance(hello, Hello):
            reason = "it did not begin with its rank"
        elif hello.version != version:
            reason = f"its version of aengine is {hello.version}, the driver's is {version}"
        elif hello.rank not in wanted:
            reason = f"the ranks of other hosts are {', '.join(map(str, sorted(wanted)))}"
        elif hello.rank not in missing:
            reason = "there is such a rank already"
        else:
            channel.peer = f"rank {hello.rank} (host {hello.host})"
            return hello.rank, channel, hello
        channel.send(Refused(reason), ANSWER_SECONDS)
        _log.warning("%s is refused: %s", f"rank {hello.rank} of {hello.host}" if isinstance(hello, Hello) else channel.peer, reason)
    except (ChannelClosedError, ChannelTimeoutError) as error:
        _log.warning("a connection from %s is refused: %s", stranger.host, error)
    channel.close()
    return None


def join_driver(
    address: str, secret: bytes, rank: int, version: str, seconds: float = JOIN_SECONDS, check: Callable[[], object] = lambda: None
) -> Channel:
    """Connects to the driver, which may come up within `seconds`. `check` is called while it waits, and may raise. Raises JoinError."""
    host, number = split_address(address)
    deadline = time.monotonic() + seconds
    while True:
        check()
        try:
            stream = socket.create_connection((host, number), timeout=ANSWER_SECONDS)
            if stream.getsockname() != stream.getpeername():
                break
            stream.close()  # nobody listens, and the system has taken that port for this end
            raise OSError("the connection is to itself")
        except OSError as error:
            if time.monotonic() > deadline:
                raise JoinError(f"there is no driver at {address}: {error.strerror or error}") from None
            time.sleep(0.5)
    nonce = secrets.token_bytes(_NONCE)
    try:
        if (greeting := _read(stream, len(_GREETING))) != _GREETING:
            raise JoinError(f"what answers at {address} is no driver of this version: it says {greeting!r}")
        theirs = _read(stream, _NONCE)
        stream.sendall(nonce + _proof(secret, b"rank", theirs, nonce))
        if not hmac.compare_digest(_read(stream, _PROOF), _proof(secret, b"driver", nonce, theirs)):
            raise JoinError(f"the driver at {address} has another secret")
    except (OSError, JoinError) as error:
        stream.close()
        if isinstance(error, JoinError):
            raise
        raise JoinError(f"the driver at {address} does not answer: {error.strerror or error}") from None
    channel = Channel(stream, f"the driver at {address}")
    channel.send(Hello(rank, version, socket.gethostname(), os.getpid()))
    return channel


def _read(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = stream.recv(size - len(data))
        if not piece:
            raise JoinError("the driver closed the connection: the secrets differ, or it waits for no more ranks")
        data += piece
    return data
