"""One OpenMP thread for the whole run: the models here are tiny, and threads that spin for each other cost more than they bring.

With AENGINE_EXECUTE_PTX=1, tests of a GPU run without one: what their kernels are compiled to is executed.

With `-m gpu`, test modules that need what a GPU host may lack are skipped, with the reason, instead of ending the run.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gpu_host import why_absent
from slow_cases import few_are_quick, one_is_quick, some_in_ci

from aengine.api.runtime import switch_often

# Each worker imports all tests, and tests start hundreds of processes: what one compiles the others read.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, so before any test imports it
os.environ.setdefault("AENGINE_PACKED_WEIGHTS", "off")  # hundreds of small models
if os.environ.get("AENGINE_EXECUTE_PTX"):  # before any module asks for a device
    import computing_flashinfer
    from computing_cuda import ComputingCuda

    for_all_tests = ExitStack()
    device = ComputingCuda()
    for_all_tests.enter_context(device.in_all_threads())
    if find_spec("flashinfer"):
        os.environ |= computing_flashinfer.build_environment()
        for_all_tests.enter_context(computing_flashinfer.flashinfer_on(device))
switch_often()  # the loops here are busy more often than not


class _SkippedWithoutPackages(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except Exception as error:
            if reason := why_absent(error):
                pytest.skip(reason, allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if parent.config.getoption("markexpr").startswith("gpu"):
        return _SkippedWithoutPackages.from_parent(parent, path=module_path)
    return None  # as ever


def pytest_collection_finish() -> None:
    """What the imports made stays to the end: collections of garbage need not look at it, until the interpreter ends."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


LEFT_OUT = pytest.StashKey[int]()
"""How many tests `-m` or `-k` deselected, which pytest does not tell where workers of xdist collect."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = 0


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    if items:
        items[0].config.stash[LEFT_OUT] += len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker collects all tests."""
    node.config.stash[LEFT_OUT] = max(node.config.stash[LEFT_OUT], getattr(node, "workeroutput", {}).get("left_out", 0))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line: what ran, and what was left out and why."""
    stats = terminalreporter.stats
    ran = sum(len(stats.get(outcome, ())) for outcome in ("passed", "failed"))
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in stats.get("skipped", ()))
    left_out = [f"{count} ({reason})" for reason, count in reasons.most_common(4)]
    if others := sum(reasons.values()) - sum(count for _, count in reasons.most_common(4)):
        left_out.append(f"{others} (other reasons; -rs shows them)")
    if deselected := config.stash[LEFT_OUT]:
        marks = config.getoption("markexpr")
        left_out.insert(0, f"{deselected} (slow; run by `make test-slow`)" if marks == "not slow" else f"{deselected} (deselected)")
    terminalreporter.write_line(f"{ran} tests ran; left out: {', '.join(left_out) or 'none'}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What else varies depends neither on the loop nor on drafts."""
    one_is_quick(items, "trio")
    one_is_quick(items, "drafts")
    few_are_quick(items)
    some_in_ci(items)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that a shell starts in the background ignore SIGINT, and so would those that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
