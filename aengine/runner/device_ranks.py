"""What connects the ranks of a stage: the collectives of the torch decoder, the exchange of the CPU kernels."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from aengine.kernels.cpu.exchange import Exchange, GroupExchange
from aengine.kernels.cpu.library import CpuKernels
from aengine.layers.collectives import Collectives
from aengine.parallel.ring import WAITED, WAITED_IN_STAGE
from aengine.runner.setup import ExecutorSetup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CONNECT = timedelta(minutes=10)
"""Time for all ranks to begin."""


def connect_ranks(setup: ExecutorSetup) -> Collectives | None:
    """Waits for the other ranks of the stage; None: there are none. When a rank fails, what waits for it raises CollectiveError."""
    if setup.shard.size == 1:
        return None
    return Collectives(replace(setup.shard, splits_embedding=True), _group(setup))


def exchange_of(setup: ExecutorSetup, kernels: CpuKernels) -> Exchange | GroupExchange:
    """With the other ranks of the stage: over shared memory if they are all on this host, else by a process group. If any rank fails, what
    waits for it raises an error."""
    ranks, shard = setup.ranks, setup.shard
    assert ranks is not None
    if ranks.exchange_fd is None:
        return GroupExchange(_group(setup))
    exchange = Exchange(kernels, ranks.exchange_fd, shard.index, shard.size, _waited(setup))
    ranks.on_failure(exchange.abort)
    return exchange


def _waited(setup: ExecutorSetup) -> float:
    """Seconds after which a rank counts as hung."""
    return (WAITED if setup.shard.num_stages == 1 else WAITED_IN_STAGE) * setup.config.step_timeout


def _group(setup: ExecutorSetup) -> ProcessGroup:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from aengine.layers.process_group import gloo_group, nccl_group  # not every torch has what they import

    ranks, shard = setup.ranks, setup.shard
    assert ranks is not None
    (host, port), driver = ranks.store, setup.followers
    listens = None if driver is None else os.dup(driver.store_fd)
    tcp = TCPStore(host, port, None, listens is not None, _CONNECT, wait_for_workers=False, master_listen_fd=listens)
    store = PrefixStore(f"stage {shard.stage}", tcp)
    if setup.device.type == "cuda":
        group = nccl_group(store, shard.index, shard.size, setup.device)
        ranks.on_failure(lambda: threading.Thread(target=group.abort, name="aengine-abort", daemon=True).start())
        return group
    # It ends by itself what waits for a rank that is gone.
    return gloo_group(store, shard.index, shard.size, timedelta(seconds=_waited(setup)), host)
