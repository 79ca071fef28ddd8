"""Cases of models whose layers are of several kinds: some without attention, or with other heads than the rest."""

from __future__ import annotations

import torch
import transformers
from family_cases import Case


@torch.no_grad()
def _adjust(model: transformers.PreTrainedModel) -> None:
    """Corrections of the routers' scores, which are buffers, change choices."""
    generator = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith(("expert_bias", "correction_bias")):
            buffer.normal_(0.0, 0.2, generator=generator)


@torch.no_grad()
def _spread(model: transformers.PreTrainedModel) -> None:
    """Decays of some heads that forget in a few tokens, and of others that remember hundreds."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(torch.linspace(-4.0, 1.0, parameter.numel()).view(parameter.shape))
        elif name.endswith("dt_proj.bias"):
            parameter.uniform_(-3.0, 0.0, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def _kimi(model: transformers.PreTrainedModel) -> None:
    _adjust(model)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(torch.linspace(-4.0, 1.0, parameter.numel()).view(parameter.shape))
        elif name.endswith("dt_bias"):
            parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def _gemma4_scales(model: transformers.PreTrainedModel) -> None:
    """Numbers that multiply whole layers, and others that multiply what routers read and give."""
    generator = torch.Generator().manual_seed(4)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            tensor.copy_(0.7 + 0.6 * torch.rand(tensor.shape, generator=generator))


@torch.no_grad()
def _gemma3n(model: transformers.PreTrainedModel) -> None:
    """What is 0 or 1 in new models."""
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if name.endswith("correct_output_scale"):
            parameter.copy_(0.7 + 0.6 * torch.rand(parameter.shape, generator=generator))
        elif name.endswith("_coefs.weight"):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


_CONV, _LINEAR, _FULL, _SLIDING = "conv", "linear_attention", "full_attention", "sliding_attention"
DELTA = {
    **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32},
    **{"partial_rotary_factor": 0.25},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
MAMBA2 = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_head": "auto"}
MULTIPLIERS = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
FALCON = {
    **{"ssm_multipliers": [0.5, 0.7, 1.3, 0.9, 1.1], "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "key_multiplier": 0.6},
    **{"attention_in_multiplier": 1.4, "attention_out_multiplier": 0.9, "mlp_multipliers": [1.3, 0.7], "embedding_multiplier": 2.0},
    "lm_head_multiplier": 0.4,
}
_GEMMA4 = {
    **{"head_dim": 16, "global_head_dim": 32, "sliding_window": 12, "final_logit_softcapping": 3.0},
    **{"vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 0, "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL]},
    "num_hidden_layers": 5,
}
CASES = [
    Case(
        "gemma4",
        "Gemma4Text",
        {
            **_GEMMA4,
            **{"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "num_key_value_heads": 1},
        },
        adjust=_gemma4_scales,
    ),
    Case(
        "gemma4-experts",
        "Gemma4Text",
        {
            **_GEMMA4,
            **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_key_value_heads": 4, "enable_moe_block": True},
            **{"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
        },
        adjust=_gemma4_scales,
    ),
    Case(
        "gemma3n",
        "Gemma3nText",
        {
            **{"head_dim": 16, "sliding_window": 12, "final_logit_softcapping": 3.0, "num_hidden_layers": 5, "num_key_value_heads": 1},
            **{"layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL], "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 150},
            **{"hidden_size_per_layer_input": 24, "altup_num_inputs": 3, "laurel_rank": 8, "rms_norm_eps": 1e-5},
            **{"activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0, 0.9], "intermediate_size": [96, 96, 80, 96, 112]},
        },
        adjust=_gemma3n,
        in_kernels=False,
    ),
    Case(
        "mimo-v2",
        "MiMoV2Flash",
        {
            **{"num_hidden_layers": 4, "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL], "sliding_window": 12, "head_dim": 48},
            **{"v_head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        },
        adjust=_adjust,
    ),
    Case("lfm2", "Lfm2", {"num_hidden_layers": 5, "layer_types": [_CONV, _CONV, _FULL, _CONV, _FULL], "block_multiple_of": 16}),
    Case(
        "lfm2-wide",  # the inputs of a convolution take two places, the second of them in part
        "Lfm2",
        {
            **{"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
            **{"hidden_size": 96, "num_key_value_heads": 1, "num_attention_heads": 3, "tie_word_embeddings": False},
        },
        lengths=(33,) * 8,  # Transformers adds biases to padding, which convolutions see
    ),
    Case(
        "lfm2-moe",
        "Lfm2Moe",
        {
            **{"num_hidden_layers": 4, "layer_types": [_CONV, _FULL, _CONV, _FULL], "num_dense_layers": 1, "num_experts": 8},
            **{"num_experts_per_tok": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 1.4},
        },
        adjust=_adjust,
    ),
    Case("qwen3-next", "Qwen3Next", {**DELTA, **EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2}, adjust=_spread),
    Case(
        "qwen3.5",
        "Qwen3_5Text",
        {**DELTA, "num_hidden_layers": 5, "full_attention_interval": 2, "tie_word_embeddings": True},
        adjust=_spread,
    ),
    Case(
        "qwen3.5-heads",
        "Qwen3_5Text",
        {
            **{**DELTA, "num_hidden_layers": 3, "layer_types": [_LINEAR, _FULL, _LINEAR], "linear_num_value_heads": 8},
            **{"linear_key_head_dim": 32, "linear_value_head_dim": 48, "linear_conv_kernel_dim": 3},
        },
        adjust=_spread,
    ),
    Case("qwen3.5-moe", "Qwen3_5MoeText", {**DELTA, **EXPERTS, "num_hidden_layers": 4}, adjust=_spread),
    Case(
        "granite-hybrid",
        "GraniteMoeHybrid",
        {
            **{**MAMBA2, **MULTIPLIERS, "num_hidden_layers": 4, "layer_types": [_LINEAR, _FULL, _LINEAR, _LINEAR], "num_local_experts": 0},
            **{"mamba_proj_bias": True, "mamba_n_groups": 1, "shared_intermediate_size": 96, "tie_word_embeddings": True},
        },
        lengths=(33,) * 8,  # Transformers adds biases to padding, which convolutions see
        adjust=_spread,
    ),
    Case(
        "granite-hybrid-moe",
        "GraniteMoeHybrid",
        {
            **{**MAMBA2, "num_hidden_layers": 3, "layer_types": [_LINEAR, _LINEAR, _FULL], "num_local_experts": 8},
            **{"num_experts_per_tok": 3, "position_embedding_type": "rope", "shared_intermediate_size": 48, "intermediate_size": 32},
        },
        adjust=_spread,
    ),
    Case(
        "bamba",
        "Bamba",
        {**MAMBA2, "num_hidden_layers": 4, "attn_layer_indices": [1, 3], "mamba_conv_bias": False, "mamba_d_state": 32},
        adjust=_spread,
    ),
    Case(
        "kimi-linear",
        "KimiLinear",
        {
            **{"num_hidden_layers": 4, "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL], "num_key_value_heads": 4, "kv_lora_rank": 32},
            **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24, "linear_head_dim": 32, "linear_num_heads": 4},
            **{"num_experts": 8, "num_experts_per_token": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 1.4},
            "mlp_layer_types": ["sparse"] * 4,  # Transformers saves dense ones under another name than they are published with
        },
        adjust=_kimi,
    ),
    Case("falcon-h1", "FalconH1", {**MAMBA2, **FALCON, "num_hidden_layers": 3, "mamba_d_ssm": 192, "mamba_d_head": 48}, adjust=_spread),
    Case(
        "falcon-h1-normed",
        "FalconH1",
        {**MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
        adjust=_spread,
    ),
    Case(
        "nemotron-h-moe",
        "NemotronH",
        {
            **{"layers_block_type": [_LINEAR, "moe", _FULL, "moe"], "mamba_num_heads": 4, "mamba_head_dim": 48, "time_step_min": 1e-12},
            **{"n_groups": 2, "ssm_state_size": 16, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2},
            **{"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 80, "routed_scaling_factor": 1.5, "topk_group": 1},
        },
        adjust=_adjust,
    ),
    Case(
        "nemotron-h",
        "NemotronH",
        {
            **{"layers_block_type": [_LINEAR, "mlp", _LINEAR, _FULL, "mlp", _LINEAR], "mamba_num_heads": 4, "mamba_head_dim": 48},
            **{"n_groups": 2, "ssm_state_size": 16, "head_dim": 32, "time_step_min": 1e-12},  # Transformers clamps steps of prompts to it
        },
        adjust=_spread,
    ),
    Case("mamba", "Mamba", {"use_conv_bias": False, "intermediate_size": 128}, lengths=(33,) * 8, adjust=_spread),
    Case("mamba-rank", "Mamba", {"time_step_rank": 5, "use_bias": True, "conv_kernel": 3}, lengths=(33,) * 8, adjust=_spread),
    Case("falcon-mamba", "FalconMamba", lengths=(33,) * 8, adjust=_spread),
    Case("mamba2", "Mamba2", {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 16}, lengths=(33,) * 8, adjust=_spread),
    Case(
        "jamba",
        "Jamba",
        {
            **{"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "num_experts_per_tok": 2},
            **{"mamba_dt_rank": 6, "use_mamba_kernels": False},
        },
        lengths=(33,) * 8,
        adjust=_spread,
    ),
    Case(
        "minimax",
        "MiniMax",
        {
            **{"num_hidden_layers": 4, "num_local_experts": 4, "block_size": 16, "mlp_alpha_factor": 0.5, "full_attn_alpha_factor": 1.5},
            "linear_attn_alpha_factor": 2.5,
        },
        lengths=(33,) * 8,
    ),
]
