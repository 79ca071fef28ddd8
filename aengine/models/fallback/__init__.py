"""Models that `families/` does not know, run by the code of transformers, with our attention and KV pages.

Owns what such a model must be, how it is loaded, and the check that it computes what its own forward pass does. `FallbackSpec` describes
one without importing transformers, which the other files do.
"""

from __future__ import annotations

from typing import Any

from aengine.api.dataclass import dataclass
from aengine.kernels.paged_cache import Heads, Scoring, layers_per_place


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer calls the attention function with."""

    name: str  # of its module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scoring: Scoring

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class FallbackSpec:
    """What is known of a model in the code of transformers before its weights are read. Fields that a `ModelSpec` has too have the same
    meaning."""

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
    encodes: bool = False  # every token sees all tokens of the prompt, which is computed in one step; nothing is kept of it
    encoder_layers: tuple[str, ...] = ()  # the modules that call attention; `attention` is then a layer of some size
    labels: tuple[str, ...] = ()  # of a model that classifies texts
    label_pooling: str = "last"  # which hidden state the scores of the labels are made of, as of `EmbeddingParams`
    is_part: bool = False  # the text part of a model, whose checkpoint has it under other names, beside tensors that are not looked at

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer in tokens; None: all tokens."""
        return tuple(call.scoring.window for call in self.attention)

    @property
    def layers_per_place(self) -> tuple[int, ...]:
        """By layer, how many such as it have room in the place of the widest, see `LayerGroups`."""
        return layers_per_place([call.heads for call in self.attention])

    @property
    def place_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers, each of which has one place."""
        return self.windows
