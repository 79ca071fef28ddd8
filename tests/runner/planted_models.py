"""A Llama with one layer that our KV pages cannot serve, known to transformers as the model type "planted"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding


class PlantedConfig(LlamaConfig):
    model_type = "planted"
    planted: str = "nothing"  # a key of `LAYERS`


class IgnoresPositions(LlamaDecoderLayer):
    """Takes the order of the tokens that it is given for their positions."""

    def __init__(self, config: PlantedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden_states: Tensor, position_embeddings: object = None, **options: Any) -> Tensor:
        order = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        return super().forward(hidden_states, position_embeddings=self.rotary(hidden_states, order), **options)


class IsRecurrent(LlamaDecoderLayer):
    """Adds the mean of all tokens so far, beside its attention."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        count = torch.arange(1, hidden_states.shape[1] + 1, device=hidden_states.device)
        return super().forward(hidden_states, *args, **options) + hidden_states.cumsum(1) / count[None, :, None]


class Remembers(LlamaDecoderLayer):
    """Adds what the forward pass before left."""

    memory: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        output = super().forward(hidden_states, *args, **options)
        before, self.memory = self.memory, output[:, -1:].clone()
        return output if before is None else output + before


class LooksAhead(LlamaDecoderLayer):
    """Adds the input of the next token."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        return super().forward(hidden_states, *args, **options) + hidden_states.roll(-1, 1)


class HasNoAttention(nn.Module):
    def __init__(self, config: PlantedConfig, layer_idx: int) -> None:
        super().__init__()
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        return hidden_states + self.mix(hidden_states)


class AttendsTwice(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        return super().forward(super().forward(hidden_states, *args, **options), *args, **options)


LAYERS = {
    "nothing": LlamaDecoderLayer,
    **{layer.__name__: layer for layer in (IgnoresPositions, IsRecurrent, Remembers, LooksAhead, HasNoAttention, AttendsTwice)},
}


class PlantedForCausalLM(LlamaForCausalLM):
    config_class = PlantedConfig

    def __init__(self, config: PlantedConfig) -> None:
        super().__init__(config)
        self.model.layers[2] = LAYERS[config.planted](config, 2)
        self.post_init()


AutoConfig.register("planted", PlantedConfig)
AutoModelForCausalLM.register(PlantedConfig, PlantedForCausalLM)
