"""What connects the ranks of a stage: the collectives of the torch decoder, the exchange of the CPU kernels. And replicas that share
experts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from aengine.kernels.cpu.exchange import Exchange, GroupExchange
from aengine.kernels.cpu.library import CpuKernels
from aengine.layers.collectives import Collectives
from aengine.parallel.driver import CHECK_SECONDS
from aengine.parallel.ring import WAITED, WAITED_IN_STAGE
from aengine.parallel.shard import Shard
from aengine.runner.setup import ExecutorSetup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

_CONNECT = timedelta(minutes=10)
"""Time for all ranks to begin."""
_CONNECT_AT_ONCE = timedelta(minutes=1)
"""The same, where all have just been heard of."""


def connect_ranks(setup: ExecutorSetup, check: Callable[[], object]) -> Collectives | None:
    """Waits for the other ranks of the stage; None: there are none. `check` is called meanwhile, and may raise. When a rank fails, what
    waits for it raises CollectiveError."""
    if setup.shard.size == 1:
        return None
    return Collectives(replace(setup.shard, splits_embedding=True), _group(setup, check))


def connect_replicas(setup: ExecutorSetup) -> Collectives | None:
    """Waits for the other replicas that share the experts; None: there are none. When one fails, what waits for it raises
    CollectiveError."""
    replicas = setup.replicas
    if replicas is None:
        return None
    store = _store(replicas.store, replicas.store_fd, _CONNECT_AT_ONCE)
    return Collectives(replicas.shard, _gloo(store, replicas.shard, replicas.store[0], _waited(setup)))


def exchange_of(setup: ExecutorSetup, kernels: CpuKernels) -> Exchange | GroupExchange:
    """With the other ranks of the stage: over shared memory if they are all on this host, else by a process group. If any rank fails, what
    waits for it raises an error."""
    ranks, shard = setup.ranks, setup.shard
    assert ranks is not None
    if ranks.exchange_fd is None:
        return GroupExchange(_group(setup))
    driver = setup.followers
    if driver is not None and driver.num_local < shard.num_ranks:
        driver.answers = _store(driver.store, driver.store_fd)  # to the ranks of later stages, which are on other hosts
    exchange = Exchange(kernels, ranks.exchange_fd, shard.index, shard.size, _waited(setup))
    ranks.on_failure(exchange.abort)
    return exchange


def _waited(setup: ExecutorSetup) -> float:
    """Seconds after which a rank counts as hung."""
    return (WAITED if setup.shard.num_stages == 1 else WAITED_IN_STAGE) * setup.config.step_timeout


def _group(setup: ExecutorSetup, check: Callable[[], object] = lambda: None) -> ProcessGroup:
    from torch._C._distributed_c10d import PrefixStore

    from aengine.layers.process_group import nccl_group  # not every torch has what it imports

    ranks, shard, driver = setup.ranks, setup.shard, setup.followers
    assert ranks is not None
    store = PrefixStore(f"stage {shard.stage}", _store(ranks.store, None if driver is None else driver.store_fd))
    if setup.device.type == "cuda":

        def check_ranks() -> None:
            check()
            if driver is not None:
                driver.check()

        group = _waited_for(lambda: nccl_group(store, shard.index, shard.size, setup.device), check_ranks)
        ranks.on_failure(lambda: threading.Thread(target=group.abort, name="aengine-abort", daemon=True).start())
        return group
    return _gloo(store, shard, ranks.store[0], _waited(setup))


def _waited_for(connect: Callable[[], ProcessGroup], check: Callable[[], object]) -> ProcessGroup:
    """What `connect` returns. NCCL waits for ever for a rank that ended before it came, and cannot be told to stop: a thread of its own
    waits there, while this one calls `check`, which raises."""
    connected: Future[ProcessGroup] = Future()

    def run() -> None:
        try:
            connected.set_result(connect())
        except BaseException as error:  # the caller raises it
            connected.set_exception(error)

    threading.Thread(target=run, name="aengine-connect", daemon=True).start()
    while not wait([connected], CHECK_SECONDS).done:
        check()
    return connected.result()


def _store(address: tuple[str, int], listening_fd: int | None, timeout: timedelta = _CONNECT) -> Store:
    """`listening_fd` listens there, if this process is the one that does."""
    from torch._C._distributed_c10d import TCPStore

    listens = None if listening_fd is None else os.dup(listening_fd)
    return TCPStore(*address, None, listens is not None, timeout, wait_for_workers=False, master_listen_fd=listens)


def _gloo(store: Store, shard: Shard, host: str, waited: float) -> ProcessGroup:
    """It ends by itself what waits for a rank that is gone."""
    from aengine.layers.process_group import gloo_group

    return gloo_group(store, shard.index, shard.size, timedelta(seconds=waited), host)
