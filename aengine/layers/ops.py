"""What a decoder layer computes between its matrix products: `LayerOps`, which has three implementations.

`TorchOps` runs everywhere and is the reference. Knows nothing of models, attention or batches.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.paged_cache import KvTarget, PagedCache, write_torch
from aengine.kernels.params import Activation, ExpertLinear, ExpertMlp, ExpertRouting, Rotation, RouterScoring, SharedOutput
from aengine.kernels.quantizing import Float8Rows

Activations = Tensor | Float8Rows


class LinearMethod(Protocol):
    """A matrix [out_features, in_features] in memory, and the product with it."""

    @property
    def takes_float8(self) -> bool:
        """Whether activations may be `Float8Rows`, which is then the faster way."""

    @property
    def nbytes(self) -> int: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the numbers of the matrix."""

    @property
    def form(self) -> object:
        """Equal where tensors of the same shapes and dtypes mean the same."""

    def __call__(self, x: Activations, bias: Tensor | None) -> Tensor:
        """[T, in_features] -> [T, out_features]"""


class LayerOps(Protocol):
    """Activations are [T, ...], on one device and of one dtype, as the weights; statistics and angles are float32.

    A weight of a norm may be float32 where activations are narrower (Gemma's 1 + w): then the product with it is all that is rounded.
    An argument that is "overwritten" may be used as the memory of a result. Results are valid until the step ends.
    """

    @property
    def name(self) -> str: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[T, size] -> [T, size]: x / sqrt(mean(x^2) + eps), rounded to the dtype as the models' own implementations do, times
        `weight` [size]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum of both [T, size], rounded to the dtype, is the new residual: returns (its `rms_norm`, the sum). Both are overwritten."""

    def rotate(self, query: Tensor, key: Tensor, rotation: Rotation, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T, heads, head_dim] queries and keys, normalised and then rotated by their `positions` [T] int32, as the `rotation` says. Last
        dimensions are contiguous, token strides any. Query and key are overwritten."""

    def rotate_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, positions: Tensor, target: KvTarget
    ) -> Tensor:
        """Rotates as `rotate` does, and writes the keys with [T, heads, value_dim] values to the target. Returns the queries. Query and key
        are overwritten."""

    def rotate_latent(
        self, query: Tensor, out: Tensor, key: Tensor, rotation: Rotation, positions: Tensor, target: KvTarget | None
    ) -> None:
        """Writes the rotated [T, heads, rotary_dim] queries to `out`, whose shape is theirs. Of [T, 1, rotary_dim + size] latent keys the
        first rotary_dim numbers are rotated, and the `key_norm` [size] of the `rotation` is that of the others alone; the result
        overwrites them, or goes to the target alone, whose cache holds values as parts of keys. Last dimensions are contiguous."""

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Applies a gated activation to [T, 2 * size], the gate's half first, as `aengine.layers.ops.gated` does: [T, size]."""

    def float8(self, x: Tensor) -> Float8Rows:
        """[T, size] as `Float8Rows.of` makes them."""

    def rms_norm_float8(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Float8Rows:
        """`float8` of the `rms_norm` of x, or of the sum with a residual, which the sum overwrites."""

    def gated_float8(self, gate_up: Tensor, activation: Activation) -> Float8Rows:
        """Returns the `Float8Rows` that `float8` makes of the result of `gated`."""

    def route(self, logits: Tensor, bias: Tensor | None, correction: Tensor | None, routing: ExpertRouting) -> tuple[Tensor, Tensor]:
        """Chooses the experts of each token by a router's logits [T, num_experts] float32: their numbers [T, top_k] int64 and their
        weights, float32. The arguments and results are those of `aengine.layers.ops.route`."""

    def experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, mlp: ExpertMlp, dtype: torch.dtype, shared: SharedOutput | None = None
    ) -> Tensor:
        """What the `chosen` experts [T, top_k] int64 make of each row of `x`, and what is `shared`, added in float32 with the `weights`
        [T, top_k] float32 of the former: [T, out_features of down] in `dtype`."""


class TorchOps:
    """`LayerOps` in plain torch: the reference, which runs on every device."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def rotate(self, query: Tensor, key: Tensor, rotation: Rotation, positions: Tensor) -> tuple[Tensor, Tensor]:
        if rotation.query_norm is not None:
            query = self.rms_norm(query, rotation.query_norm, rotation.eps)
        if rotation.key_norm is not None:
            key = self.rms_norm(key, rotation.key_norm, rotation.eps)
        cos, sin = _cos_sin(rotation, positions)
        return apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)

    def rotate_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, positions: Tensor, target: KvTarget
    ) -> Tensor:
        query, key = self.rotate(query, key, rotation, positions)
        write_torch(key, value, target)
        return query

    def rotate_latent(
        self, query: Tensor, out: Tensor, key: Tensor, rotation: Rotation, positions: Tensor, target: KvTarget | None
    ) -> None:
        assert rotation.key_norm is not None
        size = rotation.cos_sin.shape[1]
        cos, sin = _cos_sin(rotation, positions)
        out.copy_(apply_rotary(query, cos, sin))
        value = self.rms_norm(key[..., size:], rotation.key_norm, rotation.eps)
        whole = torch.cat((apply_rotary(key[..., :size], cos, sin), value), dim=-1)
        if target is None:
            key.copy_(whole)
        else:
            write_torch(whole, value, target)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated(gate_up, activation)

    def float8(self, x: Tensor) -> Float8Rows:
        return Float8Rows.of(x)

    def rms_norm_float8(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Float8Rows:
        return self.float8(self.rms_norm(x if residual is None else residual.add_(x), weight, eps))

    def gated_float8(self, gate_up: Tensor, activation: Activation) -> Float8Rows:
        return self.float8(gated(gate_up, activation))

    def route(self, logits: Tensor, bias: Tensor | None, correction: Tensor | None, routing: ExpertRouting) -> tuple[Tensor, Tensor]:
        return route(logits, bias, correction, routing)

    def experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, mlp: ExpertMlp, dtype: torch.dtype, shared: SharedOutput | None = None
    ) -> Tensor:
        """On a CPU each expert computes its tokens; elsewhere all tokens, because shapes in a graph must not depend on the choice."""
        assert isinstance(mlp.down.weight, Tensor)
        num_experts, size, _ = mlp.down.weight.shape
        out = torch.zeros(len(x), size, dtype=torch.float32, device=x.device)
        if x.is_cuda:
            by_expert = out.new_zeros(len(x), num_experts).scatter(1, chosen, weights)
            for expert in range(num_experts):
                out += _run_expert(x, expert, mlp) * by_expert[:, expert, None]
        else:
            for expert in sorted({*chosen.flatten().tolist()}):
                tokens, places = (chosen == expert).nonzero(as_tuple=True)
                out.index_add_(0, tokens, _run_expert(x[tokens], expert, mlp) * weights[tokens, places, None])
        return (out if shared is None else shared.added_to(out)).to(dtype)


def _cos_sin(rotation: Rotation, positions: Tensor) -> tuple[Tensor, ...]:
    """[T, 1, rotary_dim / 2] each."""
    return rotation.cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)


def _run_expert(x: Tensor, expert: int, mlp: ExpertMlp) -> Tensor:
    """[t, size] -> the same in float32."""
    return _expert_linear(mlp.activate(_expert_linear(x, expert, mlp.up)), expert, mlp.down).float()


def _expert_linear(x: Tensor, expert: int, linear: ExpertLinear) -> Tensor:
    assert isinstance(linear.weight, Tensor)
    return F.linear(x, linear.weight[expert], None if linear.bias is None else linear.bias[expert])


def run_once(ops: LayerOps, dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    """Runs each operation on activations of `dtype` and heads of `head_dim`, so that it is compiled or loaded. Passes errors on."""

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    weight = ones(head_dim)
    ops.rms_norm(ones(1, head_dim), weight, 1e-6)
    ops.add_rms_norm(ones(1, head_dim), ones(1, head_dim), weight, 1e-6)
    ops.gated(ones(1, 2 * head_dim), Activation.SILU)
    rotation = Rotation(torch.ones(1, head_dim, device=device), weight, weight, 1e-6)
    positions = torch.zeros(1, dtype=torch.int32, device=device)
    query, key = ones(1, 2, head_dim), ones(1, 1, head_dim)
    ops.rotate(query, key, rotation, positions)
    target = KvTarget(PagedCache(ones(1, 1, 1, head_dim), ones(1, 1, 1, head_dim)), positions)
    ops.rotate_and_write(query, key, key, rotation, positions, target)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first 2 * r dimensions of [T, heads, head_dim] by [T, 1, r] float32 cos and sin, halves paired (the "neox" form)."""
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((apply_rotary(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def activated(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.SILU:
            return F.silu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.RELU:
            return F.relu(x)
        case Activation.RELU_SQUARED:
            return F.relu(x).square()
    raise ValueError(f"{activation.value} needs a gate")


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """[T, 2 * size] -> [T, size]: the activation of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is Activation.CLIPPED_SWIGLU:
        gate = gate.clamp(max=7.0)
        return (up.clamp(-7.0, 7.0) + 1.0) * (gate * (gate * 1.702).sigmoid())
    return activated(gate, activation) * up


def route(logits: Tensor, bias: Tensor | None, correction: Tensor | None, routing: ExpertRouting) -> tuple[Tensor, Tensor]:
    """The experts of each token by a router's logits [T, num_experts] float32 and its bias [num_experts]: their numbers [T, top_k] int64,
    the best first, and their weights float32. `correction` [num_experts] float32 is added to the scores for the choice alone."""
    logits = logits if bias is None else logits + bias.float()
    scores = logits.softmax(-1) if routing.scoring is RouterScoring.SOFTMAX else logits.sigmoid()
    ranked = scores if correction is None else scores + correction
    chosen = _of_best_groups(ranked, routing).topk(routing.top_k, -1).indices
    weights = scores.gather(1, chosen)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * routing.scaling


def _of_best_groups(ranked: Tensor, routing: ExpertRouting) -> Tensor:
    """[T, num_experts] -> the same, where what is in other groups is -inf."""
    if routing.top_groups == routing.num_groups:
        return ranked
    by_group = ranked.view(len(ranked), routing.num_groups, ranked.shape[1] // routing.num_groups)
    kept = by_group.topk(routing.group_top, -1).values.sum(-1).topk(routing.top_groups, -1).indices
    dropped = by_group[:, :, 0].new_ones(by_group.shape[:2]).bool().scatter(1, kept, False)
    return by_group.masked_fill(dropped.unsqueeze(-1), -math.inf).flatten(1)
