"""`FallbackSpec`: what is known of a model of transformers before its weights are read. Does not import transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aengine.kernels.paged_cache import Scoring


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer calls the attention function with."""

    name: str  # of its module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scoring: Scoring


@dataclass(frozen=True, slots=True)
class FallbackSpec:
    """Fields that a `ModelSpec` has too have the same meaning."""

    config: Any  # of transformers
    family: str
    architecture: str
    vocab_size: int
    hidden_size: int  # that the output head reads
    max_position_embeddings: int
    attention: tuple[LayerCall, ...]  # by layer
    num_parameters: int
    num_active_parameters: int
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    unused: tuple[str, ...] = ()  # names of models inside the model that text does not enter
    is_part: bool = False  # the text part of a model, whose checkpoint has it under other names, beside tensors that are not looked at

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer in tokens; None: all tokens."""
        return tuple(call.scoring.window for call in self.attention)
