"""Every kind of block of a `ModelSpec` in the CPU stack, against `models/torch/decoder.py`: models that have several of them at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import cpu_ops
import numpy as np
import pytest
import torch
from cpu_ops import NO_LAST_TOKENS
from slow_cases import slow_but
from test_cpu_stack import (
    check_bf16_is_as_near_as_torch,
    distance,
    hidden_states,
    layouts,
    pool_of,
    random_weights,
    run_step,
    stack_of,
    token_ids,
    torch_logits,
)

from aengine.kernels.cpu.library import CpuKernels, Workspace
from aengine.kernels.params import DRAW_PARAMS, Activation, ExpertRouting, RouterScoring
from aengine.layers.rotary import RopeSpec, unscaled
from aengine.models.cpu.stack import unsupported
from aengine.models.families import FAMILIES
from aengine.models.families.family import Family
from aengine.models.spec import (
    Attention,
    Experts,
    LatentAttention,
    Layer,
    LearnedPositions,
    Mlp,
    ModelSpec,
    Norm,
    NormKind,
    QkNorm,
)

LAYER_NORM = Norm(NormKind.LAYER, eps=1e-5, bias=True)
RMS = Norm(eps=1e-6)
GEMMA = Norm(eps=1e-6, unit_offset=True)
NO_BIAS = Norm(NormKind.LAYER, eps=1e-5)


def rope(rotary_dim: int, theta: float = 10000.0) -> RopeSpec:
    return RopeSpec.of(unscaled(rotary_dim, theta))


ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, rope=rope(32))
PLAIN = Layer(ATTENTION, Mlp(96), RMS, RMS)


def attention(**changes: Any) -> Attention:
    return dataclasses.replace(ATTENTION, **changes)


def layers(*kinds: Layer) -> tuple[Layer, ...]:
    return kinds * 2 if len(kinds) < 3 else kinds


SLOPES = tuple(0.5 / (1 + head) for head in range(ATTENTION.num_heads))
BIASED = {"qkv_bias": True, "output_bias": True}
GEMMA_LAYER = Layer(attention(scale=0.13, soft_cap=3.0, qk_norm=QkNorm(GEMMA)), Mlp(70, Activation.GELU_TANH), GEMMA, GEMMA, GEMMA, GEMMA)
WINDOWED_GEMMA = dataclasses.replace(GEMMA_LAYER.attention, window=9, rope=rope(32, 90.0))
WINDOWED_GEMMA_LAYER = dataclasses.replace(GEMMA_LAYER, attention=WINDOWED_GEMMA)
COHERE_LAYER = Layer(attention(), Mlp(96), NO_BIAS, None, parallel=True)
SINKS = attention(sinks=True, rope=rope(32, 500.0), **BIASED)
CLIPPED = Mlp(80, Activation.CLIPPED_SWIGLU, up_bias=True, down_bias=True)
LATENT = LatentAttention(
    num_heads=5, q_lora_rank=40, kv_lora_rank=48, nope_dim=16, rope_dim=12, v_dim=18, scale=0.2, rope=rope(12), norm=RMS, bias=True
)
SIGMOID = Experts(
    num_experts=12, expert=Mlp(40), correction=True, shared=Mlp(24),
    routing=ExpertRouting(3, RouterScoring.SIGMOID, scaling=1.5, num_groups=4, top_groups=2, group_top=2),
)  # fmt: skip
GATED = Experts(num_experts=7, expert=Mlp(40), routing=ExpertRouting(2, normalize=False), shared=Mlp(72), shared_gate=True)
CLIPPED_EXPERTS = Experts(
    num_experts=6, expert=dataclasses.replace(CLIPPED, intermediate_size=36), routing=ExpertRouting(2), router_bias=True
)
MODELS: Mapping[str, tuple[tuple[Layer, ...], dict[str, Any]]] = {
    "gpt2": (
        layers(Layer(attention(rope=None, **BIASED), Mlp(100, Activation.GELU_TANH, False, True, True), LAYER_NORM, LAYER_NORM)),
        {"norm": LAYER_NORM, "learned_positions": LearnedPositions(256, 2), "tied_head": True},
    ),
    "gemma": (
        layers(GEMMA_LAYER, WINDOWED_GEMMA_LAYER),
        {"norm": GEMMA, "embedding_scale": 8.03, "logit_soft_cap": 2.5, "tied_head": True},
    ),
    "olmo2": (layers(Layer(attention(qk_norm=QkNorm(RMS, whole=True)), Mlp(96), None, None, RMS, RMS)), {"norm": RMS}),
    "cohere": (
        layers(COHERE_LAYER, dataclasses.replace(COHERE_LAYER, attention=attention(rope=None, window=7))),
        {"norm": NO_BIAS, "logit_scale": 0.25, "hidden_size": 50},
    ),
    "stablelm": (
        layers(
            Layer(attention(head_dim=20, rope=rope(6), qk_norm=QkNorm(NO_BIAS, head_weights=True)), Mlp(96), LAYER_NORM, LAYER_NORM),
            Layer(attention(head_dim=20, rope=rope(6), **BIASED), Mlp(64, Activation.GELU), LAYER_NORM, None, parallel=True),
        ),
        {"norm": LAYER_NORM},
    ),
    "neox": (
        layers(
            Layer(
                attention(head_dim=10, rope=rope(4), num_kv_heads=4, qk_norm=QkNorm(LAYER_NORM), **BIASED),
                Mlp(130, Activation.GELU, False, True, True),
                LAYER_NORM,
                LAYER_NORM,
                parallel=True,
            )
        ),
        {"norm": LAYER_NORM, "head_bias": True, "hidden_size": 90},
    ),
    "gpt-oss": (
        layers(Layer(SINKS, CLIPPED, RMS, RMS), Layer(dataclasses.replace(SINKS, window=13), CLIPPED, RMS, RMS)),
        {"norm": RMS},
    ),
    "granite": (
        layers(dataclasses.replace(PLAIN, residual_multiplier=0.22), dataclasses.replace(GEMMA_LAYER, residual_multiplier=1.7)),
        {"norm": RMS, "embedding_scale": 12.0, "logit_scale": 0.125, "tied_head": True},
    ),
    "opt": (
        layers(Layer(attention(rope=None, slopes=SLOPES), Mlp(96, Activation.RELU, False), RMS, RMS),
            Layer(attention(), Mlp(96, Activation.RELU), RMS, RMS),
        ),
        {"norm": None, "learned_positions": LearnedPositions(256, 0)},
    ),
    "deepseek": (
        layers(Layer(LATENT, Mlp(96), RMS, RMS), Layer(dataclasses.replace(LATENT, q_lora_rank=None), SIGMOID, RMS, RMS)),
        {"norm": RMS},
    ),
    "experts": (
        layers(Layer(attention(), GATED, RMS, RMS),
            Layer(attention(), CLIPPED_EXPERTS, RMS, RMS, RMS, RMS, residual_multiplier=0.7),
            Layer(attention(), dataclasses.replace(GATED, shared=None, shared_gate=False), RMS, None, parallel=True),
        ),
        {"norm": RMS, "hidden_size": 50},
    ),
    "all-identities": (
        layers(Layer(attention(), Mlp(96, Activation.RELU_SQUARED, False), None, None, parallel=True)),
        {"norm": RMS, "hidden_size": 24},
    ),
}  # fmt: skip


class _AnyNames(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return name


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose checkpoints have our names."""

    def read(*_: Any) -> ModelSpec:
        raise NotImplementedError

    names = _AnyNames(layer="layers.{layer}", sinks="sinks", router_correction="router_correction")
    monkeypatch.setitem(FAMILIES, "test", Family("test", "Test", read, names=names))  # type: ignore[misc]


def spec_of(name: str) -> ModelSpec:
    kinds, changes = MODELS[name]
    fields = {"vocab_size": 199, "hidden_size": 64, "max_position_embeddings": 256, "tied_head": False, "initializer_range": 0.15}
    return ModelSpec("test", "Test", layers=kinds, **{**fields, **changes})


def weights_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    weights = random_weights(spec)
    for name, weight in weights.items():
        if name.endswith("sinks"):
            weight.uniform_(-1.0, 4.0)
        if "router" in name:
            weight.normal_(0.0, 0.4)
        if "norm.bias" in name:
            weight.normal_(0.0, 0.3)
    return weights


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("page_size", slow_but([16], [4, 16]))
@pytest.mark.parametrize("name", MODELS)
def test_float32_gives_the_decoders_logits(kernels: CpuKernels, name: str, page_size: int) -> None:
    spec = spec_of(name)
    weights, steps = weights_of(spec), layouts(page_size)
    workspace = Workspace(kernels, 2)
    stack = stack_of(workspace, spec, weights, torch.float32)
    hidden = hidden_states(workspace, stack, pool_of(spec, torch.float32, page_size), steps)
    for mine, expected in zip(hidden, torch_logits(spec, weights, torch.float32, steps), strict=True):
        torch.testing.assert_close(cpu_ops.stack_logits(stack, workspace, mine), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", slow_but(["gemma", "stablelm"], MODELS))
def test_bf16_is_as_near_to_float32_as_torch(some_kernels: CpuKernels, name: str) -> None:
    spec = spec_of(name)
    check_bf16_is_as_near_as_torch(some_kernels, spec, weights_of(spec))


@pytest.mark.parametrize("name", slow_but(["gemma"], MODELS))
def test_int8_is_near(some_kernels: CpuKernels, name: str) -> None:
    spec = spec_of(name)
    weights, steps = weights_of(spec), layouts(16)
    exact = torch.cat(torch_logits(spec, weights, torch.float32, steps))
    workspace = Workspace(some_kernels, 2)
    stack = stack_of(workspace, spec, weights, torch.float32, quantization="int8")
    logits = cpu_ops.stack_logits(stack, workspace, torch.cat(hidden_states(workspace, stack, pool_of(spec, torch.float32, 16), steps)))
    assert distance(spec, logits, exact) < 0.08 * distance(spec, 0 * exact, exact)


@pytest.mark.parametrize("name", ["gemma", "neox", "gpt-oss", "deepseek", "experts"])
def test_bits_do_not_depend_on_threads_or_on_the_logits_indices(some_kernels: CpuKernels, name: str) -> None:
    spec = spec_of(name)
    steps = layouts(16)
    stack = stack_of(Workspace(some_kernels, 1), spec, weights_of(spec), torch.bfloat16)
    expected = hidden_states(Workspace(some_kernels, 1), stack, pool_of(spec, torch.bfloat16, 16), steps)
    workspace, pool = Workspace(some_kernels, 3), pool_of(spec, torch.bfloat16, 16)
    for number, layout in enumerate(steps):
        last = (layout.qo_indptr[1:] - 1)[::-1]
        hidden = run_step(stack, workspace, pool, layout, token_ids(layout, number), last)
        assert torch.equal(hidden, expected[number][torch.from_numpy(last.astype("int64"))])
        step = stack.prepare(workspace, pool, layout, token_ids(layout, number), last, greedy=True, last_tokens=NO_LAST_TOKENS)
        step.run()
        assert step.sampled is not None
        assert step.sampled.tolist() == cpu_ops.stack_logits(stack, workspace, hidden).argmax(-1).tolist()


@pytest.mark.parametrize("name", ["gemma", "cohere"])
def test_a_step_draws_from_the_logits(some_kernels: CpuKernels, name: str) -> None:
    """Capped and scaled as those that torch samples from."""
    spec, layout = spec_of(name), layouts(16)[3]
    workspace = Workspace(some_kernels, 2)
    stack = stack_of(workspace, spec, weights_of(spec), torch.float32)
    everything = np.arange(layout.num_tokens, dtype=np.int32)
    params = np.zeros(layout.num_tokens, DRAW_PARAMS)
    params["temperature"], params["top_p"], params["seed"], params["position"] = 0.8, 1.0, 7, everything
    ids = token_ids(layout, 3)
    hidden = run_step(stack, workspace, pool_of(spec, torch.float32, 16), layout, ids, everything)
    expected = cpu_ops.draw(workspace, cpu_ops.stack_logits(stack, workspace, hidden), params)
    pool = pool_of(spec, torch.float32, 16)
    step = stack.prepare(workspace, pool, layout, ids, everything, draw_params=params, last_tokens=NO_LAST_TOKENS)
    step.run()
    assert step.sampled is not None
    assert step.sampled.tolist() == expected.tolist()


def test_what_is_not_supported() -> None:
    cohere, olmo = spec_of("cohere"), spec_of("olmo2")
    assert all(unsupported(spec_of(name), np.dtype("float32")) is None for name in MODELS)
    narrow = attention(head_dim=12, num_kv_heads=1, qk_norm=QkNorm(RMS, whole=True))
    for spec, layer, reason in (
        (olmo, dataclasses.replace(olmo.layers[0], attention=narrow), "a norm of all keys of a token whose width 12"),
        (cohere, dataclasses.replace(COHERE_LAYER, post_mlp_norm=RMS), "norms after parallel blocks"),
    ):
        assert reason in (unsupported(dataclasses.replace(spec, layers=(layer,)), np.dtype("float32")) or "")
    kinds = tuple(dataclasses.replace(PLAIN, attention=attention(num_heads=heads)) for heads in (2, 4, 6, 8, 10))
    assert "5 kinds of heads; the most is 4" in (unsupported(dataclasses.replace(cohere, layers=kinds), np.dtype("float32")) or "")
    assert "logit_scale" in (unsupported(dataclasses.replace(cohere, norm=None), np.dtype("float32")) or "")
