"""`Routing`: how the scores of a router choose experts for a token, and the choice in plain torch, which is the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class RouterScoring(Enum):
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """A token goes to the `top_k` experts with the highest scores, whose outputs are summed with weights."""

    top_k: int
    scoring: RouterScoring = RouterScoring.SOFTMAX  # of the router's logits, over all experts
    normalize: bool = True  # the scores of a token's experts, which are their weights, are divided by their sum
    scaling: float = 1.0  # multiplies the weights
    num_groups: int = 1  # experts are chosen from `top_groups` of so many groups of equal size
    top_groups: int = 1
    group_top: int = 1  # a group's score is the sum of so many of its highest scores


def route(logits: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
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


def _of_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """[T, num_experts] -> the same, where what is in other groups is -inf."""
    if routing.top_groups == routing.num_groups:
        return ranked
    by_group = ranked.view(len(ranked), routing.num_groups, ranked.shape[1] // routing.num_groups)
    kept = by_group.topk(routing.group_top, -1).values.sum(-1).topk(routing.top_groups, -1).indices
    dropped = torch.ones(by_group.shape[:2], dtype=torch.bool, device=ranked.device).scatter(1, kept, False)
    return by_group.masked_fill(dropped.unsqueeze(-1), -math.inf).flatten(1)
