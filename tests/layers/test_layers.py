"""Layers against the formulas they claim."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aengine.kernels.arrays import as_tensor
from aengine.layers.ops import TorchOps, apply_rotary
from aengine.layers.rotary import RopeSpec, cos_sin_cache, unscaled
from aengine.models.config.rope import read_rope

ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn with everything": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "truncate": False,
    },
    "yarn with a factor of its own": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 0.9,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(name: str) -> None:
    parameters = ROPES[name]
    config = transformers.LlamaConfig(rope_parameters=dict(parameters), head_dim=128, max_position_embeddings=131072)
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    spec, _ = read_rope({"rope_parameters": parameters}, 128, 131072)
    torch.testing.assert_close(torch.tensor(spec.frequencies), expected, rtol=1e-6, atol=0.0)
    cache = as_tensor(cos_sin_cache(spec, 10))
    assert cache.dtype == torch.float32
    torch.testing.assert_close(cache[0], torch.cat((torch.full((64,), factor), torch.zeros(64))))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + pair / 100 for pair in range(32)],
    "long_factor": [1.0 + pair for pair in range(32)],
}


@pytest.mark.parametrize("given", [{}, {"factor": 3.0}, {"attention_factor": 1.3}])
@pytest.mark.parametrize(("max_model_len", "seq_len"), [(4096, None), (1, None), (4097, 4097), (None, 131072)])
def test_longrope_is_chosen_by_the_longest_sequence(given, max_model_len: int | None, seq_len: int | None) -> None:
    config = transformers.LlamaConfig(rope_parameters={**LONGROPE, **given}, head_dim=128, max_position_embeddings=131072)
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=seq_len)
    spec, context = read_rope({"rope_parameters": {**LONGROPE, **given}}, 128, 131072, max_model_len)
    torch.testing.assert_close(torch.tensor(spec.frequencies), expected, rtol=1e-6, atol=0.0)
    assert (spec.attention_factor, context) == (pytest.approx(factor), 131072)


@pytest.mark.parametrize(("max_model_len", "context"), [(None, 4096), (100, 4096), (10000, 10000), (99999, 16384)])
def test_dynamic_rope_is_scaled_for_a_longer_context(max_model_len: int | None, context: int) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = transformers.LlamaConfig(rope_parameters=dict(parameters), head_dim=128, max_position_embeddings=4096)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=context)
    spec, found = read_rope({"rope_parameters": parameters}, 128, 4096, max_model_len)
    torch.testing.assert_close(torch.tensor(spec.frequencies), expected, rtol=1e-6, atol=0.0)
    assert found == context


def test_rotation_is_by_the_angle() -> None:
    """As complex numbers: (x1 + i x2) * exp(i position theta^(-2j/d))."""
    spec = RopeSpec.of(unscaled(head_dim=8, theta=100.0))
    positions = torch.tensor([0, 3, 11])
    x = torch.randn(3, 2, 8)
    cos, sin = as_tensor(cos_sin_cache(spec, 12))[positions].unsqueeze(1).chunk(2, -1)
    rotated = apply_rotary(x, cos, sin)
    angles = positions[:, None, None] * 100.0 ** (-torch.arange(4) / 4)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(torch.complex(rotated[..., :4], rotated[..., 4:]), expected)
    assert apply_rotary(x.bfloat16(), cos, sin).dtype == torch.bfloat16
    wider = torch.cat((x, torch.randn(3, 2, 4)), dim=-1)
    assert torch.equal(apply_rotary(wider, cos, sin), torch.cat((rotated, wider[..., 8:]), dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_does_not_touch_its_input(dtype: torch.dtype) -> None:
    weight = torch.linspace(0.5, 2.0, 16).to(dtype)
    x = (torch.randn(4, 16) * 30).to(dtype)
    before = x.clone()
    out = TorchOps().rms_norm(x, weight, 1e-5)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert out.dtype == dtype
    assert torch.equal(x, before)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
