"""Hidden states go from stage to stage."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hang_guard import HANG_SECONDS

from aengine.api.config import EngineConfig
from aengine.parallel.channel import Channel
from aengine.parallel.messages import StageAddresses
from aengine.parallel.ring import Ring, StageError, connect_ring, open_port
from aengine.parallel.shard import Shard

SECONDS = float(HANG_SECONDS)


@pytest.fixture
def rings() -> Iterator[list[Ring]]:
    """Of three stages, in one process."""
    pairs = [socket.socketpair() for _ in range(3)]
    rings = [
        Ring(Shard(0, 1, i, 3), Channel(pairs[i][0], "the next"), Channel(pairs[i - 1][1], "the one before"), SECONDS) for i in range(3)
    ]
    yield rings
    for ring in rings:
        ring.close()


def test_ranks_find_those_with_their_index_in_the_stages_beside_theirs() -> None:
    shards = [Shard(index, 2, stage, 3) for stage in range(3) for index in range(2)]
    ports, addresses = zip(*(open_port(EngineConfig(model="none"), "") for _ in shards), strict=True)
    everywhere = StageAddresses(json.dumps(addresses), "a secret of the driver")

    def turn(shard: Shard, port: socket.socket) -> list[int]:
        ring = connect_ring(shard, port, everywhere, "", SECONDS)
        seen = [shard.rank]
        for step in range(3):
            ring.send(step, np.array(seen, np.int32))
            seen = [*ring.receive(step).tolist(), shard.rank]
        ring.close()
        return seen

    with ThreadPoolExecutor(len(shards)) as threads:
        assert list(threads.map(turn, shards, ports)) == [[(rank + 2 * i) % 6 for i in range(4)] for rank in range(6)]


def test_stages_that_all_send_at_once_do_not_wait_for_each_other(rings: list[Ring]) -> None:
    """More than what sockets hold."""
    words = np.arange(1 << 20, dtype=np.int32)

    def turn(ring: Ring) -> bool:
        for step in range(3):
            ring.send(step, words + step)
        return all(np.array_equal(ring.receive(step), words + step) for step in range(3))

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(turn, rings)) == [True] * 3


def test_who_waits_is_told_that_the_ring_is_closed(rings: list[Ring]) -> None:
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(rings[0].receive, 0)
        rings[0].close()
        with pytest.raises(StageError, match="rank 2"):
            waits.result(SECONDS)
    with pytest.raises(StageError, match="rank 0") as caught:
        rings[1].receive(0)
    assert not caught.value.hung


def test_a_stage_that_does_nothing_is_hung() -> None:
    (one, _), (other, _) = streams = socket.socketpair(), socket.socketpair()
    ring = Ring(Shard(1, 2, 1, 3), Channel(one, "the next"), Channel(other, "the one before"), 0.05)
    with pytest.raises(StageError, match="rank 5: it does not read") as caught:
        ring.send(0, np.zeros(1 << 22, np.int32))
    assert (caught.value.rank, caught.value.hung) == (5, True)
    with pytest.raises(StageError, match="rank 1") as caught:
        ring.receive(0)
    assert (caught.value.rank, caught.value.hung) == (1, True)
    ring.close()
    for _, theirs in streams:
        theirs.close()


def test_steps_come_in_their_order(rings: list[Ring]) -> None:
    rings[0].send(4, np.zeros(1, np.int32))
    with pytest.raises(StageError, match=r"it sent .*step=4.* instead of the hidden states of step 3"):
        rings[1].receive(3)
