"""A rank without a model: it writes what it received into the shared memory of its stage, at its index. Run like `aengine.runner.follower`;
the first argument is what it does besides:

    exit      ends with code 3 after its first step
    raise     raises after its first step
    refuse    raises ModelLoadError instead of loading
    other     says another dtype
    blame     rank 1 waits in vain for rank 2 in its first step
    deaf      never asks for a plan
    late      does not end when it is told to
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading

import numpy as np

from aengine.api.errors import ModelLoadError, RankHungError
from aengine.parallel import follower
from aengine.parallel.follower import FollowerRanks, run_worker
from aengine.parallel.messages import ApplyChange, ChangePrepared, LastTokens, PagesRead, PrepareChange, ReadPages, Sizes

SLOT = 4
"""int32 of a rank: pid, steps done, sum of the rows, the logits indices and the changes applied before, sum of the last tokens."""


def prepared(ranks: FollowerRanks, message: PrepareChange) -> ChangePrepared:
    """A rank cannot prepare a change that is its name, and dies of the change "exit"."""
    if message.change == "exit":
        os._exit(3)
    refused = message.change == str(ranks.shard.rank)
    return ChangePrepared(message.number, "AdapterError" if refused else "", "not for me" if refused else "", f"part {ranks.shard.rank}")


def run(ranks: FollowerRanks, what: str) -> None:
    assert "torch" not in sys.modules
    logging.getLogger("aengine").info("%d threads on cores %s", ranks.threads, sorted(os.sched_getaffinity(0)))
    if what == "refuse":
        raise ModelLoadError("there is no such model")
    ranks.on_failure(lambda: print("told to give up", file=sys.stderr, flush=True))
    ranks.progress(1, 2)
    ranks.same({"dtype": "float16" if what == "other" else "float32"})
    ranks.agree(Sizes(100 - ranks.shard.rank, 64, ranks.shard.rank, f"part {ranks.shard.rank}"))
    # A rank of another host shares no memory with anyone.
    memory = mmap.mmap(-1, 4096) if ranks.exchange_fd is None else mmap.mmap(ranks.exchange_fd, 0)
    slot = np.frombuffer(memory, np.int32)[ranks.shard.index * SLOT :][:SLOT]
    slot[0] = os.getpid()
    if what == "deaf":
        threading.Event().wait()
    applied = 0  # the sum of the numbers of changes
    ranks.on_change = lambda message: isinstance(message, PrepareChange) and ranks.send(prepared(ranks, message))
    while (plan := ranks.next_task()) is not None:
        if isinstance(plan, ApplyChange):
            applied += plan.number
            continue
        if isinstance(plan, ReadPages):
            if what == "exit":
                os._exit(3)
            ranks.send(PagesRead((plan.pages + 100 * ranks.shard.rank).astype(np.uint8)))
            continue
        slot[2] = plan.rows.sum() + applied
        while not isinstance(message := ranks.receive(), LastTokens):
            slot[2] += message.indices.sum()
        slot[3] = message.tokens.sum()
        slot[1] = plan.step + 1
        if what == "exit":
            print("it had enough", file=sys.stderr, flush=True)
            os._exit(3)
        if what == "blame" and ranks.shard.rank == 1:
            raise RankHungError("rank 2 did not come", 2)
        if what == "raise":
            raise RuntimeError("something broke")
    logging.getLogger("aengine").info("did %d steps", slot[1])
    if what == "late":
        threading.Event().wait()


if __name__ == "__main__":
    follower.ABORT_SECONDS = 0.1
    sys.exit(run_worker(sys.argv[2:], os.environ, lambda ranks: run(ranks, sys.argv[1])))
