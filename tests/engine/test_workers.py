"""The threads for work on texts: what runs next, what is dropped, and whom an error belongs to."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest
from hang_guard import HANG_SECONDS

from aengine.engine.workers import Steps, Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Work of a size up to 10 is quick."""
    workers = Workers("test", quick=10)
    yield workers
    workers.close()


class Gate:
    """Holds a thread in a step."""

    def __init__(self, workers: Workers, size: int) -> None:
        self.begun = threading.Event()
        self._open = threading.Event()
        self.future = workers.submit(self._steps(), size)
        assert self.begun.wait(HANG_SECONDS)

    def open(self) -> None:
        self._open.set()

    def _steps(self) -> Steps[None]:
        self.begun.set()
        assert self._open.wait(HANG_SECONDS)
        yield 0


def logged(log: queue.Queue[str], name: str, size: int) -> Steps[str]:
    """As many steps as `size`, each of which writes the name."""
    for left in reversed(range(size)):
        log.put(name)
        yield left
    return name


def test_a_result_and_an_error(workers: Workers) -> None:
    def failing(error: BaseException) -> Steps[None]:
        yield 1
        raise error

    assert workers.submit(logged(queue.Queue(), "done", 3), 3).result(HANG_SECONDS) == "done"
    with pytest.raises(ValueError, match="its own"):
        workers.submit(failing(ValueError("its own")), 3).result(HANG_SECONDS)
    for error in (KeyboardInterrupt("a panic"), SystemExit("a panic")):
        with pytest.raises(RuntimeError, match="a panic"):
            workers.submit(failing(error), 3).result(HANG_SECONDS)
    assert workers.submit(logged(queue.Queue(), "on", 3), 3).result(HANG_SECONDS) == "on"


def test_what_is_quick_does_not_wait_for_the_rest(workers: Workers) -> None:
    gate = Gate(workers, 11)
    assert workers.submit(logged(queue.Queue(), "quick", 10), 10).result(HANG_SECONDS) == "quick"
    assert not gate.future.done()
    gate.open()


@pytest.mark.parametrize("size", [3, 30])
def test_after_each_step_what_has_the_least_left_goes_on(workers: Workers, size: int) -> None:
    log: queue.Queue[str] = queue.Queue()
    gate = Gate(workers, size)
    sizes = {"long": size, "short": size - 2, "as short": size - 2}
    futures = [workers.submit(logged(log, name, count), count) for name, count in sizes.items()]
    gate.open()
    assert [future.result(HANG_SECONDS) for future in futures] == list(sizes)
    order = [log.get_nowait() for _ in range(sum(sizes.values()))]
    assert order == ["short"] * (size - 2) + ["as short"] * (size - 2) + ["long"] * size

    began, came = threading.Event(), threading.Event()

    def long() -> Steps[str]:
        began.set()
        assert came.wait(HANG_SECONDS)
        yield size - 1
        return (yield from logged(log, "long", size - 1))

    first = workers.submit(long(), size)
    assert began.wait(HANG_SECONDS)
    second = workers.submit(logged(log, "newcomer", 1), size - 2)
    came.set()
    assert (first.result(HANG_SECONDS), second.result(HANG_SECONDS)) == ("long", "newcomer")
    assert log.get_nowait() == "newcomer", "before the rest of what had begun"


def test_what_is_cancelled_is_let_go_of_while_it_waits_and_ends_with_its_step(workers: Workers) -> None:
    class Text(str):
        """Can be referred to weakly."""

    log: queue.Queue[str] = queue.Queue()
    gate = Gate(workers, 5)
    text = Text("text")
    waiting: Future[str] = workers.submit(logged(log, text, 3), 3)
    held = weakref.ref(text)
    del text
    assert held() is not None
    assert waiting.cancel()
    assert held() is None, "though its place in the queue is still there"
    gate.open()
    assert gate.future.result(HANG_SECONDS) is None
    gate = Gate(workers, 5)
    assert gate.future.cancel()
    gate.open()
    assert workers.submit(logged(log, "after", 1), 1).result(HANG_SECONDS) == "after"
    assert log.get_nowait() == "after"


def test_what_is_not_done_when_they_are_closed_is_cancelled() -> None:
    workers = Workers("test", quick=10)
    gates = [Gate(workers, 5), Gate(workers, 50)]
    waiting = [workers.submit(logged(queue.Queue(), "x", size), size) for size in (5, 50)]
    workers.close()
    for gate in gates:
        gate.open()
    for future in (*waiting, *(gate.future for gate in gates)):
        with pytest.raises(CancelledError):
            future.result(HANG_SECONDS)
    with pytest.raises(RuntimeError):
        workers.submit(logged(queue.Queue(), "x", 1), 1)
