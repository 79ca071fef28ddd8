"""Tiny random models of types that only transformers runs, with everything in them active."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers

WINDOW = 8
TINY: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
}
"""Keys that a type has take these values."""
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
_HALF_WINDOWED = ["sliding_attention", "full_attention"] * 2
TYPES: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1, "global_attn_every_n_layers": 2},
    "apertus": {},
    "arcee": {},
    "biogpt": {"tie_word_embeddings": False},
    "bitnet": {},
    "cohere": {"logit_scale": 0.5},
    "cwm": {"layer_types": _HALF_WINDOWED},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_k": 2, "moe_layer_start_index": 1},
    "exaone4": {"sliding_window_pattern": 2},
    "flex_olmo": {},
    "gemma": {},
    "glm": {},
    "gpt_bigcode": {"tie_word_embeddings": False},
    "granitemoe": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "granitemoeshared": {"shared_intermediate_size": 32, "attention_multiplier": 0.3},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "jais2": {},
    "minicpm3": {**_LATENT, "head_dim": 8, "tie_word_embeddings": False},
    "minimax_m2": {},
    "ministral3": {},
    "modernbert-decoder": {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
    "nanochat": {},
    "nemotron": {},
    "olmo": {"clip_qkv": 3.0},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "persimmon": {},
    "phi": {},
    "phimoe": {},
    "seed_oss": {},
    "solar_open": {},
    "vaultgemma": {
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "youtu": {**_LATENT, "head_dim": 8, "pad_token_id": None},
    # Heads that differ by layer:
    "mimo_v2_flash": {"head_dim": 16, "v_head_dim": 12, "layer_types": _HALF_WINDOWED},
    # Sinks, and windows of a pattern:
    "gpt_oss": {"layer_types": _HALF_WINDOWED},
    # Without memory for their weights they cannot be probed:
    "jetmoe": {"kv_channels": 12, "num_key_value_heads": 2},
    "longcat_flash": {**_LATENT, "head_dim": 8, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "moe_topk": 2},
}
"""Model types with the values that make what is theirs active."""
DISTINCT = (
    *("afmoe", "bitnet", "cohere", "exaone4", "gemma", "glm4_moe_lite", "gpt_bigcode", "gpt_oss"),
    *("granitemoe", "mimo_v2_flash", "minicpm3", "modernbert-decoder", "olmo", "opt", "phimoe", "vaultgemma"),
)
"""Those that differ most from one another."""


def tiny_config(model_type: str, **changes: Any) -> transformers.PreTrainedConfig:
    kind = transformers.CONFIG_MAPPING[model_type]
    known = kind()
    values = {key: value for key, value in TINY.items() if hasattr(known, key)}
    return kind(**{**values, **TYPES.get(model_type, {}), **changes})


def save_model(config: transformers.PreTrainedConfig, path: pathlib.Path, seed: int = 0) -> transformers.PreTrainedModel:
    """Makes the model, all of its parameters random (norms, biases and sinks too), and saves it to `path`."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "norm" not in name:
            parameter.data.normal_(0.0, 0.2)
        elif "norm" in name or "ln_" in name:
            parameter.data.uniform_(0.5, 1.5) if name.endswith("weight") else parameter.data.normal_(0.0, 0.1)
        else:
            parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(path)
    return model
