"""The kernels of every level that this CPU supports, compiled once per machine."""

from __future__ import annotations

from functools import cache

import pytest
from slow_cases import one_is_quick

from aengine.kernels.cpu.levels import Level, supported_levels
from aengine.kernels.cpu.library import CpuKernels, load_level


@cache
def loaded(level: Level) -> CpuKernels:
    return load_level(level)


def _param(level: Level) -> object:
    """Compiling a level takes long where it was not compiled before: the best and the plainest have to do where time matters."""
    return level if level in (supported_levels()[0], supported_levels()[-1]) else pytest.param(level, marks=pytest.mark.slow)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The plainest level is built from the sources that the best one is built from."""
    if len(supported_levels()) > 1:
        one_is_quick(items, supported_levels()[-1])


@pytest.fixture(scope="session", params=[_param(level) for level in supported_levels()], ids=lambda level: level.value)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return loaded(request.param)


@pytest.fixture(
    scope="session",
    params=[_param(level) for level in supported_levels() if "avx512" not in level.value or level is supported_levels()[0]],
    ids=lambda level: level.value,
)
def some_kernels(request: pytest.FixtureRequest) -> CpuKernels:
    """Of one level for each width of vectors: for what does not differ between levels otherwise."""
    return loaded(request.param)
