"""The process groups of `Collectives`, made directly: torch's default group, which is the process's, is not touched.

On CUDA (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp of torch 2.11 to 2.13, src/init.cc of NCCL, and its guide, "Using NCCL with CUDA
Graphs"; of the tests, those on a GPU have one rank):

- A communicator cannot be set up while a stream is captured, so it is connected when the group is made.
- Collectives without `asyncOp` run on the current stream, and return no work to wait for.
- A collective is recorded on all ranks or on none, and all ranks launch their graphs and collectives in the same order, on one stream.
- Aborting a communicator first ends the kernels that wait for other ranks, and then waits until no graph refers to it. So graphs are
  destroyed before it, and a thread that is not to wait has another one abort it. Destroying it would wait for the other ranks, too.
- torch's watchdog would end the whole process, which is the user's, when an error of CUDA or of NCCL comes up in a collective. A group that
  is made with TORCH_NCCL_BLOCKING_WAIT has none. The variable's other effect is on works that are waited for, and there are none. Ranks
  that are gone or hang are noticed elsewhere.
- Kernels of torch's symmetric memory, which are faster for few tokens, cannot be aborted: with another rank gone they would keep the
  device of this process busy for ever. NCCL can be.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, ProcessGroupGloo

_NEVER = timedelta(days=365)
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def gloo_group(store: Store, index: int, size: int, timeout: timedelta, host: str) -> ProcessGroup:
    """Makes the Gloo group of `size` ranks on CPUs. `host` is that of the store: the other ranks reach this one by the address from which
    it reaches that."""
    family = socket.getaddrinfo(host, None)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address = probe.getsockname()[0]
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return cast(ProcessGroup, ProcessGroupGloo(store, index, size, options))  # it has the same methods


def nccl_group(store: Store, index: int, size: int, device: torch.device) -> ProcessGroup:
    """Makes the NCCL group of `size` ranks on CUDA devices, one each. Waits for the other ranks."""
    from torch.distributed import ProcessGroupNCCL  # not every torch has it

    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    options.config.blocking = 1
    with _no_watchdog():
        group = ProcessGroupNCCL(store, index, size, options)
    group.eager_connect_single_device(device)
    return cast(ProcessGroup, group)


@contextmanager
def _no_watchdog() -> Iterator[None]:
    """NCCL groups that are made meanwhile get no watchdog; later ones, which may be the user's, have one again."""
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before
