"""What the config.json of a mixture of experts means, how its parameters are counted, and which ones are refused."""

from __future__ import annotations

import json
import os
import pathlib
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aengine.api.config import EngineConfig
from aengine.api.errors import ModelLoadError
from aengine.engine.loading import load_model
from aengine.kernels.params import ExpertRouting, RouterScoring
from aengine.models.config.model_config import read_spec
from aengine.models.loading.weights import stored_weights
from aengine.models.named_weights import named_weights, num_active_parameters, num_parameters
from aengine.models.spec import Experts, LatentAttention, Mlp
from aengine.runner.torch.loading import fused

BASE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts_per_tok": 2,
}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}


def config(architecture: str, **changes):
    return {**BASE, "architectures": [architecture], **changes}


def deepseek(version: int, **changes):
    sizes = {**LATENT, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    return config(f"DeepseekV{version}ForCausalLM", **{**sizes, **changes})


def test_a_token_uses_its_experts_alone() -> None:
    spec = read_spec(config("Qwen2MoeForCausalLM", num_experts=8))
    hidden, expert = 64, 3 * 64 * 32
    attention = hidden * (64 + 2 * 32) + 64 + 2 * 32 + hidden * hidden
    shared = 3 * hidden * 48 + hidden
    always = 4 * (attention + shared + 8 * hidden + 2 * hidden) + 2 * 100 * hidden + hidden
    assert num_parameters(spec) == always + 4 * 8 * expert
    assert num_active_parameters(spec) == always + 4 * 2 * expert


def test_a_latent_cache_is_small() -> None:
    attention = read_spec(deepseek(3)).layers[0].attention
    assert isinstance(attention, LatentAttention)
    assert (attention.num_kv_heads, attention.key_dim, attention.value_dim) == (1, 8 + 24, 24)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 1.0),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1.0),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7}}, 1.0),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7}}, 1.0970406),
    ],
)
def test_yarn_scales_latent_attention(changes, factor: float) -> None:
    for version in (2, 3):
        attention = read_spec(deepseek(version, **changes)).layers[0].attention
        assert attention.scale == pytest.approx(24**-0.5 * factor**2)


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, []),
        ({"mlp_only_layers": [0, 3]}, [0, 3]),
        ({"decoder_sparse_step": 2}, [0, 2]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 1, 2]),
    ],
)
def test_layers_without_experts(changes, dense) -> None:
    for architecture in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        layers = read_spec(config(architecture, num_experts=4, **changes)).layers
        assert [number for number, layer in enumerate(layers) if isinstance(layer.mlp, Mlp)] == dense
    assert [isinstance(layer.mlp, Mlp) for layer in read_spec(deepseek(3, first_k_dense_replace=2)).layers] == [True, True, False, False]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None,) * 4),
        ({"use_sliding_window": True}, (9, None, 9, None)),
        ({"use_sliding_window": True, "max_window_layers": 2}, (9, None, None, None)),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2}, (None, 9, None, 9)),
    ],
)
def test_windows_of_qwen2_moe(changes, windows) -> None:
    assert read_spec(config("Qwen2MoeForCausalLM", sliding_window=9, **changes)).windows == windows


def test_groups_of_experts() -> None:
    def groups(**changes):
        block = read_spec(deepseek(2, **changes)).layers[1].mlp
        assert isinstance(block, Experts)
        return block.routing.num_groups, block.routing.top_groups, block.routing.group_top

    assert groups() == (1, 1, 1)
    assert groups(topk_method="group_limited_greedy") == (4, 2, 1)
    block = read_spec(deepseek(3)).layers[1].mlp
    assert isinstance(block, Experts)
    assert block.routing == ExpertRouting(2, RouterScoring.SIGMOID, True, 2.5, 4, 2, 2)
    assert block.correction


def test_the_number_of_experts_has_several_keys() -> None:
    for key in ("num_experts", "num_local_experts"):
        block = read_spec(config("Qwen3MoeForCausalLM", **{key: 6})).layers[0].mlp
        assert isinstance(block, Experts)
        assert block.num_experts == 6


def test_the_correction_stays_in_float32() -> None:
    spec = read_spec(deepseek(3))
    weights = ((name, (np.ones(weight.shape, np.float32),)) for name, weight in named_weights(spec).items())
    dtypes = {name: tensor.dtype for name, tensor in fused(spec, weights, torch.bfloat16, torch.device("cpu")).items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {f"layers.{n}.router_correction" for n in (1, 2, 3)}


REFUSED = [
    (config("GptOssForCausalLM", quantization_config={"quant_method": "quark"}), "quantization_config .*'quark'"),
    (config("GptOssForCausalLM", swiglu_limit=6.0), "swiglu_limit 6.0 .* supported is 7.0"),
    (config("OlmoeForCausalLM", clip_qkv=8.0), "clip_qkv 8.0 .* supported is null"),
    (config("MixtralForCausalLM", num_experts_per_tok=9), "num_experts_per_tok 9 is more than the 8 experts"),
    (config("MixtralForCausalLM", num_local_experts=2**20), "num_local_experts 1048576 in config.json is not at most 262144 in all layers"),
    (deepseek(2, topk_method="noaux_tc"), "topk_method 'noaux_tc' .* greedy, group_limited_greedy"),
    (deepseek(2, norm_topk_prob=True), "norm_topk_prob True"),
    (deepseek(3, topk_method="greedy"), "topk_method 'greedy'"),
    (deepseek(3, scoring_func="softmax"), "scoring_func 'softmax'"),
    (deepseek(3, rope_interleave=False), "rope_interleave False"),
    (deepseek(3, n_group=3), "8 experts in n_group 3 groups"),
    (deepseek(3, topk_group=1, num_experts_per_tok=3), "num_experts_per_tok 3 is more than the 2 experts"),
    (deepseek(3, moe_layer_freq=2), "moe_layer_freq 2"),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals_name_the_feature(refused, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_spec(refused)


@pytest.mark.parametrize(("backend", "widths"), [("auto", 48 + 32), ("torch_native", 48)], ids=str)
def test_what_an_engine_says_of_a_latent_cache(tmp_path: pathlib.Path, backend: str, widths: int) -> None:
    """Our CPU kernels store the latent twice: as part of the key and as the value."""
    if backend == "auto" and os.environ.get("AENGINE_CPU_LEVEL") == "torch":
        widths = 48
    (tmp_path / "config.json").write_text(json.dumps(deepseek(3, kv_lora_rank=32, qk_rope_head_dim=16)))
    options = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "kv_cache_memory": 1 << 20}
    config = EngineConfig(model=str(tmp_path), attention_backend=backend, **options)
    info = load_model(config, lambda: None).info
    assert info.kv_bytes_per_token == 4 * widths * 4  # layers, numbers, float32
    expert = 3 * 64 * 32
    assert info.num_parameters - info.num_active_parameters == 3 * 6 * expert  # of layers with 8 experts, of which 2 are used


def test_missing_experts_are_named_shortly(tmp_path: pathlib.Path) -> None:
    spec = read_spec(config("Qwen3MoeForCausalLM", num_experts=64))
    parts = [part for weight in named_weights(spec).values() for part in weight.parts]
    save_file(
        {part.source: torch.zeros(part.shape) for part in parts if ".2.mlp.experts" not in part.source}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelLoadError, match=r"lacks model\.layers\.2\.mlp\.experts\.0\..* and 184 more$") as error:
        next(stored_weights(spec, tmp_path))
    assert len(str(error.value)) < 700


def test_an_mtp_layer_is_ignored(tmp_path: pathlib.Path) -> None:
    """It stands behind the model's own layers; what is no such layer, or stands elsewhere, is not."""
    spec = read_spec(config("Glm4MoeForCausalLM", num_hidden_layers=48, first_k_dense_replace=48, hidden_size=16, n_routed_experts=2))
    stored = {part.source: torch.zeros(part.shape) for weight in named_weights(spec).values() for part in weight.parts}
    path = tmp_path / "model.safetensors"
    save_file({**stored, "model.layers.48.eh_proj.weight": torch.zeros(1), "model.layers.48.x": torch.zeros(1)}, path)
    assert dict(stored_weights(spec, tmp_path)).keys() == named_weights(spec).keys()
    for name in ("model.layers.48.x", "model.layers.92.eh_proj.weight"):
        save_file({**stored, name: torch.zeros(1)}, path)
        with pytest.raises(ModelLoadError, match=rf"has unexpected {re.escape(name)}$"):
            next(stored_weights(spec, tmp_path))
