"""What is absent from a config.json, and what older ones have under other keys, means what Transformers makes of it."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import transformers

from aengine.models.config.model_config import read_spec
from aengine.models.families import FAMILIES
from aengine.models.spec import ModelSpec

SIZES = {
    "vocab_size": 300,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
}
MIXTURES = ("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "glm4_moe", "glm4_moe_lite", "deepseek_v3")
NAMES = {  # in config.json, of families that do not say it as most do
    "gpt2": {"n_positions": 512, "n_embd": 512, "n_layer": 12, "n_head": 32, "vocab_size": 300},
    **{key: {"n_positions": 512, "n_embd": 512, "n_layer": 12, "n_head": 4, "vocab_size": 300} for key in ("gptj", "codegen")},
    "gpt_neo": {"max_position_embeddings": 512, "hidden_size": 512, "num_layers": 24, "num_heads": 32, "vocab_size": 300},
    "bloom": {"hidden_size": 512, "n_layer": 12, "n_head": 32, "vocab_size": 300},
    "mpt": {"d_model": 512, "n_layers": 12, "n_heads": 32, "vocab_size": 300},
    "opt": {
        "vocab_size": 300,
        "hidden_size": 512,
        "ffn_dim": 96,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "word_embed_proj_dim": 512,
    },
    "qwen2_moe": {**SIZES, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
    **{key: {**SIZES, "moe_intermediate_size": 48} for key in MIXTURES},
    "deepseek_v2": {**SIZES, "moe_intermediate_size": 48, "num_experts_per_tok": 2},
    "dots1": {**SIZES, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "granitemoehybrid": {**SIZES, "layer_types": ["attention", "mamba"] * (SIZES["num_hidden_layers"] // 2), "mamba_n_heads": 16},
    "gemma3n_text": {**SIZES, "num_kv_shared_layers": 4},
    "helium": {**SIZES, "num_key_value_heads": 32},
    "mamba2": {"vocab_size": 300, "hidden_size": 512, "num_hidden_layers": 12, "num_heads": 16},
    "bamba": {**SIZES, "attn_layer_indices": [1, 3], "mamba_n_heads": 16},
    "nemotron_h": {**SIZES, "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
    "llama_eagle3": {
        **{**SIZES, "num_hidden_layers": 1, "target_hidden_size": 96, "draft_vocab_size": 200, "norm_before_residual": True},
        **{"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "eagle_config": {}},
    },
}
WRITTEN_AS = {"mimo": "qwen2", "llama_eagle3": "llama"}
"""The model types of families whose configs Transformers has no class for."""
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.2}
OLDER = {
    "gemma2": {"rope_theta": 500.0},
    "gemma3_text": {
        "rope_theta": 5e5,
        "rope_local_base_freq": 700.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 4,
    },
    "olmo2": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "olmo3": {"rope_theta": 7e5, "rope_scaling": YARN},
    "phi3": {
        "rope_theta": 700.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [7.5] * 8},
        "original_max_position_embeddings": 512,
        "head_dim": 16,
    },
    "glm4": {"partial_rotary_factor": 0.25, "rope_theta": 700.0},
    "smollm3": {"rope_theta": 700.0, "no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 9},
    "granite": {"rope_theta": 700.0, "rope_scaling": YARN},
    "cohere2": {"rope_theta": 700.0, "sliding_window_pattern": 3},
    "ministral": {"rope_theta": 700.0, "sliding_window": None},
    "falcon": {"rope_theta": 700.0, "new_decoder_architecture": True, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1},
}


def architectures(model_type: str) -> list[str]:
    """As in config.json; empty for a family that is a part of others alone."""
    return [FAMILIES[model_type].architecture] if FAMILIES[model_type].architecture else []


def spec_of(config: dict) -> ModelSpec:
    """Without what generation alone needs."""
    return dataclasses.replace(read_spec(config), dtype=None, eos_token_ids=())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_keys(model_type: str) -> None:
    given = {"architectures": architectures(model_type), **NAMES.get(model_type, SIZES)}
    config_class = transformers.CONFIG_MAPPING[WRITTEN_AS.get(model_type, model_type)]
    whole = {**config_class(**copy.deepcopy(given)).to_dict(), "architectures": given["architectures"], "model_type": model_type}
    given["model_type"] = model_type
    assert len(whole) > len(given) + 5
    assert spec_of(given) == spec_of(whole)


@pytest.mark.parametrize("model_type", OLDER)
def test_older_forms(model_type: str) -> None:
    given = {"architectures": architectures(model_type), **SIZES, **OLDER[model_type]}
    whole = transformers.CONFIG_MAPPING[model_type](**copy.deepcopy(given)).to_dict()
    assert spec_of(given) == spec_of(whole)
    assert spec_of(given) != spec_of({**given, "rope_theta": 900.0, "text_config": SIZES})
