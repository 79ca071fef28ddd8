"""A plugin of pytest: writes the outcome of each test as it ends, one JSON object a line, so that a run that is killed leaves them.

With pytest-xdist, a test that leaves the device unusable (an illegal address, for one) ends its worker: all later tests there would fail.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

FILE = "AENGINE_TEST_OUTCOMES"
STARTED = "started"
_LONGEST = 300  # characters of a reason


def read(path: Path) -> list[dict[str, Any]]:
    """The outcomes in a file, the worst of each test; of one that was started and did not end "unfinished"."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        before = found.get(one["test"])
        if before is None or (before["outcome"] in (STARTED, "passed", "skipped") and one["outcome"] != STARTED):
            found[one["test"]] = one
    return [{**one, "outcome": "unfinished"} if one["outcome"] == STARTED else one for one in found.values()]


class Outcomes:
    """In the process that hears of all tests."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, STARTED, "", 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":  # of set-up and tear-down only what did not pass
            self._write(report.nodeid, report.outcome, _reason(report), report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write(report.nodeid, report.outcome, _reason(report), 0.0)

    def _write(self, test: str, outcome: str, reason: str, seconds: float) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason, "seconds": round(seconds, 2)}) + "\n")


class FreshWorker:
    """In a worker, which pytest-xdist replaces when it ends."""

    def __init__(self) -> None:
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.outcome == "failed"

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if self._failed and _device_is_lost():
            os._exit(1)
        self._failed = False


def _device_is_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return report.longrepr[2][:_LONGEST]
    lines: Iterable[str] = report.longreprtext.splitlines()
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return " ".join(errors[:3] or list(lines)[-1:])[:_LONGEST]


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(FILE)
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(FreshWorker())
    elif path is not None:
        config.pluginmanager.register(Outcomes(Path(path)))
