"""`Workers`: threads for work on texts, a step at a time. Owns what runs next; knows nothing of the work.

What is quick has a thread to itself, and all the rest another. In each, after every step, the work that has the least left goes on: the
longest waits for the others, and not they for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, PriorityQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Steps = Generator[int, None, T]
"""Work: yields after each step how much of it is left, and returns its result. A step takes a bounded time."""


@dataclass(order=True, slots=True)
class _Job(Generic[T]):
    left: int
    order: int
    steps: Steps[T] | None = field(compare=False)  # None: nobody wants it any more
    future: Future[T] = field(compare=False)

    def drop(self) -> None:
        self.steps = None  # with all that it holds, however long the job stays in the queue

    def step(self) -> bool:
        """Whether there is more to do."""
        steps = self.steps
        if steps is None:
            return False
        try:
            self.left = next(steps)
            return True
        except StopIteration as end:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(end.value)
        except BaseException as error:  # whatever it is, it belongs to whoever waits for this job
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))
        return False


class _Lane:
    """One thread."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._jobs: PriorityQueue[_Job[Any]] = PriorityQueue()

    def add(self, job: _Job[Any]) -> None:
        self._jobs.put(job)
        self._thread.submit(self._step)

    def _step(self) -> None:
        try:
            job = self._jobs.get_nowait()
        except Empty:
            return  # closed
        if job.step():
            try:
                self.add(job)
            except RuntimeError:  # closed
                job.future.cancel()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        while True:
            try:
                self._jobs.get_nowait().future.cancel()
            except Empty:
                return


class Workers:
    """Two threads. Futures that they hand out can be cancelled until the work is done; it then ends with its step."""

    def __init__(self, name: str, *, quick: int) -> None:
        """`quick`: the largest size of work that counts as quick."""
        self._quick = quick
        self._lanes = (_Lane(f"{name}-quick"), _Lane(name))
        self._order = itertools.count()

    def submit(self, steps: Steps[T], size: int) -> Future[T]:
        """Have `steps` done, of which `size` is all that is left. An error of theirs that is no Exception becomes a RuntimeError."""
        future: Future[T] = Future()
        job = _Job(size, next(self._order), steps, future)
        future.add_done_callback(lambda _: job.drop())
        self._lanes[size > self._quick].add(job)
        return future

    def close(self) -> None:
        """End the threads, each with the step that it is at. What is not done is cancelled."""
        for lane in self._lanes:
            lane.close()
