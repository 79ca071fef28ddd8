"""Collectives of one rank on one device: NCCL's, eager and in graphs, and that they end. gloo stands in for NCCL on a CPU.

More ranks need more devices: `test_gpu_ranks.py`.
"""

from __future__ import annotations

import datetime
import gc
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from attention_backends import backend_marks
from torch import Tensor
from torch.distributed import HashStore

from aengine.layers.collectives import Collectives, gloo_group, nccl_group
from aengine.parallel.shard import Shard
from aengine.runner.torch.capture import CudaCapture, Pieces
from aengine.runner.torch.device import DeviceStream

DEVICES = ["cpu", pytest.param("cuda", marks=backend_marks("torch_native"))]


@contextmanager
def collectives_on(device: torch.device) -> Iterator[Collectives]:
    """To be used on the stream of the steps."""
    timeout = datetime.timedelta(seconds=30)
    group = gloo_group(HashStore(), 0, 1, timeout, "127.0.0.1") if device.type == "cpu" else nccl_group(HashStore(), 0, 1, device)
    collectives = Collectives(Shard(0, 1, exact=False, splits_embedding=True), group)
    with DeviceStream(device).enter_stream():
        yield collectives
        gc.collect()  # graphs go before the group
        collectives.close()


def used(collectives: Collectives, x: Tensor) -> list[Tensor]:
    """[T, 6] -> what each collective makes of it."""
    words = x.view(torch.int32)[:, :2].clone() if x.dtype is torch.float32 else x.to(torch.int32)
    collectives.broadcast(words)
    return [
        collectives.gathered(x, (0, 6)),
        collectives.summed(x + 1),
        collectives.summed((x + 2)[:, ::2]),  # which is not contiguous
        collectives.stacked(x.to(torch.bfloat16)),
        words,
    ]


def check(found: list[Tensor], x: Tensor) -> None:
    words = x.view(torch.int32)[:, :2] if x.dtype is torch.float32 else x.to(torch.int32)
    expected = [x, x + 1, (x + 2)[:, ::2], x.to(torch.bfloat16)[None], words]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives(device: str, dtype: torch.dtype) -> None:
    """Of no rows, too. Another group can be made behind one that was closed."""
    for _ in range(2):
        with collectives_on(torch.device(device)) as collectives:
            for rows in (1, 0, 37):
                x = torch.randn(rows, 6, device=device).to(dtype)
                check(used(collectives, x), x)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_collectives_in_graphs(device: str) -> None:
    """Beside eager ones; neither waits for the device. What is called when, with stand-ins on a CPU: `test_rank_order.py`."""
    where = torch.device(device)
    with collectives_on(where) as collectives:
        given, capture = torch.zeros(5, 6, device=where), CudaCapture(where)
        pieces, recorded = Pieces(capture), list[Tensor]()

        def work() -> None:
            recorded[:] = used(collectives, given)

        with capture.session():
            pieces.record(work)
        for _ in range(20):
            x = torch.randn(5, 6, device=where)
            torch.cuda.set_sync_debug_mode("error")
            try:
                given.copy_(x)
                pieces.replay()
                eager = used(collectives, given)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            check(recorded, x)
            check(eager, x)
        del pieces


@pytest.mark.parametrize("device", DEVICES[1:])
def test_nothing_watches_the_process(device: str) -> None:
    """torch's watchdog, and what watches that, would end it."""
    with collectives_on(torch.device(device)) as collectives:
        x = torch.randn(3, 6, device=device)
        check(used(collectives, x), x)
        names = {path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")}
        assert not {name for name in names if name.startswith("pt_nccl")}, names
