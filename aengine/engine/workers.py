"""`Workers`: two threads for work on texts, done in steps. Owns the order of the work; knows nothing of what it does.

Small work has a thread of its own, and leaves it if it turns out not to be small. In each thread, after every step, the work with the
least remaining goes on, so that short texts do not wait for long ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, PriorityQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Steps = Generator[int, None, T]
"""Work: yields after each step how much of it remains, and returns its result."""


def at_once(steps: Steps[T]) -> T:
    """All steps, one after the other. Raises what they raise."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


@dataclass(order=True, slots=True)
class _Job(Generic[T]):
    remaining: int
    order: int
    steps: Steps[T] | None = field(compare=False)  # None once the job is done or cancelled
    future: Future[T] = field(compare=False)

    def drop(self) -> None:
        """Free the work, however long the job stays in the queue."""
        self.steps = None

    def step(self) -> bool:
        """Whether there is more to do."""
        steps = self.steps
        if steps is None:
            return False
        try:
            self.remaining = next(steps)
            return True
        except StopIteration as end:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(end.value)
        except BaseException as error:  # panics of libraries in Rust too
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))
        return False


class Workers:
    """Futures of submitted work can be cancelled until it is done; work that has begun then ends with its step."""

    def __init__(self, name: str, *, quick: int) -> None:
        """`quick`: the largest size of small work."""
        self._quick = quick
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=prefix) for prefix in (f"{name}-quick", name)]
        self._queues: list[PriorityQueue[_Job[Any]]] = [PriorityQueue(), PriorityQueue()]  # by thread
        self._order = itertools.count()

    def submit(self, steps: Steps[T], size: int) -> Future[T]:
        """Have `steps` done, which are of `size` in all. Of its errors one that is no Exception becomes a RuntimeError."""
        future: Future[T] = Future()
        job = _Job(size, next(self._order), steps, future)
        future.add_done_callback(lambda _: job.drop())
        self._add(size > self._quick, job)
        return future

    def close(self) -> None:
        """End the threads, each after the step that it runs. Work that is not done is cancelled."""
        for thread, queue in zip(self._threads, self._queues, strict=True):
            thread.shutdown(wait=False, cancel_futures=True)
            with suppress(Empty):
                while True:
                    queue.get_nowait().future.cancel()

    def _add(self, thread: int, job: _Job[Any]) -> None:
        self._queues[thread].put(job)
        self._threads[thread].submit(self._step, thread)

    def _step(self, thread: int) -> None:
        try:
            job = self._queues[thread].get_nowait()
        except Empty:
            return  # closed
        if job.step():
            try:
                self._add(thread or job.remaining > self._quick, job)
            except RuntimeError:  # closed
                job.future.cancel()
