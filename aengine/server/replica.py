"""`aengine-grpc` as the child of a router: with a share of the cores, and no longer than its parent.

Run with the parent's process id, the replica's index and their number before the flags of `aengine-grpc`.
"""

from __future__ import annotations

import sys

from aengine.parallel.launch import die_with, take_cores
from aengine.server.cli import main

if __name__ == "__main__":
    parent, index, count, *flags = sys.argv[1:]
    die_with(int(parent))
    take_cores(int(index), int(count), None)
    sys.exit(main(flags))
