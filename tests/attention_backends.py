"""Attention backends on CUDA as parameters of tests: what a machine with a GPU may lack, and what it must have.

AENGINE_REQUIRE_BACKENDS=flashinfer,triton names backends that must run: a test of one that is missing fails. Of the others one that is not
installed is skipped, with the reason. One that is installed but cannot be built or run fails in any case.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch

REQUIRE = "AENGINE_REQUIRE_BACKENDS"
PACKAGES = {"flashinfer": "flashinfer", "triton": "triton"}  # other backends need none


def backend_param(backend: str, *others: Any, id: str | None = None) -> Any:
    """A parameter that is the name of a backend, with `others` beside it."""
    return pytest.param(backend, *others, id=id, marks=backend_marks(backend))


def backend_marks(backend: str) -> list[pytest.MarkDecorator]:
    """Those of a test that runs on CUDA with this backend."""
    marks = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    reason = why_missing(backend, os.environ)
    return [*marks, pytest.mark.skipif(True, reason=reason)] if reason else marks


def why_missing(backend: str, environment: Mapping[str, str]) -> str | None:
    """Why tests of a backend are skipped. None: they are not."""
    package = PACKAGES.get(backend)
    if package is None or backend in environment.get(REQUIRE, "").split(",") or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed, and {REQUIRE} does not name {backend}"
