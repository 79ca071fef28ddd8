"""The block of experts of the torch decoder: a router that gives each token to a few of many MLPs.

Owns which experts a token goes to, and the sum of their results. Knows nothing of attention, batches or checkpoints.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.layers.ops import LayerOps
from aengine.models.blocks import MlpBlock, Weights, activated
from aengine.models.spec import Experts, RouterScoring


def route(experts: Experts, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """The router's [T, num_experts] float32 logits -> the [T, top_k] experts of each token, int64, and their weights, float32.

    `correction` [num_experts] float32 counts for the choice alone.
    """
    scores = logits.softmax(-1) if experts.scoring is RouterScoring.SOFTMAX else logits.sigmoid()
    ranked = scores if correction is None else scores + correction
    if experts.num_groups > 1:
        by_group = ranked.view(len(ranked), experts.num_groups, -1)
        kept = by_group.topk(experts.group_top, -1).values.sum(-1).topk(experts.top_groups, -1).indices
        dropped = torch.ones(by_group.shape[:2], dtype=torch.bool, device=logits.device).scatter(1, kept, False)
        ranked = by_group.masked_fill(dropped.unsqueeze(-1), -math.inf).flatten(1)
    chosen = ranked.topk(experts.top_k, -1).indices
    weights = scores.gather(1, chosen)
    if experts.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * experts.scaling


class ExpertsBlock:
    """Routed experts, and those that all tokens share."""

    def __init__(self, experts: Experts, weights: Weights, ops: LayerOps) -> None:
        self._experts = experts
        self._ops = ops
        self._router, self._router_bias = weights["router.weight"], weights.get("router.bias")
        self._correction = weights.get("router_correction")
        self._gate_up, self._gate_up_bias = weights["experts.gate_up.weight"], weights.get("experts.gate_up.bias")
        self._down, self._down_bias = weights["experts.down.weight"], weights.get("experts.down.bias")
        self._shared = (
            None if experts.shared is None else MlpBlock(experts.shared, Weights(weights.tensors, f"{weights.prefix}shared."), ops)
        )
        self._shared_gate = weights.linear("shared_gate") if experts.shared_gate else None

    def __call__(self, x: Tensor) -> Tensor:
        """The router and the sums are computed in float32."""
        bias = None if self._router_bias is None else self._router_bias.float()
        chosen, weights = route(self._experts, F.linear(x.float(), self._router.float(), bias), self._correction)
        out = self._masked(x, chosen, weights) if x.is_cuda else self._gathered(x, chosen, weights)
        if self._shared is not None:
            shared = self._shared(x).float()
            out += shared if self._shared_gate is None else shared * self._shared_gate(x).float().sigmoid()
        return out.to(x.dtype)

    def _gathered(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, hidden_size] float32: each expert computes its tokens, in the order of the experts."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted({*chosen.flatten().tolist()}):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, tokens, self._expert(expert, x[tokens]) * weights[tokens, places, None])
        return out

    def _masked(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The same, where each expert computes all tokens: shapes do not depend on the choice, as a graph needs it."""
        by_expert = torch.zeros((len(x), self._experts.num_experts), dtype=torch.float32, device=x.device).scatter(1, chosen, weights)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self._experts.num_experts):
            out += self._expert(expert, x) * by_expert[:, expert, None]
        return out

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        """[t, hidden_size] -> the same in float32."""
        up_bias, down_bias = (None if biases is None else biases[expert] for biases in (self._gate_up_bias, self._down_bias))
        inner = activated(self._experts.expert, F.linear(x, self._gate_up[expert], up_bias), self._ops)
        return F.linear(inner, self._down[expert], down_bias).float()
