"""The kernels of every level that this CPU supports, compiled once per machine; and what Triton's interpreter lacks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from slow_cases import one_is_quick

from aengine.kernels.cpu.compiler import Level, supported_levels
from aengine.kernels.cpu.library import CpuKernels, load_level


@cache
def loaded(level: Level) -> CpuKernels:
    return load_level(level)


LEVELS = [level for level in supported_levels() if level is not Level.FUSED]  # which is PORTABLE, and slower


def _param(level: Level) -> object:
    """Compiling a level takes long where it was not compiled before: the best and the plainest have to do where time matters."""
    return level if level in (LEVELS[0], LEVELS[-1]) else pytest.param(level, marks=pytest.mark.slow)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The plainest level is built from the sources that the best one is built from."""
    if len(LEVELS) > 1:
        one_is_quick(items, LEVELS[-1])


@pytest.fixture(scope="session", params=[_param(level) for level in LEVELS], ids=lambda level: level.value)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return loaded(request.param)


@pytest.fixture(
    scope="session",
    params=[_param(level) for level in LEVELS if "avx512" not in level.value or level is LEVELS[0]],
    ids=lambda level: level.value,
)
def some_kernels(request: pytest.FixtureRequest) -> CpuKernels:
    """Of one level for each width of vectors: for what does not differ between levels otherwise."""
    return loaded(request.param)


@pytest.fixture
def bfloat16_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter adds, subtracts and multiplies numbers of bfloat16, with results rounded to it, and matrices of them."""
    if torch.cuda.is_available():
        return
    import triton
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != triton.language.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)

    def rounded(operation: Any) -> Any:
        def of_any(self: Any, left: Any, right: Any) -> Any:
            result = operation(self, wide(left), wide(right))
            if left.dtype.scalar != triton.language.bfloat16:
                return result
            narrow = torch.from_numpy(np.ascontiguousarray(result.data)).bfloat16().view(torch.uint16).numpy()
            return TensorHandle(narrow, triton.language.bfloat16)

        return of_any

    for name in ("create_fadd", "create_fsub", "create_fmul"):
        monkeypatch.setattr(InterpreterBuilder, name, rounded(getattr(InterpreterBuilder, name)))
    # Triton 3.6 has no constants of bfloat16 either.
    constant = lambda self, value: self.create_fp_trunc(self.get_fp32(value), triton.language.bfloat16)  # noqa: E731
    monkeypatch.setattr(InterpreterBuilder, "get_bf16", constant, raising=False)
    dot = InterpreterBuilder.create_dot
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda self, a, b, *others: dot(self, wide(a), wide(b), *others))
