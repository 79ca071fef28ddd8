"""`aengine-worker`: a rank of a model, started by the engine or, on another host, by hand."""

from __future__ import annotations

import os
import sys

from aengine.parallel.command import run_worker
from aengine.parallel.follower import FollowerRanks


def main() -> int:
    return run_worker(sys.argv[1:], os.environ, _run)


def _run(ranks: FollowerRanks) -> None:
    from aengine.runner.follower import run_follower  # imports torch, which is to find the cores that the rank was given

    run_follower(ranks)


if __name__ == "__main__":
    sys.exit(main())
