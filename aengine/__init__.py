"""aengine: an async streaming LLM inference engine that lives inside your own event loop.

Importing this package is cheap: it loads neither torch nor transformers. The engine itself is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aengine.config import EngineConfig
from aengine.errors import (
    AdapterError,
    AdapterNotFoundError,
    AEngineError,
    ConfigError,
    ConnectionLostError,
    ContextLengthError,
    EngineDeadError,
    EngineStateError,
    InsufficientMemoryError,
    InvalidRequestError,
    KVCapacityError,
    ModelLoadError,
    NoReplicaError,
    NothingToChooseError,
    NoTokenizerError,
    PoisonRequestError,
    QueueFullError,
    RankDiedError,
    RankError,
    RankHungError,
    RequestEndedError,
    RequestIdInUseError,
    ServerError,
    StepHangError,
)
from aengine.loop_bridge import on_asyncio
from aengine.outputs import AdapterInfo, Completion, DraftUsage, Embedding, EngineStats, FinishReason, MemoryUse, Token, TokenLogprob, Usage
from aengine.params import EmbeddingParams, Reasoning, SamplingParams, StructuredOutput
from aengine.protocols import EngineProtocol
from aengine.requests import RequestOptions
from aengine.stream_base import StreamProtocol
from aengine.weight_sources import GroupWeights, SharedWeights, send_weights

if TYPE_CHECKING:
    from aengine.engine.async_engine import AsyncEngine
    from aengine.engine.stream import TokenStream
    from aengine.router.router import Router
    from aengine.stream_group import StreamGroup

__version__ = "0.1.0"

__all__ = [
    "AEngineError",
    "AdapterError",
    "AdapterInfo",
    "AdapterNotFoundError",
    "AsyncEngine",
    "Completion",
    "ConfigError",
    "ConnectionLostError",
    "ContextLengthError",
    "DraftUsage",
    "Embedding",
    "EmbeddingParams",
    "EngineConfig",
    "EngineDeadError",
    "EngineProtocol",
    "EngineStateError",
    "EngineStats",
    "FinishReason",
    "GroupWeights",
    "InsufficientMemoryError",
    "InvalidRequestError",
    "KVCapacityError",
    "MemoryUse",
    "ModelLoadError",
    "NoReplicaError",
    "NoTokenizerError",
    "NothingToChooseError",
    "PoisonRequestError",
    "QueueFullError",
    "RankDiedError",
    "RankError",
    "RankHungError",
    "Reasoning",
    "RequestEndedError",
    "RequestIdInUseError",
    "RequestOptions",
    "Router",
    "SamplingParams",
    "ServerError",
    "SharedWeights",
    "StepHangError",
    "StreamGroup",
    "StreamProtocol",
    "StructuredOutput",
    "Token",
    "TokenLogprob",
    "TokenStream",
    "Usage",
    "on_asyncio",
    "send_weights",
]

_LAZY = {
    "AsyncEngine": "aengine.engine.async_engine",
    "TokenStream": "aengine.engine.stream",
    "Router": "aengine.router.router",
    "StreamGroup": "aengine.stream_group",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'aengine' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
