"""aengine: an async streaming LLM inference engine that lives inside your own event loop.

Importing this package is cheap and needs the standard library alone, so that kernels can be compiled where nothing is installed. The engine
itself is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aengine.api import VERSION
from aengine.api.config import EngineConfig
from aengine.api.errors import (
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
from aengine.api.outputs import (
    AdapterInfo,
    Completion,
    DraftUsage,
    Embedding,
    EngineStats,
    FinishReason,
    MemoryUse,
    Score,
    Token,
    TokenLogprob,
    Usage,
)
from aengine.api.params import EmbeddingParams, Reasoning, RepetitionStop, SamplingParams, StructuredOutput
from aengine.api.request import ForkPoint, RequestOptions
from aengine.api.weight_sources import GroupWeights, SharedWeights, send_weights

if TYPE_CHECKING:
    from aengine.aio.bridge import on_asyncio
    from aengine.api.engine import EngineBase, EngineProtocol
    from aengine.api.receipt import Receipt
    from aengine.api.stream import StreamProtocol, TokenStream
    from aengine.api.stream_group import StreamGroup
    from aengine.engine.async_engine import AsyncEngine
    from aengine.engine.llm import LLM
    from aengine.router.router import Router

__version__ = VERSION

__all__ = [
    "LLM",
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
    "EngineBase",
    "EngineConfig",
    "EngineDeadError",
    "EngineProtocol",
    "EngineStateError",
    "EngineStats",
    "FinishReason",
    "ForkPoint",
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
    "Receipt",
    "RepetitionStop",
    "RequestEndedError",
    "RequestIdInUseError",
    "RequestOptions",
    "Router",
    "SamplingParams",
    "Score",
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
    "EngineBase": "aengine.api.engine",
    "EngineProtocol": "aengine.api.engine",
    "LLM": "aengine.engine.llm",
    "Receipt": "aengine.api.receipt",
    "Router": "aengine.router.router",
    "StreamGroup": "aengine.api.stream_group",
    "StreamProtocol": "aengine.api.stream",
    "TokenStream": "aengine.api.stream",
    "on_asyncio": "aengine.aio.bridge",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'aengine' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
