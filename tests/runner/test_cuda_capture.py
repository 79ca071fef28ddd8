"""What `CudaCapture` does when torch fails, with stand-ins for what torch calls on a device."""

from __future__ import annotations

import pytest
import torch

from aengine.runner.torch.capture import CudaCapture

DEVICE, POOL = torch.device("cuda", 3), (0, 7)


class Allocator:
    """The captures that torch's allocator knows of, as `CUDAGraph` tells it."""

    def __init__(self) -> None:
        self.underway: list[tuple[int, int]] = []
        self.users = 0  # of the pool

    def begin(self) -> None:
        self.underway.append(POOL)
        self.users += 1

    def end(self, device: int, pool: tuple[int, int]) -> None:
        assert device == DEVICE.index
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (DEVICE.index, POOL)
        self.users -= 1


class Graph:
    """Fails at one point, as torch's does: before or after the allocator has heard of it."""

    allocator: Allocator
    fails = ""
    replays = 0

    def __init__(self) -> None:
        self._ended = False

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == (POOL, "thread_local")
        if self.fails == "before beginning":
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.allocator.begin()
        if self.fails == "beginning":
            raise RuntimeError("operation not permitted")

    def capture_end(self) -> None:
        if self.fails == "ending":
            raise RuntimeError("operation failed due to a previous error during capture")
        self.allocator.end(DEVICE.index, POOL)
        self._ended = True
        if self.fails == "instantiating":
            raise RuntimeError("out of memory")

    def replay(self) -> None:
        Graph.replays += 1

    def __del__(self) -> None:
        if self._ended:
            self.allocator.release(DEVICE.index, POOL)


@pytest.mark.parametrize("fails", ["", "before beginning", "beginning", "ending", "instantiating"])
def test_a_failed_capture_leaves_nothing_in_the_allocator(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    allocator = Graph.allocator = Allocator()
    monkeypatch.setattr(Graph, "fails", fails)
    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", allocator.release, raising=False)
    capture = CudaCapture(DEVICE)
    if not fails:
        capture.begin()
        replay = capture.end_capture()
        replay()
        assert (allocator.underway, allocator.users, Graph.replays) == ([], 1, 1)
        del replay
    elif "beginning" in fails:
        with pytest.raises(RuntimeError, match="captured" if "before" in fails else "not permitted"):
            capture.begin()
    else:
        capture.begin()
        with pytest.raises(RuntimeError, match="memory" if fails == "instantiating" else "previous error"):
            capture.end_capture()
    assert (allocator.underway, allocator.users) == ([], 0)
