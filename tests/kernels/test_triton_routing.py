"""Which experts routers choose, and with which weights: our kernel and plain torch against each other and against Transformers' routers."""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers
from torch import Tensor
from triton_mode import DEVICES  # before triton is imported

from aengine.kernels.params import ExpertRouting, RouterScoring
from aengine.kernels.triton import experts as in_triton
from aengine.layers import ops as plain

pytestmark = pytest.mark.slow

SIGMOID = RouterScoring.SIGMOID
KINDS = [
    (8, ExpertRouting(3)),
    (130, ExpertRouting(5, SIGMOID, normalize=False, scaling=2.5)),
    (160, ExpertRouting(6, normalize=False, scaling=16.0, num_groups=8, top_groups=3)),  # DeepSeek-V2
    (256, ExpertRouting(8, SIGMOID, scaling=2.5, num_groups=8, top_groups=4, group_top=2)),  # DeepSeek-V3
    (15, ExpertRouting(4, SIGMOID, num_groups=5, top_groups=2, group_top=3)),
    (6, ExpertRouting(1, num_groups=6, top_groups=1)),
    (8, ExpertRouting(2, num_groups=2, top_groups=2)),
]
SIZES = {
    "num_local_experts": 24,
    "num_experts": 24,
    "n_routed_experts": 24,
    "num_experts_per_tok": 5,
    "hidden_size": 24,
    "num_attention_heads": 4,
}
GROUPS = {"n_group": 6, "topk_group": 3, "routed_scaling_factor": 1.7}
GROUPED = ExpertRouting(5, SIGMOID, scaling=1.7, num_groups=6, top_groups=3, group_top=2)
ROUTERS = [
    ("mixtral", transformers.MixtralConfig(**SIZES), ExpertRouting(5)),
    ("qwen3_moe", transformers.Qwen3MoeConfig(**SIZES, norm_topk_prob=False), ExpertRouting(5, normalize=False)),
    ("gpt_oss", transformers.GptOssConfig(**SIZES), ExpertRouting(5)),
    ("deepseek_v3", transformers.DeepseekV3Config(**SIZES, **GROUPS), GROUPED),
    ("glm4_moe", transformers.Glm4MoeConfig(**SIZES, **GROUPS, norm_topk_prob=True), GROUPED),
    (
        "deepseek_v2",
        transformers.DeepseekV2Config(**SIZES, **GROUPS, topk_method="group_limited_greedy"),
        ExpertRouting(5, normalize=False, scaling=1.7, num_groups=6, top_groups=3),
    ),
]


def drawn(device: str, *shape: int, seed: int, scale: float = 2.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(device)


def by_expert(chosen: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """[T, num_experts], 0 where an expert is not chosen."""
    return weights.new_zeros(len(chosen), num_experts).scatter(1, chosen, weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_experts", "routing"), KINDS)
def test_as_in_torch(num_experts: int, routing: ExpertRouting, biased: bool, device: str) -> None:
    """Without and with a router's bias, which has the dtype of activations, and a correction."""
    logits = drawn(device, 5, num_experts, seed=0)
    bias = drawn(device, num_experts, seed=1).bfloat16() if biased else None
    correction = drawn(device, num_experts, seed=2, scale=0.3) if biased else None
    chosen, weights = in_triton.route(logits, bias, correction, routing)
    expected_chosen, expected_weights = plain.route(logits, bias, correction, routing)
    assert torch.equal(chosen, expected_chosen)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    assert in_triton.route(logits[:0], bias, correction, routing)[0].shape == (0, routing.top_k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_experts", "routing"), KINDS)
def test_of_equal_scores_the_first(num_experts: int, routing: ExpertRouting, device: str) -> None:
    """Among experts and among groups. There are three different scores."""
    scores = torch.tensor([0.2, 0.55, 0.7])[torch.randint(0, 3, (20, num_experts), generator=torch.Generator().manual_seed(0))]
    logits = scores.log() if routing.scoring is RouterScoring.SOFTMAX else scores.logit()
    chosen, _ = in_triton.route(logits.to(device), None, None, routing)
    size = num_experts // routing.num_groups
    for row, found in zip(scores.tolist(), chosen.tolist(), strict=True):
        groups = [sum(sorted(row[first : first + size])[-routing.group_top :]) for first in range(0, num_experts, size)]
        kept = sorted(range(len(groups)), key=lambda group: -groups[group])[: routing.top_groups]
        experts = [expert for expert in range(num_experts) if expert // size in kept]
        assert found == sorted(experts, key=lambda expert: -row[expert])[: routing.top_k]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_experts", "routing"), KINDS)
def test_what_is_no_number_chooses_experts_that_there_are(num_experts: int, routing: ExpertRouting, device: str) -> None:
    logits = drawn(device, 6, num_experts, seed=0)
    for row, value in zip((0, 2, 4), (float("nan"), float("inf"), -float("inf")), strict=True):
        logits[row], logits[row + 1, ::2] = value, value
    chosen, _ = in_triton.route(logits, None, None, routing)
    assert ((chosen >= 0) & (chosen < num_experts)).all()


@torch.no_grad()
def in_transformers(family: str, config: transformers.PreTrainedConfig, logits: Tensor, correction: Tensor) -> Tensor:
    """Weights by expert of a router whose logits are its input."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")  # which may import triton
    (router,) = (made for name, made in vars(module).items() if name.lower().endswith("topkrouter"))
    made = router(config)
    for parameter in made.parameters():
        parameter.zero_()
    made.weight.fill_diagonal_(1.0)
    if hasattr(made, "e_score_correction_bias"):
        made.e_score_correction_bias.copy_(correction)
    _, weights, chosen = made(logits)
    return by_expert(chosen, weights, logits.shape[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "config", "routing"), ROUTERS, ids=[family for family, *_ in ROUTERS])
def test_as_in_transformers(family: str, config: transformers.PreTrainedConfig, routing: ExpertRouting, device: str) -> None:
    logits, correction = drawn("cpu", 50, 24, seed=0), drawn("cpu", 24, seed=1, scale=0.2)
    given = correction.to(device) if routing is GROUPED else None
    found = by_expert(*in_triton.route(logits.to(device), None, given, routing), 24).cpu()
    torch.testing.assert_close(found, in_transformers(family, config, logits, correction), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "config", "routing"), ROUTERS, ids=[family for family, *_ in ROUTERS])
def test_of_equal_scores_torch_takes_the_same_as_transformers(
    family: str, config: transformers.PreTrainedConfig, routing: ExpertRouting
) -> None:
    logits, correction = drawn("cpu", 50, 24, seed=0).round(), drawn("cpu", 24, seed=1).round() / 8
    found = by_expert(*plain.route(logits, None, correction if routing is GROUPED else None, routing), 24)
    torch.testing.assert_close(found, in_transformers(family, config, logits, correction), rtol=1e-5, atol=1e-6)
