"""Attention over paged KV: one metadata format, one contract, and the backends behind it.

Owns the choice of a backend. Knows nothing of models, scheduling or sampling.
"""

from __future__ import annotations

import logging

from aengine.attention.base import AttentionBackend, AttentionSpec, AttentionStep, BackendUnavailableError, GraphStep
from aengine.attention.metadata import AttentionMetadata, StepLayout, build_layout
from aengine.attention.torch_native import TorchNativeBackend
from aengine.errors import ConfigError

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "AttentionStep",
    "BackendUnavailableError",
    "GraphStep",
    "StepLayout",
    "build_layout",
    "select_backend",
]

_log = logging.getLogger("aengine")


def select_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend that `EngineConfig.attention_backend` names, with one log line that says which and why."""
    if name not in ("auto", "torch_native"):
        raise ConfigError.of("attention_backend", f"{name!r} is not one of auto, torch_native")
    reason = "asked for" if name != "auto" else f"the only backend for {spec.device.type}"
    _log.info("attention backend: torch_native (%s)", reason)
    return TorchNativeBackend(spec)
