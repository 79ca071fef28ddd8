"""The process groups of `Collectives`, made directly: torch's default group, which is the process's, is not touched.

What is said of torch's libraries here was read in the sources of torch 2.11 and 2.13.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import cast

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, ProcessGroupGloo


def gloo_group(store: Store, index: int, size: int, timeout: timedelta, host: str) -> ProcessGroup:
    """Of ranks on CPUs. `host` is that of the store: the other ranks reach this one by the address from which it reaches that."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address = probe.getsockname()[0]
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return cast(ProcessGroup, ProcessGroupGloo(store, index, size, options))  # it has the same methods
