"""A plugin of pytest: writes the outcome of each test as it ends, one JSON object a line, so that a run that is killed leaves them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

FILE = "AENGINE_TEST_OUTCOMES"
_LONGEST = 300  # characters of a reason


class Outcomes:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":  # of set-up and tear-down only what did not pass
            self._write(report.nodeid, report.outcome, _reason(report), report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write(report.nodeid, report.outcome, _reason(report), 0.0)

    def _write(self, test: str, outcome: str, reason: str, seconds: float) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason, "seconds": round(seconds, 2)}) + "\n")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return report.longrepr[2][:_LONGEST]
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")] or report.longreprtext.splitlines()[-1:]
    return " ".join(line.removeprefix("E").strip() for line in lines[:3])[:_LONGEST]


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(FILE)
    if path is not None and not hasattr(config, "workerinput"):  # the process of pytest-xdist that hears of all tests
        config.pluginmanager.register(Outcomes(Path(path)))
