"""One OpenMP thread for the whole run: the models here are tiny, and threads that spin for each other cost more than they bring.

With `-m gpu`, test modules that need what a GPU host may lack are skipped, with the reason, instead of ending the run.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from gpu_host import why_absent
from slow_cases import one_is_quick, some_in_ci

from aengine.switching import switch_often

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, so before any test imports it
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
    """What the imports made stays to the end: collections of garbage need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What else varies depends neither on the loop nor on drafts."""
    one_is_quick(items, "trio")
    one_is_quick(items, "drafts")
    some_in_ci(items)
