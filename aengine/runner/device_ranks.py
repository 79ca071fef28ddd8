"""`connect_ranks`: the collectives between the torch decoders of a stage's ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from aengine.layers.collectives import Collectives
from aengine.layers.process_group import gloo_group
from aengine.runner.setup import ExecutorSetup

_CONNECT = timedelta(minutes=10)
"""Time for all ranks to begin."""


def connect_ranks(setup: ExecutorSetup) -> Collectives | None:
    """Waits for the other ranks of the stage; None: there are none. If any rank fails, what waits for it raises an error."""
    ranks, shard = setup.ranks, replace(setup.shard, splits_embedding=True)
    if ranks is None or shard.size == 1:
        return None
    (host, port), driver = ranks.store, setup.followers
    listens = None if driver is None else os.dup(driver.store_fd)
    tcp = TCPStore(host, port, None, listens is not None, _CONNECT, wait_for_workers=False, master_listen_fd=listens)
    store = PrefixStore(f"stage {shard.stage}", tcp)
    group = gloo_group(store, shard.index, shard.size, timedelta(seconds=setup.config.step_timeout), host)
    ranks.on_failure(group.abort)
    return Collectives(shard, group)
