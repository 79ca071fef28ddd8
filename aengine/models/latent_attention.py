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
from aengine.models.spec import LatentAttention


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
        self._rotation = Rotation(cos_sin)
        self._row_parallel = row_parallel
        self._q: tuple[Linear | Normalize, ...]
        if attention.q_lora_rank is None:
            self._q = (weights.linear("q"),)
        else:
            self._q = weights.linear("q_down"), Normalize(attention.norm, weights, "q_down_norm", ops), weights.linear("q_up")
        self._kv_down, self._norm = weights.linear("kv_down"), Normalize(attention.norm, weights, "kv_down_norm", ops)
        self._key_up, self._value_up = weights["key_up.weight"], weights["value_up.weight"]
        self._output = weights.linear("output")

    def __call__(self, x: Activations, positions: Tensor, step: AttentionStep) -> Tensor:
        attention, q = self._attention, x
        assert isinstance(q, Tensor)
        for layer in self._q:
            q = layer(q)
        heads = q.view(len(x), attention.num_heads, attention.rope_dim + attention.nope_dim)
        rotated, rest = torch.split(heads, [attention.rope_dim, attention.nope_dim], dim=-1)
        key, latent = torch.split(self._kv_down(x), [attention.rope_dim, attention.kv_lora_rank], dim=-1)
        rotated, key = self._ops.rotate(rotated.contiguous(), key.contiguous().unsqueeze(1), self._rotation, positions)
        value = self._norm(latent.contiguous()).unsqueeze(1)
        step.write(self._index, torch.cat((key, value), dim=-1), value)
        query = torch.cat((rotated, _by_head(rest, self._key_up)), dim=-1)
        attended = step.attend(self._index, query)
        return self._row_parallel.after(self._output(self._row_parallel.before(_by_head(attended, self._value_up).flatten(1))))


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """[T, heads, in] times [heads, out, in] -> [T, heads, out]."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
