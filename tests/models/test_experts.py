"""The block of experts: which experts it chooses, and that a graph can hold the choice."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aengine.kernels.params import ExpertRouting, RouterScoring
from aengine.layers.ops import TorchOps, route
from aengine.models.spec import Experts, Mlp
from aengine.models.torch.blocks import Weights
from aengine.models.torch.mlps import ExpertsBlock

ROUTING = ExpertRouting(3, RouterScoring.SIGMOID, num_groups=4, top_groups=2, group_top=2)
EXPERTS = Experts(8, Mlp(16), ROUTING, correction=True, shared=Mlp(24))
SHAPES = {
    "router.weight": (8, 32),
    "router_correction": (8,),
    "experts.gate_up.weight": (8, 32, 32),
    "experts.down.weight": (8, 32, 16),
    "shared.gate_up.weight": (48, 32),
    "shared.down.weight": (32, 24),
}


def test_experts_are_chosen_from_the_best_groups_by_corrected_scores_and_weighted_by_scores() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6, 0.5, 0.4, 0.8, 0.1]])
    correction = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2, 0.05, 0.0, 0.0])
    chosen, weights = route(torch.logit(scores), None, correction, ROUTING)
    # Groups have 1.0, 1.2, 1.15 and 0.9: the highest score of all is in a group that is not chosen.
    assert sorted(chosen[0].tolist()) == [2, 3, 4]
    torch.testing.assert_close(weights, scores.gather(1, chosen) / 1.7)


def test_a_row_is_computed_alone_as_in_a_crowd() -> None:
    torch.manual_seed(0)
    block = ExpertsBlock(EXPERTS, Weights({name: torch.randn(shape) / 4 for name, shape in SHAPES.items()}), TorchOps())
    rows = torch.randn(20, 32)
    torch.testing.assert_close(torch.cat([block(row[None]) for row in rows]), block(rows), rtol=1e-5, atol=1e-5)
    assert block(rows[:0]).shape == (0, 32)


def test_a_graph_can_hold_the_choice() -> None:
    """Its operations do not depend on values: tensors without values are enough."""
    with FakeTensorMode():
        chosen, weights = route(torch.empty(5, 8), None, torch.empty(8), ROUTING)
    assert chosen.shape == weights.shape == (5, 3)
