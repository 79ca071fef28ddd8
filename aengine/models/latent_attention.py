"""The block of multi-head latent attention of the torch decoder, in absorbed form (DeepSeek-V2, 2024, section 2.1).

Owns the projections around the attention, which is that of any model with one KV head. Knows nothing of experts, batches or checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.attention import AttentionStep
from aengine.kernels.layer_params import Rotation
from aengine.layers.collectives import RowParallel
from aengine.layers.ops import Activations, LayerOps
from aengine.models.blocks import Linear, Normalize, Weights
from aengine.models.spec import LatentAttention, NormKind


class LatentAttentionBlock:
    """Multi-head latent attention of one layer."""

    takes_float8 = False

    def __init__(
        self, attention: LatentAttention, index: int, weights: Weights, cos_sin: Tensor, ops: LayerOps, row_parallel: RowParallel
    ) -> None:
        """`cos_sin` [num_positions, rope_dim] is the table of the layer's rope. Of several ranks each has some of the heads, whose outputs
        `row_parallel` joins."""
        self._attention = attention
        self._index = index
        self._ops = ops
        self._row_parallel = row_parallel
        self._q: tuple[Linear | Normalize, ...]
        if attention.q_lora_rank is None:
            self._q = (weights.linear("q"),)
        else:
            self._q = weights.linear("q_down"), Normalize(attention.norm, weights, "q_down_norm", ops), weights.linear("q_up")
        assert attention.norm.kind is NormKind.RMS, "the only kind that models have"
        norm = Normalize(attention.norm, weights, "kv_down_norm", ops)  # fused with the rotation
        self._kv_down, self._rotation = weights.linear("kv_down"), Rotation(cos_sin, key_norm=norm.weight, eps=attention.norm.eps)
        self._key_up, self._value_up = weights["key_up.weight"], weights["value_up.weight"]
        self._output = weights.linear("output")

    def __call__(self, x: Activations, positions: Tensor, step: AttentionStep) -> Tensor:
        attention, q = self._attention, x
        assert isinstance(q, Tensor)
        for layer in self._q:
            q = layer(q)
        heads = q.view(len(x), attention.num_heads, attention.rope_dim + attention.nope_dim)
        query = heads.new_empty(len(x), attention.num_heads, attention.rope_dim + attention.kv_lora_rank)
        rope, target, key = slice(attention.rope_dim), step.target(self._index), self._kv_down(x).unsqueeze(1)
        self._ops.rotate_latent(heads[..., rope], query[..., rope], key, self._rotation, positions, target)
        if target is None:
            step.write(self._index, key, key[..., attention.rope_dim :])
        _by_head(heads[..., attention.rope_dim :], self._key_up, query[..., attention.rope_dim :])
        attended = step.attend(self._index, query)
        values = attended.new_empty(len(x), attention.num_heads, attention.v_dim)
        _by_head(attended, self._value_up, values)
        return self._row_parallel.after(self._output(self._row_parallel.before(values.flatten(1))))


def _by_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """[T, heads, in] times [heads, out, in] to `out` [T, heads, out], whose last dimension is contiguous."""
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
