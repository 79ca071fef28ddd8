"""The torch decoder: one declarative model for every `ModelSpec`.

Owns the order of operations of a forward pass. Attention, KV and metadata come with the batch; weights come from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.attention import AttentionStep
from aengine.layers.ops import LayerOps, TorchOps
from aengine.layers.rotary import cos_sin_cache
from aengine.models.named_weights import named_weights
from aengine.models.spec import ModelSpec, Norm


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of a mixed batch; the tokens of a row are consecutive."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    logits_indices: Tensor  # [m] int32, the tokens whose logits are computed
    attention: AttentionStep


class Decoder:
    """The whole model. `model(batch)` is the hidden states, `model.logits` the output head on the tokens whose logits are asked for."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], num_positions: int, ops: LayerOps | None = None) -> None:
        """Uses `weights` (those of `named_weights(spec)`, all on one device) without copying them.

        It can be called with positions below `num_positions`. `ops`: those of the device; None: plain torch.
        Raises ValueError for other weights than the spec's.
        """
        different = named_weights(spec).keys() ^ weights.keys()
        if different:
            raise ValueError(f"weights that are missing or unknown: {', '.join(sorted(different))}")
        self._weights = weights
        self._eps = _plain(spec).eps
        self._ops: LayerOps = ops or TorchOps()
        self._cos_sin = cos_sin_cache(spec.ropes[0], num_positions, weights["embedding.weight"].device)
        self._layers = [_Layer(spec, index, weights) for index in range(spec.num_layers)]

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size], normed, ready for the head."""
        ops, eps = self._ops, self._eps
        x, residual = torch.empty(0), F.embedding(batch.input_ids, self._weights["embedding.weight"])
        for layer in self._layers:
            if layer.index == 0:
                x = ops.rms_norm(residual, layer.attention_norm, eps)
            else:
                x, residual = ops.add_rms_norm(x, residual, layer.attention_norm, eps)
            x, residual = layer.forward(x, residual, self._cos_sin, batch, ops)
        return ops.add_rms_norm(x, residual, self._weights["norm.weight"], eps)[0]

    def logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [m, vocab_size] float32, of the tokens `batch.logits_indices`."""
        return self.head_logits(hidden.index_select(0, batch.logits_indices)).float()

    def head_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[m, hidden_size] -> [m, vocab_size] in the dtype of the weights, in `out` if it is given."""
        return torch.mm(hidden, self.head_weight.t(), out=out)

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, hidden_size]; the embedding where the head is tied to it."""
        return self._weights.get("head.weight", self._weights["embedding.weight"])


def _plain(spec: ModelSpec) -> Norm:
    """The norm of a model that has one kind of norm."""
    assert spec.norm is not None
    return spec.norm


class _Layer:
    """One block: x += attention(norm(x)); x += mlp(norm(x)). The sum that follows a block is made with the norm of the next."""

    def __init__(self, spec: ModelSpec, index: int, weights: Mapping[str, Tensor]) -> None:
        def get(name: str) -> Tensor | None:
            return weights.get(f"layers.{index}.{name}")

        self.index = index
        self.attention_norm = weights[f"layers.{index}.attention_norm.weight"]
        self._mlp_norm = weights[f"layers.{index}.mlp_norm.weight"]
        self._q_norm, self._k_norm = get("q_norm.weight"), get("k_norm.weight")
        self._qkv, self._output, self._gate_up, self._down = (
            partial(F.linear, weight=weights[f"layers.{index}.{name}.weight"], bias=get(f"{name}.bias"))
            for name in ("qkv", "output", "gate_up", "down")
        )
        attention = spec.layers[index].attention
        self._head_dim, self._eps = attention.key_dim, _plain(spec).eps
        self._qkv_sizes = [heads * attention.key_dim for heads in (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)]

    def forward(self, x: Tensor, residual: Tensor, cos_sin: Tensor, batch: ForwardBatch, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """`x` [T, hidden_size] is the normed input, `residual` what it was normed from, both given up. Returns what is to be added to
        the residual, and the residual."""
        qkv = torch.split(self._qkv(x), self._qkv_sizes, dim=-1)
        q, k, v = (part.view(len(x), -1, self._head_dim) for part in qkv)
        q, k = ops.rotate(q, k, cos_sin, batch.positions, self._q_norm, self._k_norm, self._eps)
        batch.attention.write(self.index, k, v)
        attended = self._output(batch.attention.attend(self.index, q).flatten(1))
        x, residual = ops.add_rms_norm(attended, residual, self._mlp_norm, self._eps)
        return self._down(ops.silu_mul(self._gate_up(x))), residual
