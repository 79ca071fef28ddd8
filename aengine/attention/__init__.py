"""Attention over paged KV: one metadata format, one base class, and its backends.

Owns the choice of a backend. Knows nothing of models, scheduling or sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from aengine.attention.base import AttentionBackend, AttentionSpec, AttentionStep, BackendUnavailableError, GraphStep
from aengine.attention.metadata import AttentionMetadata, Layouts, StepLayout, build_layout
from aengine.attention.torch_native import TorchNativeBackend
from aengine.errors import ConfigError

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "AttentionStep",
    "BackendUnavailableError",
    "GraphStep",
    "Layouts",
    "StepLayout",
    "build_layout",
    "select_backend",
]

_log = logging.getLogger("aengine")


def select_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend that `EngineConfig.attention_backend` names, with one log line that says which and why.

    "auto" takes the first of flashinfer, triton and torch_native that can run on CUDA, and torch_native on a CPU. Raises ConfigError if the
    named backend cannot run here.
    """
    if name == "auto":
        return _first_possible(spec)
    if name not in _MAKERS:
        raise ConfigError.of("attention_backend", f"{name!r} is not one of auto, {', '.join(_MAKERS)}")
    try:
        backend = _MAKERS[name](spec)
    except BackendUnavailableError as reason:
        raise ConfigError.of("attention_backend", f"{name!r} is not possible here: {reason}") from reason
    _log.info("attention backend: %s (asked for)", name)
    return backend


def _first_possible(spec: AttentionSpec) -> AttentionBackend:
    if spec.device.type != "cuda":
        _log.info("attention backend: torch_native (the only backend for %s)", spec.device.type)
        return TorchNativeBackend(spec)
    declined: list[str] = []
    for name, make in _MAKERS.items():
        try:
            backend = make(spec)
        except BackendUnavailableError as reason:
            declined.append(f"{name}: {reason}")
            continue
        _log.info("attention backend: %s (%s)", name, "; ".join(declined) or "the first choice on cuda")
        return backend
    raise AssertionError("torch_native is always possible")


def _flashinfer(spec: AttentionSpec) -> AttentionBackend:
    from aengine.attention.flashinfer import FlashInferBackend

    return FlashInferBackend(spec)


def _triton(spec: AttentionSpec) -> AttentionBackend:
    try:
        from aengine.attention.triton import TritonBackend
    except ImportError as error:
        raise BackendUnavailableError(f"Triton cannot be imported: {error}") from error
    return TritonBackend(spec)


# In order of preference on CUDA. Functions, so that the packages of a backend are imported only where it is tried.
_MAKERS: Mapping[str, Callable[[AttentionSpec], AttentionBackend]] = {
    "flashinfer": _flashinfer,
    "triton": _triton,
    "torch_native": TorchNativeBackend,
}
