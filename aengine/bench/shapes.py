"""Shapes of public models, so that a benchmark needs no download: a config.json with what decides their shape, and the demo tokenizer.

Owns the numbers, which are those of the published config files, and the folder they are written to: Qwen/Qwen3-0.6B, Qwen/Qwen3-8B,
Qwen/Qwen3-30B-A3B, meta-llama/Llama-3.1-8B, meta-llama/Llama-3.1-70B, meta-llama/Llama-3.2-1B, google/gemma-3-1b-it,
microsoft/Phi-4-mini-instruct, allenai/OLMoE-1B-7B-0924, openai/gpt-oss-20b, deepseek-ai/DeepSeek-V3. A name that ends with a number of
layers is that of a model with fewer layers than the published one. Weights are random (`load_format` dummy): a step takes as long
whatever they are. The tokenizer knows far fewer ids than the models; ids that it lacks decode to nothing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aengine.models.loading.hub import DEMO, resolve_model


def _sizes(layers: int, hidden: int, intermediate: int, heads: int) -> dict[str, int]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads}


_QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "eos_token_id": 151645,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
}
_LLAMA3: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "eos_token_id": 128001,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_LLAMA32: Mapping[str, Any] = {"head_dim": 64, "rope_scaling": {**_LLAMA3["rope_scaling"], "factor": 32.0}, "tie_word_embeddings": True}
_GEMMA3: Mapping[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "eos_token_id": [1, 106],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
# fmt: off
_LONG_FACTOR = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898, 2.735880826, 3.059592084,
    3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372,
    10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03,
    32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]
# fmt: on
_PHI4_MINI: Mapping[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "eos_token_id": 199999,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "longrope", "long_factor": _LONG_FACTOR, "short_factor": [1.0] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}
_LFM2: Mapping[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "conv_L_cache": 3,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-05,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 65_536,
}
_QWEN35: Mapping[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "eos_token_id": 248_044,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 262_144,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 248_320,
}
_QWEN35_WIDE = {"num_key_value_heads": 4, "linear_num_value_heads": 32, "tie_word_embeddings": False}
_OLMOE: Mapping[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "eos_token_id": 50279,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 50304,
}
_GPT_OSS: Mapping[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201_088,
}
_QWEN3_MOE: Mapping[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_DEEPSEEK_V3: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129_280,
}
_SMALL = {"head_dim": 64, "num_key_value_heads": 4, "vocab_size": 65_536, "eos_token_id": None}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    # qwen3-60m and gpt-oss-1.4b are of no published model: they are small enough for a CPU. The latter is gpt-oss-20b of half its width.
    "qwen3-60m": {**_QWEN3, **_SMALL, **_sizes(8, 512, 1536, 8)},
    "qwen3-0.6b": {**_QWEN3, **_sizes(28, 1024, 3072, 16)},
    "qwen3-8b": {**_QWEN3, **_sizes(36, 4096, 12_288, 32), "tie_word_embeddings": False},
    "llama-3.1-8b": {**_LLAMA3, **_sizes(32, 4096, 14336, 32)},
    "qwen3-30b-a3b": {**_QWEN3_MOE, **_sizes(48, 2048, 6144, 32)},
    "llama-3.1-70b-20l": {**_LLAMA3, **_sizes(20, 8192, 28_672, 64)},
    "deepseek-v3-4l": {**_DEEPSEEK_V3, **_sizes(4, 7168, 18_432, 128)},
    "lfm2-1.2b": {**_LFM2, **_sizes(16, 2048, 12_288, 32)},
    "qwen3.5-0.8b": {**_QWEN35, **_sizes(24, 1024, 3584, 8)},
    "qwen3.5-9b": {**_QWEN35, **_sizes(32, 4096, 12_288, 16), **_QWEN35_WIDE},
    "llama-3.2-1b": {**_LLAMA3, **_LLAMA32, **_sizes(16, 2048, 8192, 32)},
    "gemma-3-1b": {**_GEMMA3, **_sizes(26, 1152, 6912, 4)},
    "phi-4-mini-8l": {**_PHI4_MINI, **_sizes(8, 3072, 8192, 24)},
    "olmoe-6l": {**_OLMOE, **_sizes(6, 2048, 1024, 16)},
    "gpt-oss-1.4b": {**_GPT_OSS, **_sizes(6, 1440, 1440, 32), "num_key_value_heads": 4, "vocab_size": 65_536, "eos_token_id": None},
}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def describe(name: str) -> str:
    """Describes a shape in one line for people: layers, sizes, heads, experts."""
    config = SHAPES[name]
    heads = f"{config['num_attention_heads']}/{config['num_key_value_heads']} heads"
    count = next((config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config), None)
    experts = f", {config['num_experts_per_tok']}/{count} experts" if count else ""
    sizes = f"hidden {config['hidden_size']}, {heads}{experts}, vocabulary {config['vocab_size']}"
    return f"{name} ({config['num_hidden_layers']} layers, {sizes})"


@contextmanager
def shape_folder(name: str) -> Iterator[Path]:
    """A folder with config.json and tokenizer, called like the shape, that is there while inside. Raises ValueError for an unknown name."""
    if name not in SHAPES:
        raise ValueError(f"there is no shape {name!r}; there are {', '.join(SHAPES)}")
    demo = resolve_model(DEMO)
    with tempfile.TemporaryDirectory(prefix="aengine-shape-") as parent:
        folder = Path(parent) / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n")
        for file in _TOKENIZER_FILES:
            shutil.copyfile(demo / file, folder / file)
        yield folder
