"""`aengine-worker`: a rank of a model, started by the engine or, on another host, by hand."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from aengine.parallel.follower import FollowerRanks, run_worker


def main(arguments: Sequence[str] | None = None, name: str = "aengine-worker") -> int:
    """Returns the exit code. `name`: what the program is called."""
    return run_worker(sys.argv[1:] if arguments is None else arguments, os.environ, _run, name)


def _run(ranks: FollowerRanks) -> None:
    from aengine.runner.follower import run_follower  # imports torch, which is to find the cores that the rank was given

    run_follower(ranks)


if __name__ == "__main__":
    sys.exit(main())
