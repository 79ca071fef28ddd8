"""Cases of mixtures of experts, and of latent attention."""

from __future__ import annotations

import torch
import transformers
from family_cases import Case


@torch.no_grad()
def _adjust(model: transformers.PreTrainedModel) -> None:
    """Corrections of the routers' scores, which are buffers, change choices. Large biases would decide the tokens alone. Gates and ups of
    GPT-OSS are often beyond their limits."""
    generator = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2, generator=generator)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter *= 0.3
        elif name.endswith("experts.gate_up_proj") and isinstance(model, transformers.GptOssForCausalLM):
            parameter *= 6.0
        elif name.endswith("experts.down_proj") and isinstance(model, transformers.GptOssForCausalLM):
            parameter *= 0.1


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_GRANITE = {"attention_multiplier": 0.4, "residual_multiplier": 0.6, "embedding_multiplier": 5.0, "logits_scaling": 3.0}
_ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32}
_SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.4,
}
_DEEPSEEK = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 20},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1},
    **{"routed_scaling_factor": 1.7, "rms_norm_eps": 1e-5},
}
_LLAMA4 = {
    **{"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1], "moe_layers": [0, 1, 3], "attention_chunk_size": 9, "head_dim": 16},
    **{"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size": 32, "intermediate_size_mlp": 96},
    **{"attn_scale": 0.7, "floor_scale": 7, "rms_norm_eps": 1e-5},
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 32,
    },
}
CASES = [
    Case("mixtral", "Mixtral", {"num_local_experts": 6, "sliding_window": 12}),
    Case(
        "qwen2-moe",
        "Qwen2Moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 48, "use_sliding_window": True, "sliding_window": 13, "mlp_only_layers": [1]},
    ),
    Case(
        "qwen2-moe-normalized", "Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 48, "norm_topk_prob": True, "qkv_bias": False}
    ),
    Case("qwen3-moe", "Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 4, "head_dim": 32}),
    Case("qwen3-moe-windowed", "Qwen3Moe", {**_EXPERTS, "attention_bias": True, "use_sliding_window": True, "sliding_window": 11}),
    Case("llama4", "Llama4Text", _LLAMA4, padded=False),
    Case(
        "llama4-without-norms", "Llama4Text", {**_LLAMA4, "use_qk_norm": False, "attn_temperature_tuning": False, "num_experts_per_tok": 2}
    ),
    Case("olmoe", "Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    Case(
        "gpt-oss",
        "GptOss",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 14},
            "rope_parameters": {**_YARN, "truncate": False},
        },
        adjust=_adjust,
    ),
    Case(
        "deepseek-v2",
        "DeepseekV2",
        {
            **_DEEPSEEK,
            **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    Case("deepseek-v2-lite", "DeepseekV2", {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"}),
    Case(
        "deepseek-v3",
        "DeepseekV3",
        {
            **_DEEPSEEK,
            **{"n_group": 4, "topk_group": 2, "attention_bias": True},
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        adjust=_adjust,
    ),
    Case("glm4-moe-lite", "Glm4MoeLite", {**_DEEPSEEK, "n_group": 2, "mlp_layer_types": ["sparse", "dense", "sparse"]}, adjust=_adjust),
    Case(
        "glm4-moe",
        "Glm4Moe",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
            **{"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.3, "use_qk_norm": True, "attention_bias": True, "head_dim": 32},
        },
        adjust=_adjust,
    ),
    Case(
        "minimax-m2",
        "MiniMaxM2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
        adjust=_adjust,
    ),
    Case(
        "dots1",
        "Dots1",
        {**_SIGMOID, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": 12, "max_window_layers": 1},
        adjust=_adjust,
    ),
    Case("solar-open", "SolarOpen", {**_SIGMOID, "head_dim": 32, "attention_bias": True}, adjust=_adjust),
    Case(
        "exaone-moe",
        "ExaoneMoe",
        {**_EXPERTS, "num_hidden_layers": 5, "sliding_window": 12, "num_shared_experts": 2},
        adjust=_adjust,
    ),
    Case(
        "ernie4-5-moe",
        "Ernie4_5_Moe",
        {**_ERNIE, "num_hidden_layers": 4, "moe_layer_interval": 2, "use_bias": True},
        adjust=_adjust,
    ),
    Case("ernie4-5-moe-no-shared", "Ernie4_5_Moe", {**_ERNIE, "moe_num_shared_experts": 0, "moe_layer_end_index": 1}, adjust=_adjust),
    Case(
        "cohere2-moe",
        "Cohere2Moe",
        {
            **{
                "num_hidden_layers": 6,
                "head_dim": 32,
                "sliding_window": 12,
                "logit_scale": 0.3,
                "num_experts": 8,
                "num_experts_per_tok": 3,
            },
            **{"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 80, "num_shared_experts": 2},
            **{"shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid"},
        },
    ),
    Case("cohere2-moe-softmax", "Cohere2Moe", {"head_dim": 32, "sliding_window": 12, "logit_scale": 0.3, "rms_norm_eps": 1e-5}),
    Case("granitemoe", "GraniteMoe", {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    Case("granitemoeshared", "GraniteMoeShared", {**_GRANITE, "num_local_experts": 6, "shared_intermediate_size": 40}),
    Case(
        "granite4",
        "GraniteMoeHybrid",
        {**_GRANITE, "num_local_experts": 0, "shared_intermediate_size": 80, "layer_types": ["attention"] * 3}
        | {"position_embedding_type": "rope"},
    ),
    Case(
        "granite4-moe-nope",
        "GraniteMoeHybrid",
        {**_GRANITE, "num_local_experts": 6, "shared_intermediate_size": 40, "layer_types": ["attention"] * 3},
    ),
]
