"""The torch decoder: one declarative model for every `ModelSpec`.

Owns the order of operations of a forward pass. Attention, KV and metadata come with the batch; weights come from outside.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aengine.layers.embedding import Embedding
from aengine.layers.linear import Linear
from aengine.layers.norm import RMSNorm
from aengine.layers.rotary import apply_rotary, cos_sin_cache
from aengine.models.batch import ForwardBatch
from aengine.models.spec import ModelSpec


class DecoderLayer(nn.Module):
    """One block: x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = spec.head_dim
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.qkv = Linear(spec.hidden_size, q_size, kv_size, kv_size, bias=spec.qkv_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.output = Linear(q_size, spec.hidden_size, bias=spec.output_bias)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.gate_up = Linear(spec.hidden_size, spec.intermediate_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]; cos and sin are [T, 1, head_dim / 2] float32."""
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in self.qkv.split(self.attention_norm(x)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        batch.attention.write(self.index, k, v)
        x = x + self.output(batch.attention.attend(self.index, q).flatten(1))
        gate, up = self.gate_up.split(self.mlp_norm(x))
        return x + self.down.forward(F.silu(gate) * up)


class Decoder(nn.Module):
    """The whole model. `model(batch)` is the hidden states, `model.logits` the output head on the rows that want logits."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(spec, index) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.head = None if spec.tied_head else Linear(spec.hidden_size, spec.vocab_size)
        self.cos_sin = torch.empty(0)

    @classmethod
    def build(cls, spec: ModelSpec, weights: Mapping[str, Tensor], num_positions: int) -> Decoder:
        """A decoder that uses `weights` (those of `named_weights(spec)`, all on one device) without copying them.

        It can be called with positions below `num_positions`.
        """
        with torch.device("meta"):
            model = cls(spec)
        model.load_state_dict(dict(weights), strict=True, assign=True)
        model.cos_sin = cos_sin_cache(spec.rope, num_positions, weights["embedding.weight"].device)
        return model

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size], normed, ready for the head."""
        x: Tensor = self.embedding(batch.input_ids)
        cos, sin = self.cos_sin.index_select(0, batch.positions).unsqueeze(1).chunk(2, dim=-1)
        for layer in self.layers:
            x = layer(x, cos, sin, batch)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [m, vocab_size] float32, of the tokens `batch.logits_indices`."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(hidden.index_select(0, batch.logits_indices), weight).float()
