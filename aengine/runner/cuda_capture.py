"""`CudaCapture`: recording with CUDA graphs. Owns their memory pool; does not know what is recorded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from aengine.garbage import paused_collection
from aengine.runner.capture import Replay
from aengine.runner.device import used_cuda_memory


class CudaCapture:
    """Satisfies `Capture`. The current stream must be the one of all steps, and not the default one.

    All graphs share one memory pool: each may use what those before it have freed. So they must not run at the same time, and what must
    outlive a replay must be in other memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Pauses garbage collection, which might free other tensors or graphs in the middle of a capture."""
        gc.collect()
        with paused_collection():
            self._finish()
            try:
                yield
            finally:
                self._finish()

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what other threads do with the device does not spoil the capture. torch.cuda.graph() would collect garbage,
        # empty the cache and wait for the device each time.
        with self._releasing_pool():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> Replay:
        graph, self._graph = self._graph, None
        assert graph is not None, "begun"
        with self._releasing_pool():
            graph.capture_end()
        return graph.replay

    def memory(self) -> int:
        self._finish()
        torch.cuda.empty_cache()
        return used_cuda_memory(self._device)

    def _finish(self) -> None:
        # Not torch.cuda.synchronize(), which is an error while another thread captures a stream of the device.
        torch.cuda.current_stream(self._device).synchronize()

    @contextmanager
    def _releasing_pool(self) -> Iterator[None]:
        """If a capture fails on the device, torch's allocator stays in the middle of it: it would neither free the pool nor give back other
        memory when there is too little."""
        try:
            yield
        except Exception:
            with suppress(RuntimeError):  # it is not in the middle
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                torch._C._cuda_releasePool(self._device.index, self._pool)
            raise
