"""`CudaCapture`: recording with CUDA graphs. Owns their memory pool; does not know what is recorded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from aengine.garbage import paused_collection
from aengine.runner.capture import Replay


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
            torch.cuda.synchronize(self._device)
            try:
                yield
            finally:
                torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what other threads do with the device does not spoil the capture. torch.cuda.graph() would collect garbage,
        # empty the cache and wait for the device each time.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> Replay:
        graph, self._graph = self._graph, None
        assert graph is not None, "begun"
        graph.capture_end()
        return graph.replay

    def memory(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free
