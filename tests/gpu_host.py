"""What a GPU host may lack, so that `pytest -m gpu` runs with the packages that such hosts tend to have: torch, triton, transformers,
numpy, anyio and pytest. As a plugin (`-p gpu_host`) it makes this machine one that lacks them.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Iterator

import pytest

MAY_BE_ABSENT = frozenset(
    (
        *("google.rpc", "grpc_health", "grpc_reflection", "grpc_status", "grpc_tools", "prometheus_client", "uvloop", "llguidance"),
        *("h2", "hpack", "hyperframe", "hypothesis", "jsonschema", "matplotlib", "peft", "trio", "trustme"),
    )
)


def why_absent(error: BaseException) -> str | None:
    """Why a test module could not be imported, if it is for want of a package that may be absent, or of a recent one; None otherwise."""
    for cause in _causes(error):
        if isinstance(cause, ModuleNotFoundError) and (package := _package(cause.name or "")) in MAY_BE_ABSENT:
            return f"needs {package}, which is not installed"
        if type(cause).__module__ == "google.protobuf.runtime_version" or "depends on grpcio>=" in str(cause):
            return f"needs a protobuf and grpcio as recent as the generated code: {cause}"
    return None


def _package(module: str) -> str:
    """The name of the package alone. "google" is no package: several have a part of it."""
    first, *others = module.split(".")
    return ".".join([first, *others[:1]]) if first == "google" else first


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


class _Refusal(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if _package(name) in MAY_BE_ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def pytest_configure(config: pytest.Config) -> None:
    for name in [name for name in sys.modules if _package(name) in MAY_BE_ABSENT]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Refusal())
