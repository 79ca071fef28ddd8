"""Tiny random models of every family, and what transformers makes of them."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import torch
import transformers

TINY = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # wide enough that greedy tokens vary and near-ties are rare
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

LATENT = {
    **{"kv_lora_rank": 40, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "num_key_value_heads": 4},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2},
}

FAMILIES: dict[str, tuple[str, dict]] = {
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied-biased": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-partly-windowed": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-windowed": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-tied-biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 24}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}}),
    "deepseek-v3": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 1}),
    "deepseek-v3-dense": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 3}),
    "gpt-oss": ("GptOss", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 9, "rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-windowed": ("Mistral", {"sliding_window": 11, "head_dim": 32}),
}


def save_tiny(name: str, path: pathlib.Path, *, dtype: torch.dtype = torch.float32, **saving) -> transformers.PreTrainedModel:
    """Makes the family `name`, all of its parameters random (norms and biases too), and saves it to `path`."""
    prefix, changes = FAMILIES[name]
    return save_random(prefix, {**TINY, **changes}, path, sum(map(ord, name)), dtype=dtype, **saving)


def save_random(prefix: str, config: dict, path: pathlib.Path, seed: int, *, dtype: torch.dtype, **saving) -> transformers.PreTrainedModel:
    """Makes a `{prefix}ForCausalLM`, without "Text" at the end of the prefix, all of its parameters random (norms and biases too), and
    saves it to `path`."""
    torch.manual_seed(seed)
    model = (
        getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**config))
        .to(dtype)
        .eval()
    )
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            parameter.data.uniform_(0.5, 1.5)
        elif parameter_name.endswith("bias"):
            parameter.data.normal_(0.0, 0.1)
    model.save_pretrained(path, **saving)
    return model


@torch.no_grad()
def greedy(model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`generate(do_sample=False)` of `count` tokens, end-of-sequence ids ignored; prompts padded on the left, masked."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    out = model.generate(ids, attention_mask=mask, generation_config=config)
    return out[:, width:].tolist()
