"""A rank with something wrong. Run like `aengine.runner.follower`; the first argument says what:

digest    its checkpoint is another one
memory    it has no memory
level     it has other CPU kernels
step      it raises in its third step
slow      its fifth step does not end
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from typing import Any

from aengine.parallel.follower import FollowerRanks, run_worker

_BEFORE = {"step": 2, "slow": 4}  # steps that are as ever


def run(ranks: FollowerRanks, what: str) -> None:
    from aengine.runner import follower, runner
    from aengine.runner.cpu import model as host_model

    if what == "digest":
        runner.checkpoint_digest = lambda *_: "0123456789abcdef"
    if what == "memory":
        host_model.free_host_memory = lambda: 1 << 20
    if what == "level":
        os.environ["AENGINE_CPU_LEVEL"] = "portable"
    steps = itertools.count()

    class Runner(runner.ModelRunner):
        def launch(self, plan: Any) -> Any:
            if next(steps) == _BEFORE.get(what):
                if what == "slow":
                    threading.Event().wait()
                raise RuntimeError("something broke")
            return super().launch(plan)

    follower.ModelRunner = Runner
    follower.run_follower(ranks)


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[2:], os.environ, lambda ranks: run(ranks, sys.argv[1])))
