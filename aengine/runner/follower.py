"""`run_follower`: what a rank does that follows another one: it computes its part of every plan that comes."""

from __future__ import annotations

from aengine.parallel.follower import FollowerRanks
from aengine.runner.model_runner import ModelRunner


def run_follower(ranks: FollowerRanks) -> None:
    """Returns when the driver has closed the connection. Raises what loading raises, and what a step raises: then this rank can go on no
    more, and neither can the others."""
    runner = ModelRunner(ranks.config, ranks.model_dir, ranks=ranks)
    try:
        while (plan := ranks.next_plan()) is not None:
            step = runner.launch(plan)
            if not step.overlaps:
                step.result()
    finally:
        runner.close()
