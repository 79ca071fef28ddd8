"""Attention over paged KV: one metadata format, one base class, and its backends.

Owns the choice of a backend. Knows nothing of models, scheduling or sampling.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aengine.api.errors import ConfigError
from aengine.attention.metadata import (
    AttentionMetadata,
    AttentionSpec,
    IndexShape,
    Layouts,
    StepLayout,
    StepStates,
    as_decodes,
    build_layout,
    empty_layout,
)
from aengine.kernels.paged_cache import Scoring

if TYPE_CHECKING:
    from aengine.attention.base import AttentionBackend, AttentionStep, BackendUnavailableError, Gates, GraphStep, IndexQuery

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "AttentionStep",
    "BackendUnavailableError",
    "Gates",
    "GraphStep",
    "IndexQuery",
    "IndexShape",
    "Layouts",
    "Scoring",
    "StepLayout",
    "StepStates",
    "as_decodes",
    "build_layout",
    "empty_layout",
    "select_backend",
]

_log = logging.getLogger("aengine")
_OF_TORCH = {"AttentionBackend", "AttentionStep", "BackendUnavailableError", "Gates", "GraphStep", "IndexQuery"}


def __getattr__(name: str) -> Any:
    """What imports torch is imported when it is asked for: layouts are used without it."""
    if name in _OF_TORCH:
        return getattr(importlib.import_module("aengine.attention.base"), name)
    raise AttributeError(name)


def select_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend that `EngineConfig.attention_backend` names, with one log line that says which and why.

    "auto" takes the first that can run here: of flashinfer, triton and torch_native on CUDA, of cpu and torch_native on a CPU. Raises
    ConfigError if the named backend cannot run here.
    """
    from aengine.attention.base import BackendUnavailableError

    if name != "auto" and name not in _MAKERS:
        raise ConfigError.of("attention_backend", f"{name!r} is not one of auto, {', '.join(_MAKERS)}")
    device = spec.device.type
    if spec.batch_invariant:
        if name not in ("auto", "triton") or "triton" not in _PREFERRED.get(device, ()):
            raise ConfigError.of("numerics", f"'batch_invariant' needs our Triton kernels, not {name!r} on device {device!r}")
        name = "triton"
    asked = name != "auto"
    declined: list[str] = []
    for candidate in [name] if asked else _PREFERRED.get(device, ("torch_native",)):
        try:
            backend = _MAKERS[candidate](spec)
        except BackendUnavailableError as reason:
            if asked:
                raise ConfigError.of("attention_backend", f"{name!r} is not possible here: {reason}") from reason
            declined.append(f"{candidate}: {reason}")
            continue
        _log.info("attention backend: %s (%s)", candidate, "asked for" if asked else "; ".join(declined) or f"the first choice on {device}")
        return backend
    raise AssertionError("torch_native is always possible")


def _flashinfer(spec: AttentionSpec) -> AttentionBackend:
    from aengine.attention.flashinfer.backend import FlashInferBackend

    return FlashInferBackend(spec)


def _triton(spec: AttentionSpec) -> AttentionBackend:
    try:
        from aengine.attention.triton import TritonBackend
    except ImportError as error:
        from aengine.attention.base import BackendUnavailableError

        raise BackendUnavailableError(f"Triton cannot be imported: {error}") from error
    return TritonBackend(spec)


def _cpu(spec: AttentionSpec) -> AttentionBackend:
    from aengine.attention.cpu import CpuBackend

    return CpuBackend(spec)


def _torch_native(spec: AttentionSpec) -> AttentionBackend:
    from aengine.attention.torch_native import TorchNativeBackend

    return TorchNativeBackend(spec)


# Functions, so that the packages of a backend are imported only where it is tried.
_MAKERS: Mapping[str, Callable[[AttentionSpec], AttentionBackend]] = {
    "cpu": _cpu,
    "flashinfer": _flashinfer,
    "triton": _triton,
    "torch_native": _torch_native,
}
_PREFERRED = {"cuda": ("flashinfer", "triton", "torch_native"), "cpu": ("cpu", "torch_native")}
