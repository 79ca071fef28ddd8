"""`run_follower`: what a rank does that follows another one: it computes its part of every plan that comes."""

from __future__ import annotations

import time
from collections import deque

from aengine.errors import RankHungError
from aengine.kernels.cpu.library import ExchangeError
from aengine.parallel.driver import VERDICT_SECONDS
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.ring import StageError
from aengine.runner.base import InFlightStep
from aengine.runner.model_runner import ModelRunner


def run_follower(ranks: FollowerRanks) -> None:
    """Returns when the driver has closed the connection. Raises what loading raises, and what a step raises: then this rank can go on no
    more, and neither can the others. Raises RankHungError for a rank that it waits for in vain."""
    try:
        _run(ranks)
    except ExchangeError as error:
        if not error.lagging:
            raise
        rank = ranks.shard.stage * ranks.shard.size + error.lagging[0]
        raise RankHungError(f"rank {rank}: {error}", rank) from error
    except StageError as error:
        if not error.hung:
            time.sleep(VERDICT_SECONDS)  # the driver knows why it is gone, and ends all ranks
            raise
        raise RankHungError(str(error), error.rank) from error


def _run(ranks: FollowerRanks) -> None:
    runner = ModelRunner(ranks.config, ranks.model_dir, ranks=ranks)
    try:
        staged = deque[InFlightStep]()  # that later stages compute
        while True:
            if staged and ranks.ends_step():
                staged.popleft().result()
                continue
            plan = ranks.next_plan()
            if plan is None:
                return
            step = runner.launch(plan)
            if runner.max_in_flight > 1 and ranks.shard.stage == 0:
                staged.append(step)
            elif not step.overlaps:
                step.result()
    finally:
        runner.close()
