"""`Ring`: hidden states on their way from stage to stage, and from the last stage back to the first.

Each rank has a connection to the rank with its index in the stage behind its own, and one to that in the stage before. Knows nothing of
what the stages compute.
"""

from __future__ import annotations

import json
import select
import time
from collections import deque
from collections.abc import Callable
from socket import socket

from aengine import __version__
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.parallel.channel import Channel, ChannelClosedError, ChannelTimeoutError
from aengine.parallel.join import JoinError, accept_ranks, join_driver, listen, split_address
from aengine.parallel.messages import Addresses, Hidden, Message, encode
from aengine.parallel.shard import Shard
from aengine.scheduler.plan import IntArray

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""How a host reaches itself where it listens at all of its addresses."""


_SILENT = 30.0  # seconds after which it is logged who is waited for


class Ring:
    """All methods but `close` belong to one thread."""

    def __init__(self, following: Channel, preceding: Channel, timeout: float) -> None:
        """`timeout`: seconds after which a rank that does not send or read counts as hung."""
        self._following = following
        self._preceding = preceding
        self._timeout = timeout
        self._received: deque[Message] = deque()  # before it was asked for
        self._poller = select.poll()
        self._poller.register(following.fileno(), select.POLLOUT)
        self._poller.register(preceding.fileno(), select.POLLIN)

    def send(self, step: int, words: IntArray) -> None:
        """To the next stage. As long as that does not read, what the stage before sends is received, so that no two stages wait for each
        other to read. This and `receive` raise ChannelClosedError and ChannelTimeoutError."""
        deadline = time.monotonic() + self._timeout
        rest = memoryview(encode(Hidden(step, words)))
        while rest := self._following.send_some(rest):
            ready = [fd for fd, _ in self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000)]
            if not ready:
                raise ChannelTimeoutError(f"{self._following.peer} does not read")
            if self._preceding.fileno() in ready and (message := self._preceding.receive_some()) is not None:
                self._received.append(message)

    def receive(self, step: int) -> IntArray:
        """What the stage before sends of a step; of the steps in their order."""
        message = self._received.popleft() if self._received else self._preceding.receive(self._timeout)
        if not isinstance(message, Hidden) or message.step != step:
            raise ChannelClosedError(self._preceding.peer, f"sent {message} instead of the hidden states of step {step}")
        return message.words

    def close(self) -> None:
        """May be called from any thread: who waits in `send` or `receive` gets ChannelClosedError."""
        self._following.close()
        self._preceding.close()


def open_port(config: EngineConfig, own_host: str) -> tuple[socket, str]:
    """Where this rank waits for that of the stage before, and its address for others. `own_host` is this host as others reach it; "" on the
    driver's host, whose name is left out where it is not known."""
    host = own_host or ("127.0.0.1" if config.rank_address is None else split_address(config.rank_address)[0])
    port = listen(f"[{host}]:0")
    return port, f"[{'' if host in LOOPBACK else host}]:{port.getsockname()[1]}"


def connect_ring(
    shard: Shard, port: socket, addresses: Addresses, driver_host: str, timeout: float, check: Callable[[], object] = lambda: None
) -> Ring:
    """All ranks call it; `port` is this rank's, and is closed. `driver_host` is how it reaches the driver; "" on the driver's host. `check`
    is called while it waits, and may raise. Raises ModelLoadError."""
    secret = addresses.secret.encode()
    before, behind = ((shard.rank + way * shard.size) % shard.num_ranks for way in (-1, 1))

    def join() -> Channel:
        host, number = split_address(json.loads(addresses.by_rank)[behind])
        own = port.getsockname()[0]
        try:
            channel = join_driver(f"[{host or driver_host or LOOPBACK.get(own, own)}]:{number}", secret, shard.rank, __version__)
        except JoinError as error:
            raise ModelLoadError(f"rank {shard.rank} does not reach rank {behind}: {error}") from None
        channel.peer = f"rank {behind}"
        return channel

    def accept() -> Channel:
        return next(channel for _, channel, _ in accept_ranks(port, secret, {before}, __version__, check, _SILENT))

    with port:
        if shard.stage:
            following, preceding = join(), accept()
        else:  # that of the first stage is the first to accept, so that not all wait for each other
            preceding, following = accept(), join()
    return Ring(following, preceding, timeout)
