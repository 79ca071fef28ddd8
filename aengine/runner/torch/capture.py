"""The contract of a graph recorder, recordings in pieces, and `CudaCapture`, which records CUDA graphs.

A graph reads and writes memory at fixed addresses: whatever differs from step to step must be in a buffer, never a Python number. What it
allocates while it is recorded it takes again at each replay, from the memory of its recorder. Does not know what is recorded.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor

from aengine.api.runtime import paused_collection
from aengine.runner.torch.device import used_cuda_memory

Replay = Callable[[], None]


class Capture(Protocol):
    """Records graphs, in the thread that created it."""

    def session(self) -> AbstractContextManager[None]:
        """To be entered around all recording."""

    def begin(self) -> None:
        """Operations are recorded from now on. They may not be executed."""

    def end_capture(self) -> Replay:
        """Returns a replay of what was recorded since `begin`, which can be called any number of times."""

    def memory(self) -> int:
        """Bytes of the device's memory in use; what was taken between two calls is their difference. Waits for the device."""


class Pieces:
    """A recording with interruptions: recorded parts, and between them actions that are run at each replay."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._parts: list[Replay] = []
        self._recording = False

    def record(self, work: Callable[[], None]) -> None:
        """Runs `work`, then records it. It may call `interrupt` of this object, in the same places each time."""
        work()  # libraries are set up at the first call
        self._recording = True
        self._capture.begin()
        try:
            work()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                self._capture.end_capture()
            raise
        finally:
            self._recording = False
        self._parts.append(self._capture.end_capture())

    def interrupt(self, action: Callable[..., None], *tensors: Tensor) -> None:
        """To be called by the work: runs `action(*tensors)` now, and at this place of every replay.

        `tensors` are what the parts before have made. This object keeps none of them: once the work has given one up, parts recorded later
        use its memory, and they run after the action.
        """
        if not self._recording:
            return action(*tensors)
        self._parts += (self._capture.end_capture(), functools.partial(action, *map(_borrowed, tensors)))
        action(*tensors)
        self._capture.begin()

    def replay(self) -> None:
        for part in self._parts:
            part()


def _borrowed(tensor: Tensor) -> Tensor:
    """A tensor over the memory of the given one, which it does not keep from being freed."""
    storage = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return tensor.new_empty(0).set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())


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

    def end_capture(self) -> Replay:
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
