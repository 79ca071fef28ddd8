"""The torch decoder: one declarative model for every `ModelSpec`.

Owns the order of operations of a forward pass. Attention, KV and metadata come with the batch; weights come from outside.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from aengine.layers.embedding import Embedding
from aengine.layers.linear import Linear
from aengine.layers.norm import RMSNorm
from aengine.layers.ops import LayerOps, TorchOps
from aengine.layers.rotary import cos_sin_cache
from aengine.models.batch import ForwardBatch
from aengine.models.spec import ModelSpec


class DecoderLayer(nn.Module):
    """One block: x += attention(norm(x)); x += mlp(norm(x)). The sum that follows a block is made with the norm of the next."""

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

    def forward(self, x: Tensor, residual: Tensor, cos_sin: Tensor, batch: ForwardBatch, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """`x` [T, hidden_size] is the normed input, `residual` what it was normed from, both given up. Returns what is to be added to
        the residual, and the residual."""
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in self.qkv.split(x))
        q_norm, k_norm = (None, None) if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        q, k = ops.rotate(q, k, cos_sin, batch.positions, q_norm, k_norm, self.mlp_norm.eps)
        batch.attention.write(self.index, k, v)
        attended = self.output(batch.attention.attend(self.index, q).flatten(1))
        x, residual = ops.add_rms_norm(attended, residual, self.mlp_norm.weight, self.mlp_norm.eps)
        return self.down(ops.silu_mul(self.gate_up(x))), residual


class Decoder(nn.Module):
    """The whole model. `model(batch)` is the hidden states, `model.logits` the output head on the rows that want logits."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(spec, index) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.head = None if spec.tied_head else Linear(spec.hidden_size, spec.vocab_size)
        self.cos_sin = torch.empty(0)
        self.ops: LayerOps = TorchOps()

    @classmethod
    def build(cls, spec: ModelSpec, weights: Mapping[str, Tensor], num_positions: int, ops: LayerOps | None = None) -> Decoder:
        """A decoder that uses `weights` (those of `named_weights(spec)`, all on one device) without copying them.

        It can be called with positions below `num_positions`. `ops`: those of the device; None: plain torch.
        """
        with torch.device("meta"):
            model = cls(spec)
        if ops is not None:
            model.ops = ops
        model.load_state_dict(dict(weights), strict=True, assign=True)
        model.cos_sin = cos_sin_cache(spec.rope, num_positions, weights["embedding.weight"].device)
        return model

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size], normed, ready for the head."""
        ops = self.ops
        x, residual = torch.empty(0), self.embedding(batch.input_ids)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            norm = layer.attention_norm
            if layer.index == 0:
                x = ops.rms_norm(residual, norm.weight, norm.eps)
            else:
                x, residual = ops.add_rms_norm(x, residual, norm.weight, norm.eps)
            x, residual = layer(x, residual, self.cos_sin, batch, ops)
        return ops.add_rms_norm(x, residual, self.norm.weight, self.norm.eps)[0]

    def logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [m, vocab_size] float32, of the tokens `batch.logits_indices`."""
        return self.head_logits(hidden.index_select(0, batch.logits_indices)).float()

    def head_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[m, hidden_size] -> [m, vocab_size] in the dtype of the weights, in `out` if it is given."""
        return torch.mm(hidden, self.head_weight.t(), out=out)

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, hidden_size]"""
        return self.embedding.weight if self.head is None else self.head.weight
