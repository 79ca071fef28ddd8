"""`Ring`: hidden states on their way from stage to stage, and from the last stage back to the first.

Each rank has a connection to the rank with its index in the stage behind its own, and one to that in the stage before. Knows nothing of
what the stages compute.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aengine.api import VERSION
from aengine.api.config import EngineConfig
from aengine.api.errors import ModelLoadError
from aengine.parallel.channel import Channel, ChannelClosedError, ChannelTimeoutError
from aengine.parallel.join import JoinError, accept_ranks, join_driver, listen, split_address
from aengine.parallel.messages import Hidden, Message, StageAddresses, encode
from aengine.parallel.shard import Shard
from aengine.scheduler.plan import IntArray

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""How a host reaches itself where it listens at all of its addresses."""
WAITED, WAITED_IN_STAGE = 0.8, 0.5
"""Of step_timeout: how long ranks wait for each other; where there are several stages, those of one stage."""
_SILENT = 30.0  # seconds after which it is logged who is waited for


class StageError(Exception):
    """A rank of the stage before or behind this one is gone, or `hung`."""

    def __init__(self, rank: int, error: ChannelClosedError | ChannelTimeoutError) -> None:
        super().__init__(f"rank {rank}: {error}")
        self.rank = rank
        self.hung = isinstance(error, ChannelTimeoutError)


class Ring:
    """All methods but `close` belong to one thread."""

    def __init__(self, shard: Shard, following: Channel, preceding: Channel, timeout: float) -> None:
        """`timeout`: seconds after which a rank that does not send or read counts as hung."""
        self._before, self._behind = _neighbours(shard)
        self._following = following
        self._preceding = preceding
        self._timeout = timeout
        self._received: deque[Message] = deque()  # before it was asked for
        self._poller = select.poll()
        self._poller.register(following.fileno(), select.POLLOUT)
        self._poller.register(preceding.fileno(), select.POLLIN)

    def send(self, step: int, words: IntArray) -> None:
        """To the next stage. As long as that does not read, what the stage before sends is received, so that no two stages wait for each
        other to read. This and `receive` raise StageError."""
        deadline = time.monotonic() + self._timeout
        rest = memoryview(encode(Hidden(step, words)))
        with self._naming(self._behind):
            while rest := self._following.send_some(rest):
                ready = [fd for fd, _ in self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000)]
                if not ready:
                    raise ChannelTimeoutError("it does not read")
                if self._preceding.fileno() in ready:
                    with self._naming(self._before):
                        message = self._preceding.receive_some()
                    if message is not None:
                        self._received.append(message)

    def receive(self, step: int) -> IntArray:
        """What the stage before sends of a step; of the steps in their order."""
        with self._naming(self._before):
            message = self._received.popleft() if self._received else self._preceding.receive(self._timeout)
            if not isinstance(message, Hidden) or message.step != step:
                raise ChannelClosedError("it", f"sent {message} instead of the hidden states of step {step}")
        return message.words

    def close(self) -> None:
        """May be called from any thread: who waits in `send` or `receive` gets StageError."""
        self._following.close()
        self._preceding.close()

    @contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (ChannelClosedError, ChannelTimeoutError) as error:
            raise StageError(rank, error) from None


def open_port(config: EngineConfig, own_host: str) -> tuple[socket.socket, str]:
    """Where this rank waits for that of the stage before, and its address for others. `own_host` is this host as others reach it; "" on the
    driver's host, whose name is left out where it is not known."""
    host = own_host or ("127.0.0.1" if config.rank_address is None else split_address(config.rank_address)[0])
    port = listen(f"[{host}]:0")
    return port, f"[{'' if host in LOOPBACK else host}]:{port.getsockname()[1]}"


def connect_ring(
    shard: Shard,
    port: socket.socket,
    addresses: StageAddresses,
    driver_host: str,
    step_timeout: float,
    check: Callable[[], object] = lambda: None,
) -> Ring:
    """All ranks call it; `port` is this rank's, and is closed. `driver_host` is how it reaches the driver; "" on the driver's host. `check`
    is called while it waits, and may raise. Raises ModelLoadError."""
    secret = addresses.secret.encode()
    before, behind = _neighbours(shard)

    def join() -> Channel:
        host, number = split_address(json.loads(addresses.by_rank)[behind])
        own = port.getsockname()[0]
        try:
            channel = join_driver(f"[{host or driver_host or LOOPBACK.get(own, own)}]:{number}", secret, shard.rank, VERSION)
        except JoinError as error:
            raise ModelLoadError(f"rank {shard.rank} does not reach rank {behind}: {error}") from None
        channel.peer = f"rank {behind}"
        return channel

    def accept() -> Channel:
        return next(channel for _, channel, _ in accept_ranks(port, secret, {before}, VERSION, check, _SILENT))

    with port:
        if shard.stage:
            following, preceding = join(), accept()
        else:  # that of the first stage is the first to accept, so that not all wait for each other
            preceding, following = accept(), join()
    # The first to give up is the one behind a rank that hangs, and the last one the driver.
    share = 0.7 + 0.3 * shard.stage / shard.num_stages if shard.stage else 1.0
    return Ring(shard, following, preceding, share * WAITED * step_timeout)


def _neighbours(shard: Shard) -> tuple[int, int]:
    """The ranks of the stage before and behind."""
    return (shard.rank - shard.size) % shard.num_ranks, (shard.rank + shard.size) % shard.num_ranks
