"""Families in GGUF files: the spec and the weights are those of the same model in the layout of transformers."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from dense_cases import LLAMA3, LONGROPE, YARN
from driver import Driver
from family_cases import Case, reference
from gguf_files import config_metadata, converted_name, gguf_bytes, permuted, quantize, stored
from hybrid_cases import CASES as HYBRIDS
from hybrid_cases import DELTA, EXPERTS, FALCON, MAMBA2, MULTIPLIERS
from row_tensors import dequantized
from safetensors.torch import load_file
from torch import Tensor

from aengine.api.config import EngineConfig
from aengine.api.errors import ModelLoadError
from aengine.kernels.quantized import QuantizedRows
from aengine.models.config.model_config import load_spec
from aengine.models.gguf.architectures import ARCHITECTURES
from aengine.models.loading.weights import stored_weights
from aengine.runner.runner import ModelRunner
from aengine.runner.torch.loading import fused

_POST = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_GEMMA = {**_POST, "pre_feedforward_layernorm": "ffn_norm"}
_EXPERTS = {
    **{"mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps"},
    **{"mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
    **{f"mlp.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}
_MIXTRAL = {f"block_sparse_moe.experts.w{n}": f"ffn_{name}_exps" for n, name in ((1, "gate"), (3, "up"), (2, "down"))}
_EXPERT_KEYS = (("expert_used_count", "num_experts_per_tok"), ("expert_feed_forward_length", "moe_intermediate_size"))
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LAYER_NORM = ("attention.layer_norm_epsilon", "layer_norm_eps")
_WINDOW = ("attention.sliding_window", "sliding_window")
_FACTORS = torch.tensor([1.0, 2.0, 3.0, 5.0, 9.0, 14.0, 15.0, 16.0])


@dataclass(frozen=True)
class Written:
    """How llama.cpp's converter writes a model."""

    architecture: str
    config: str  # of transformers
    changes: dict[str, Any] = field(default_factory=dict)
    keys: tuple[tuple[str, str], ...] = ()  # llama.cpp's name, key of the config
    modules: dict[str, str] = field(default_factory=dict)  # that are not those of Llama
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # beside those of the model
    cut: Callable[[str, Tensor], dict[str, Tensor]] = lambda name, tensor: {name: tensor}  # one of the model's becomes these
    one_qkv: bool = False  # q, k and v are one tensor


_GEMMA4 = {
    **{**_GEMMA, "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj"},
    **{"model.per_layer_projection_norm": "per_layer_proj_norm", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj"},
    **{"post_per_layer_input_norm": "post_norm", "layer_scalar": "layer_output_scale.weight", "router.proj": "ffn_gate_inp"},
    **{"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"},
    **{"experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight"},
    **{"pre_feedforward_layernorm_2": "pre_ffw_norm_2"},
    **{f"post_feedforward_layernorm_{number}": f"post_ffw_norm_{number}" for number in (1, 2)},
}
_GEMMA4_METADATA = {
    **{"gemma4.attention.key_length": 32, "gemma4.attention.key_length_swa": 16, "gemma4.rope.dimension_count": 32},
    **{"gemma4.rope.freq_base": 1e6, "gemma4.rope.freq_base_swa": 1e4, "gemma4.attention.sliding_window_pattern": [1, 1, 0, 1, 0]},
}
_GEMMA4_FACTORS = {"rope_freqs.weight": torch.tensor([1.0] * 4 + [1e30] * 12)}


def _cut_gpt_oss(name: str, tensor: Tensor) -> dict[str, Tensor]:
    name = name.replace("sinks", "sinks.weight").replace("_bias", ".bias")
    if "experts" not in name:
        return {name: tensor}
    name, tensor = (name, tensor) if name.endswith("bias") else (f"{name}.weight", tensor.transpose(1, 2))
    if "gate_up" not in name:
        return {name: tensor.contiguous()}
    return {name.replace("gate_up", part): tensor[:, at::2].contiguous() for at, part in enumerate(("gate", "up"))}


def _cut_kv_b(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if not name.endswith("kv_b_proj.weight"):
        return {name.replace("e_score_correction_bias", "correction.bias"): tensor}
    key, value = tensor.view(4, -1, tensor.shape[1]).split([32, 24], dim=1)
    return {name.replace("kv_b", "k_b"): key.transpose(1, 2).contiguous(), name.replace("kv_b", "v_b"): value.contiguous()}


def _cut_qkv_by_kind(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {name: tensor.view(4, 3, 16, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape) if "query_key_value" in name else tensor}


def _name_correction(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {name.replace("e_score_correction_bias", "correction.bias"): tensor}


def _tiled(tensor: Tensor, dim: int, axis: int = 0) -> Tensor:
    """The last 4 heads, two of which read each of 2 key heads, as ggml repeats these."""
    first, last = tensor.split([tensor.shape[axis] - 4 * dim, 4 * dim], dim=axis)
    return torch.cat((first, last.unflatten(axis, (2, 2, dim)).transpose(axis, axis + 1).flatten(axis, axis + 2)), axis)


def _cut_recurrence(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith("A_log"):
        return {name: -tensor.exp()}
    if name.endswith(("mamba.D", "mixer.D")):
        return {name: tensor[:, None]}
    return {name: tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor}


def _cut_mamba2(name: str, tensor: Tensor) -> dict[str, Tensor]:
    (tensor,) = _cut_recurrence(name, tensor).values()
    if name.endswith("A_log"):
        return {name: tensor[:, None]}
    if "input_linear" in name:
        gate, up = tensor.chunk(2, dim=-2)
        return {name.replace("input_linear", "gate"): gate.contiguous(), name.replace("input_linear", "up"): up.contiguous()}
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return {name: tensor.view(2, -1)}
    return {name.replace("e_score_correction_bias", "correction.bias"): tensor}


def _cut_falcon(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """With the multipliers of `FALCON` in the weights."""
    (tensor,) = _cut_mamba2(name, tensor).values()
    scale, gate, down = FALCON["attention_in_multiplier"], *FALCON["mlp_multipliers"]
    factors = {
        **{"q_proj": scale, "k_proj": scale * FALCON["key_multiplier"], "v_proj": scale, "o_proj": FALCON["attention_out_multiplier"]},
        **{"out_proj": FALCON["ssm_out_multiplier"], "gate_proj": gate, "down_proj": down, "lm_head": FALCON["lm_head_multiplier"]},
        "embed_tokens": FALCON["embedding_multiplier"],
    }
    if "in_proj" in name:
        z, x, b, c, dt = FALCON["ssm_multipliers"]
        counts = torch.tensor([192, 192, 32, 32, 4])
        return {name: tensor * torch.repeat_interleave(torch.tensor([z, x, b, c, dt]), counts)[:, None] * FALCON["ssm_in_multiplier"]}
    return {name: tensor * next((factor for part, factor in factors.items() if part in name), 1.0)}


def _cut_qwen35(name: str, tensor: Tensor) -> dict[str, Tensor]:
    (tensor,) = _cut_recurrence(name, tensor).values()
    if name.endswith("linear_attn.out_proj.weight"):
        tensor = _tiled(tensor, 32, axis=1)
    elif re.search(r"linear_attn\.(in_proj_(qkv|z)|conv1d)\.", name):
        tensor = _tiled(tensor, 32)
    elif re.search(r"linear_attn\.(in_proj_[ab]\.|A_log|dt_bias)", name):
        tensor = _tiled(tensor, 1)
    found = re.fullmatch(r"(.*experts\.)gate_up_proj", name)
    if found is None:
        return {f"{name}.weight" if name.endswith("experts.down_proj") else name: tensor}
    gate, up = tensor.chunk(2, dim=1)
    return {f"{found[1]}gate_proj.weight": gate.contiguous(), f"{found[1]}up_proj.weight": up.contiguous()}


def _cut_qwen3_next(name: str, tensor: Tensor) -> dict[str, Tensor]:
    (tensor,) = _cut_recurrence(name, tensor).values()
    if not name.endswith("in_proj_qkvz.weight"):
        return {name: tensor}
    q, k, v, z = (part.flatten(0, 1) for part in tensor.unflatten(0, (2, -1)).split([16, 16, 64, 64], dim=1))
    return {name.replace("qkvz", "qkv"): torch.cat((q, k, v)), name.replace("qkvz", "z"): z.contiguous()}


def _cut_lfm2(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {name.replace("expert_bias", "expert_bias.bias"): tensor.squeeze(1) if "conv.conv." in name else tensor}


_LFM2 = {
    **{
        "model.embedding_norm": "token_embd_norm",
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.out_proj": "attn_output",
    },
    **{"self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "feed_forward.gate": "ffn_gate_inp"},
    **{f"conv.{name}": f"shortconv.{name}" for name in ("in_proj", "conv", "out_proj")},
    **{f"feed_forward.{ours}": f"ffn_{name}" for ours, name in (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
    **{f"feed_forward.experts.{ours}": f"ffn_{name}_exps" for ours, name in (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
    "feed_forward.expert_bias": "exp_probs_b",
}
_DEEPSEEK = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1},
    **{"routed_scaling_factor": 1.7, "rms_norm_eps": 1e-5, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
}
_ROUTED_KEYS = (
    *(*_EXPERT_KEYS, ("expert_count", "n_routed_experts"), ("expert_shared_count", "n_shared_experts")),
    *(("expert_weights_scale", "routed_scaling_factor"), ("expert_weights_norm", "norm_topk_prob")),
    *(("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group"), ("leading_dense_block_count", "first_k_dense_replace")),
)
_SHARED = {f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}
_LATENT_KEYS = (*_ROUTED_KEYS, ("attention.q_lora_rank", "q_lora_rank"), ("attention.kv_lora_rank", "kv_lora_rank"))
_LATENT_MODULES = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in ("q_a", "q_b", "k_b", "v_b", "kv_b")},
    **{f"self_attn.{name}_layernorm": f"attn_{name}_norm" for name in ("q_a", "kv_a")},
    **{"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "mlp.gate.correction": "exp_probs_b", **_EXPERTS, **_SHARED},
}
_GRANITE = (("gate", "gate"), ("up", "up"), ("output_linear", "down"))
_LATENT = {
    **{"deepseek2.attention.key_length": 48, "deepseek2.attention.value_length": 32, "deepseek2.rope.dimension_count": 16},
    **{"deepseek2.attention.key_length_mla": 48, "deepseek2.attention.value_length_mla": 24},
    **{"deepseek2.rope.scaling.type": "yarn", "deepseek2.rope.scaling.factor": 4.0, "deepseek2.attention.head_count_kv": 1},
    **{"deepseek2.rope.scaling.original_context_length": 32, "deepseek2.rope.scaling.yarn_log_multiplier": 0.07},
}

_OF_RECURRENCES = {
    **{"conv1d": "ssm_conv1d", "A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "norm": "ssm_norm", "out_proj": "ssm_out"},
    **{"in_proj": "ssm_in", "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_b": "ssm_beta", "in_proj_a": "ssm_alpha"},
}
_QWEN35 = {**_EXPERTS, **{f"linear_attn.{ours}": theirs for ours, theirs in _OF_RECURRENCES.items()}}
_QWEN35["post_attention_layernorm"] = "post_attention_norm"
_MAMBA = {f"mamba.{ours}": theirs for ours, theirs in _OF_RECURRENCES.items()}
_NEMOTRON = {
    **{f"mixer.{ours}": theirs for ours, theirs in _OF_RECURRENCES.items()},
    **{f"mixer.{name}_proj": f"attn_{name.replace('o', 'output')}" for name in "qkvo"},
    **{"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "norm": "attn_norm", "mixer.gate": "ffn_gate_inp"},
    **{"mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down", "mixer.gate.correction": "exp_probs_b"},
    **{"mixer.experts.up_proj": "ffn_up_exps", "mixer.experts.down_proj": "ffn_down_exps"},
    **{"mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp"},
}


_MAMBA1 = {
    **{"conv1d": "ssm_conv1d", "A_log": "ssm_a", "D": "ssm_d", "x_proj": "ssm_x", "dt_proj": "ssm_dt", "out_proj": "ssm_out"},
    **{"in_proj": "ssm_in", "dt_layernorm": "ssm_dt_norm", "b_layernorm": "ssm_b_norm", "c_layernorm": "ssm_c_norm"},
}
_STATES_ALONE = {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "norm": "attn_norm"}


def _states(architecture: str, rank: int, state: int, width: int) -> dict[str, Any]:
    sizes = {"time_step_rank": rank, "state_size": state, "inner_size": width, "conv_kernel": 4}
    nothing = {f"{architecture}.{key}": 0 for key in ("attention.head_count", "feed_forward_length")}
    return {**{f"{architecture}.ssm.{key}": number for key, number in sizes.items()}, **nothing}


def _sizes(architecture: str, heads: int, groups: int, state: int, width: int, taps: int = 4) -> dict[str, Any]:
    sizes = {"time_step_rank": heads, "group_count": groups, "state_size": state, "inner_size": heads * width, "conv_kernel": taps}
    return {f"{architecture}.ssm.{key}": number for key, number in sizes.items()}


CASES = {
    "qwen35": Written(
        *("qwen35", "Qwen3_5Text", {**DELTA, "num_hidden_layers": 4, "full_attention_interval": 2}),
        keys=(("full_attention_interval", "full_attention_interval"),),
        modules=_QWEN35,
        metadata={
            **{**_sizes("qwen35", 4, 2, 16, 32), "qwen35.rope.dimension_count": 8, "qwen35.rope.freq_base": 1e4},
            **{"qwen35.full_attention_interval": 2, "qwen35.rope.dimension_sections": [1, 1, 2, 0]},
            **{"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1},
        },
        tensors={name: torch.ones(64) for name in ("blk.4.attn_norm.weight", "blk.4.nextn.enorm.weight")},
        cut=_cut_qwen35,
    ),
    "qwen35moe": Written(
        *("qwen35moe", "Qwen3_5MoeText", {**DELTA, **EXPERTS, "num_hidden_layers": 4}),
        keys=(*_EXPERT_KEYS, ("expert_count", "num_experts"), ("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
        modules=_QWEN35,
        metadata={**_sizes("qwen35moe", 4, 2, 16, 32), "qwen35moe.rope.dimension_count": 8, "qwen35moe.rope.freq_base": 1e4},
        cut=_cut_qwen35,
    ),
    "mamba": Written(
        *("mamba", "Mamba", {"intermediate_size": 128}, (("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),)),
        modules={**_STATES_ALONE, **{f"mixer.{ours}": theirs for ours, theirs in _MAMBA1.items()}},
        metadata=_states("mamba", 4, 16, 128),
        cut=_cut_recurrence,
    ),
    "falcon-mamba": Written(
        *("mamba", "FalconMamba", {"intermediate_size": 128, "mixer_rms_eps": 1e-5}),
        keys=(("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),),
        modules={**_STATES_ALONE, **{f"mixer.{ours}": theirs for ours, theirs in _MAMBA1.items()}},
        metadata={**_states("mamba", 4, 16, 128), "mamba.ssm.dt_b_c_rms": True},
        cut=_cut_recurrence,
    ),
    "mamba2": Written(
        *("mamba2", "Mamba2", {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 16}),
        keys=(("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),),
        modules={**_STATES_ALONE, **{f"mixer.{ours}": theirs for ours, theirs in _OF_RECURRENCES.items()}},
        metadata={**_states("mamba2", 4, 16, 128), "mamba2.ssm.group_count": 2},
        cut=_cut_mamba2,
    ),
    "jamba": Written(
        "jamba",
        "Jamba",
        {
            **{"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "num_experts_per_tok": 2},
            **{"mamba_dt_rank": 6, "use_mamba_kernels": False},
        },
        keys=(("expert_count", "num_experts"), ("expert_used_count", "num_experts_per_tok")),
        modules={
            **{f"mamba.{ours}": theirs for ours, theirs in _MAMBA1.items()},
            **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
            **{f"feed_forward.experts.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
            **{"feed_forward.router": "ffn_gate_inp", "pre_ff_layernorm": "ffn_norm", "model.final_layernorm": "output_norm"},
        },
        metadata={
            **{key: value for key, value in _states("jamba", 6, 16, 128).items() if ".ssm." in key},
            "jamba.attention.head_count_kv": [0, 0, 2, 0],
        },
        cut=_cut_recurrence,
    ),
    "granitehybrid": Written(
        "granitehybrid",
        "GraniteMoeHybrid",
        {
            **{**MAMBA2, **MULTIPLIERS, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
            **{"num_local_experts": 0, "shared_intermediate_size": 96},
        },
        keys=(
            *(("attention.scale", "attention_multiplier"), ("residual_scale", "residual_multiplier")),
            *(("embedding_scale", "embedding_multiplier"), ("logit_scale", "logits_scaling")),
        ),
        modules={**_MAMBA, **{f"shared_mlp.{ours}": f"ffn_{name}" for ours, name in _GRANITE}},
        metadata={**_sizes("granitehybrid", 4, 2, 16, 32), "granitehybrid.attention.head_count_kv": [0, 2, 0]},
        cut=_cut_mamba2,
    ),
    "granitehybrid-moe": Written(
        "granitehybrid",
        "GraniteMoeHybrid",
        {
            **{**MAMBA2, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4},
            **{"num_experts_per_tok": 2, "shared_intermediate_size": 48, "intermediate_size": 32},
        },
        keys=(
            *(("expert_count", "num_local_experts"), ("expert_used_count", "num_experts_per_tok")),
            *(("expert_shared_feed_forward_length", "shared_intermediate_size"), ("attention.scale", "attention_multiplier")),
        ),
        modules={
            **{**_MAMBA, "block_sparse_moe.router.layer": "ffn_gate_inp"},
            **{f"shared_mlp.{ours}": f"ffn_{name}_shexp" for ours, name in _GRANITE},
            **{f"block_sparse_moe.{ours}": f"ffn_{name}_exps" for ours, name in _GRANITE},
        },
        metadata={**_sizes("granitehybrid", 4, 2, 16, 32), "granitehybrid.attention.head_count_kv": [0, 2]},
        cut=_cut_mamba2,
    ),
    "nemotron_h": Written(
        "nemotron_h",
        "NemotronH",
        {
            **{"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 32},
            **{"n_groups": 2, "ssm_state_size": 16, "head_dim": 32},
        },
        keys=(("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),),
        modules=_NEMOTRON,
        metadata={
            **{**_sizes("nemotron_h", 4, 2, 16, 32), "nemotron_h.attention.head_count_kv": [0, 0, 2, 0]},
            **{"nemotron_h.block_count": 4, "nemotron_h.feed_forward_length": [0, 96, 0, 96]},
        },
        cut=_cut_mamba2,
    ),
    "nemotron_h_moe": Written(
        "nemotron_h_moe",
        "NemotronH",
        {
            **{"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 32},
            **{"n_groups": 2, "ssm_state_size": 16, "head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.5},
        },
        keys=(
            *(("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"), *_ROUTED_KEYS[:3]),
            *(*_ROUTED_KEYS[4:8], ("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size")),
        ),
        modules=_NEMOTRON,
        metadata={
            **{**_sizes("nemotron_h_moe", 4, 2, 16, 32), "nemotron_h_moe.attention.head_count_kv": [0, 0, 2, 0]},
            **{"nemotron_h_moe.block_count": 4, "nemotron_h_moe.feed_forward_length": [0, 96, 0, 96]},
        },
        cut=_cut_mamba2,
    ),
    "llama": Written("llama", "Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-heads": Written("llama", "Llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama-linear": Written(
        *("llama", "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ),
    "mixtral": Written(
        *("llama", "Mixtral", {"num_local_experts": 4, "sliding_window": None}),
        keys=(("expert_count", "num_local_experts"), ("expert_used_count", "num_experts_per_tok")),
        modules={**_MIXTRAL, "block_sparse_moe.gate": "ffn_gate_inp"},
    ),
    "qwen2": Written(
        *("qwen2", "Qwen2", {"rope_parameters": YARN}),
        metadata={"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0, "qwen2.rope.scaling.original_context_length": 32},
    ),
    "qwen3": Written("qwen3", "Qwen3", {"head_dim": 32}),
    "gemma2": Written(
        *("gemma2", "Gemma2", {"num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 12}),
        keys=(_WINDOW, *((key, key) for key in ("attn_logit_softcapping", "final_logit_softcapping"))),
        modules=_GEMMA,
    ),
    "gemma3": Written(
        *("gemma3", "Gemma3Text", {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 12}),
        keys=(_WINDOW,),
        modules=_GEMMA,
    ),
    "gemma4": Written(
        *("gemma4", "Gemma4Text", next(case.changes for case in HYBRIDS if case.name == "gemma4")),
        keys=(
            *(_WINDOW, ("final_logit_softcapping", "final_logit_softcapping"), ("attention.shared_kv_layers", "num_kv_shared_layers")),
            ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        ),
        modules=_GEMMA4,
        metadata={**_GEMMA4_METADATA, "gemma4.feed_forward_length": [96, 96, 96, 192, 192]},
        tensors=_GEMMA4_FACTORS,
    ),
    "gemma4-experts": Written(
        *("gemma4", "Gemma4Text", next(case.changes for case in HYBRIDS if case.name == "gemma4-experts")),
        keys=(
            *(_WINDOW, ("final_logit_softcapping", "final_logit_softcapping"), ("expert_count", "num_experts")),
            *(("expert_used_count", "top_k_experts"), ("expert_feed_forward_length", "moe_intermediate_size")),
        ),
        modules=_GEMMA4,
        metadata={**_GEMMA4_METADATA, "gemma4.attention.head_count_kv": [4, 4, 1, 4, 1], "gemma4.attention.shared_kv_layers": 0},
        tensors=_GEMMA4_FACTORS,
    ),
    "phi3": Written("phi3", "Phi3", {"sliding_window": 12}, keys=(_WINDOW,)),
    "phi3-long": Written(
        *("phi3", "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
        metadata={
            **{"phi3.rope.dimension_count": 12, "phi3.rope.scaling.original_context_length": 16},
            **{"phi3.rope.scaling.attn_factor": 1.3228756555},  # sqrt(1 + ln(8) / ln(16))
        },
        tensors={f"rope_factors_{name}.weight": torch.tensor(LONGROPE[f"{name}_factor"]) for name in ("short", "long")},
    ),
    "olmo2": Written("olmo2", "Olmo2", modules=_POST),
    "olmo3": Written(
        "olmo2",
        "Olmo3",
        {
            **{"num_hidden_layers": 4, "sliding_window": 12},
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                "full_attention": {**YARN, "rope_theta": 5e5, "beta_fast": 24.0},
            },
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding")],
        },
        keys=(_WINDOW,),
        modules=_POST,
        metadata={
            **{"olmo2.rope.freq_base": 5e5, "olmo2.rope.scaling.type": "yarn", "olmo2.rope.scaling.factor": 4.0},
            **{"olmo2.rope.scaling.original_context_length": 32, "olmo2.rope.scaling.yarn_beta_fast": 24.0},
            "olmo2.attention.sliding_window_pattern": [True, False, True, True],
        },
    ),
    "mistral3": Written("mistral3", "Llama", {"head_dim": 32}),
    "ministral3": Written(
        "mistral3",
        "Ministral3",
        {"head_dim": 32, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
        metadata={
            **{"mistral3.rope.scaling.type": "yarn", "mistral3.rope.scaling.factor": 4.0, "mistral3.rope.freq_base": 1e4},
            **{"mistral3.rope.scaling.original_context_length": 32, "mistral3.rope.scaling.yarn_log_multiplier": 1.0},
            "mistral3.attention.temperature_scale": 0.5,
        },
    ),
    "chatglm": Written("chatglm", "Glm", {"head_dim": 16, "attention_bias": True}, metadata={"chatglm.rope.dimension_count": 8}),
    "chatglm-qkv": Written(
        *("chatglm", "Glm", {"head_dim": 16, "attention_bias": True}), metadata={"chatglm.rope.dimension_count": 8}, one_qkv=True
    ),
    "gptneox": Written(
        *("gptneox", "GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": 4}),
        keys=(("use_parallel_residual", "use_parallel_residual"), _LAYER_NORM),
        modules={
            **{"gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "attention.query_key_value": "attn_qkv"},
            **{"attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down", "embed_out": "output"},
        },
        metadata={"gptneox.rope.dimension_count": 8},
        cut=_cut_qkv_by_kind,
    ),
    "gpt-oss": Written(
        *("gpt-oss", "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 14}),
        keys=(_WINDOW, _EXPERT_KEYS[0], ("expert_count", "num_local_experts"), ("expert_feed_forward_length", "intermediate_size")),
        modules={
            **{"mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks", "post_attention_layernorm": "post_attention_norm"},
            **{f"mlp.experts.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
        },
        metadata={
            **{"gpt-oss.rope.scaling.type": "yarn", "gpt-oss.rope.scaling.factor": 32.0},
            **{"gpt-oss.rope.scaling.original_context_length": 4096, "gpt-oss.rope.scaling.yarn_beta_slow": 1.0},
        },
        cut=_cut_gpt_oss,
    ),
    "glm4moe": Written(
        "glm4moe",
        "Glm4Moe",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
            **{"routed_scaling_factor": 1.3, "use_qk_norm": True, "attention_bias": True, "head_dim": 32},
        },
        keys=_ROUTED_KEYS,
        modules={
            **{"mlp.gate.correction": "exp_probs_b", "post_attention_layernorm": "post_attention_norm"},
            **{**_EXPERTS, **_SHARED},
        },
        metadata={
            **{"glm4moe.rope.dimension_count": 16, "glm4moe.expert_gating_func": 2},
            **{"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1},
        },
        tensors={name: torch.ones(64) for name in ("blk.3.attn_norm.weight", "blk.3.nextn.enorm.weight")},
        cut=_name_correction,
    ),
    "deepseek2": Written(
        *("deepseek2", "DeepseekV3", {**_DEEPSEEK, "n_group": 4, "topk_group": 2}),
        keys=_LATENT_KEYS,
        modules=_LATENT_MODULES,
        metadata={**_LATENT, "deepseek2.expert_gating_func": 2},
        cut=_cut_kv_b,
    ),
    "deepseek2-groups": Written(
        *("deepseek2", "DeepseekV2", {**_DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
        keys=_LATENT_KEYS,
        modules=_LATENT_MODULES,
        metadata={**_LATENT, "deepseek2.expert_gating_func": 1},
        cut=_cut_kv_b,
    ),
    "deepseek2-older": Written(  # keys and values in one matrix, and no groups, gating or lengths of latent attention
        *("deepseek2", "DeepseekV2", {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"}),
        keys=(*_ROUTED_KEYS[:5], _ROUTED_KEYS[-1], ("attention.kv_lora_rank", "kv_lora_rank")),
        modules={**_LATENT_MODULES, "self_attn.q_proj": "attn_q"},
        metadata={
            **{key: value for key, value in _LATENT.items() if not key.endswith("_mla")},
            **{"deepseek2.attention.head_count_kv": 4, "deepseek2.attention.value_length": 24},
        },
    ),
    "granite": Written(
        "granite",
        "Granite",
        {"attention_multiplier": 0.4, "residual_multiplier": 0.6, "embedding_multiplier": 5.0, "logits_scaling": 3.0},
        keys=(
            *(("attention.scale", "attention_multiplier"), ("residual_scale", "residual_multiplier")),
            *(("embedding_scale", "embedding_multiplier"), ("logit_scale", "logits_scaling")),
        ),
    ),
    "smollm3": Written("smollm3", "SmolLM3", {"num_hidden_layers": 5}),
    "glm4": Written(
        *("glm4", "Glm4", {"head_dim": 16, "attention_bias": True}),
        modules={"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
        metadata={"glm4.rope.dimension_count": 8},
    ),
    "cohere2": Written(
        *("cohere2", "Cohere2", {"num_hidden_layers": 5, "sliding_window": 12, "logit_scale": 0.25}),
        keys=(_LAYER_NORM, _WINDOW, ("logit_scale", "logit_scale")),
    ),
    "starcoder2": Written(
        *("starcoder2", "Starcoder2"),
        keys=(("attention.layer_norm_epsilon", "norm_epsilon"),),
        modules={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    ),
    "gpt2": Written(
        *("gpt2", "GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 128, "num_key_value_heads": 4}),
        keys=(
            *(("context_length", "n_positions"), ("embedding_length", "n_embd"), ("block_count", "n_layer")),
            *(("feed_forward_length", "n_inner"), ("attention.head_count", "n_head")),
            ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        ),
        modules={
            **{"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm"},
            **{"ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output"},
            **{"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        },
    ),
    "stablelm": Written(
        *("stablelm", "StableLm", {"use_qkv_bias": True}),
        keys=(_LAYER_NORM, ("use_parallel_residual", "use_parallel_residual")),
        metadata={"stablelm.rope.dimension_count": 4},
    ),
    "stablelm-parallel": Written(
        *("stablelm", "StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
        keys=(_LAYER_NORM, ("use_parallel_residual", "use_parallel_residual")),
        modules={"self_attn.q_layernorm.norms": "attn_q_norm", "self_attn.k_layernorm.norms": "attn_k_norm"},
        metadata={"stablelm.rope.dimension_count": 4},
    ),
    "qwen2moe": Written(
        *("qwen2moe", "Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 48}),
        keys=(*_EXPERT_KEYS, ("expert_count", "num_experts"), ("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
        modules=_EXPERTS,
    ),
    "qwen3moe": Written(
        *("qwen3moe", "Qwen3Moe", {**_MOE, "norm_topk_prob": True, "head_dim": 32}),
        keys=(*_EXPERT_KEYS, ("expert_count", "num_local_experts")),
        modules=_EXPERTS,
    ),
    "lfm2": Written(
        "lfm2",
        "Lfm2",
        {
            **{"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
            **{"intermediate_size": 96, "block_multiple_of": 32, "tie_word_embeddings": True},
        },
        keys=(("shortconv.l_cache", "conv_L_cache"), ("attention.layer_norm_rms_epsilon", "norm_eps")),
        modules=_LFM2,
        metadata={"lfm2.attention.head_count_kv": [0, 2, 0, 2], "lfm2.feed_forward_length": 64},
        cut=_cut_lfm2,
    ),
    "lfm2moe": Written(
        "lfm2moe",
        "Lfm2Moe",
        {
            **{"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        },
        keys=(
            *(("shortconv.l_cache", "conv_L_cache"), ("attention.layer_norm_rms_epsilon", "norm_eps"), ("expert_count", "num_experts")),
            *(*_EXPERT_KEYS, ("leading_dense_block_count", "num_dense_layers")),
        ),
        modules=_LFM2,
        metadata={"lfm2moe.attention.head_count_kv": [0, 2, 0, 2]},
        cut=_cut_lfm2,
    ),
    "olmoe": Written(
        *("olmoe", "Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
        keys=(("expert_count", "num_experts"), ("expert_used_count", "num_experts_per_tok")),
        modules=_EXPERTS,
    ),
}


def converted(model_dir: pathlib.Path, written: Written, kind: str = "F32") -> bytes:
    """The file that the converter would write of a directory, its matrices in a type."""
    config = json.loads((model_dir / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    config["rope_theta"] = rope.get("rope_theta", rope.get("full_attention", {}).get("rope_theta"))
    merged: dict[str, Tensor] = {}
    stored_ones = sorted(load_file(model_dir / "model.safetensors").items())
    for name, tensor in (part for each in stored_ones for part in written.cut(*each).items()):
        found = re.fullmatch(r"(.*\.(?:experts|norms))\.(\d+)(.*)", name)
        if found is None:
            merged[name] = tensor
        else:  # all experts, or heads, in one tensor
            whole = merged.get(found[1] + found[3])
            merged[found[1] + found[3]] = tensor[None] if whole is None else torch.cat((whole, tensor[None]))
    tensors = {name: stored(tensor) for name, tensor in written.tensors.items()}
    for name, tensor in merged.items():
        if written.architecture in ("llama", "mistral3", "granite", "smollm3", "granitehybrid", "nemotron_h", "nemotron_h_moe") and (
            found := re.search(r"(?:self_attn|mixer)\.(q|k)_proj", name)
        ):
            tensor = permuted(tensor, config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"])
        if (
            written.architecture.startswith(("gemma2", "gemma3", "qwen35", "qwen3next"))
            and name.endswith("norm.weight")
            and "linear_attn" not in name
        ):
            tensor = tensor + 1
        if written.architecture == "gpt2" and ".h." in name and tensor.dim() == 2:
            tensor = tensor.t().contiguous()
        tensors[converted_name(name, written.modules)] = stored(
            tensor, kind, quantize if kind == "Q8_0" and not name.endswith("bias") else None
        )
    for name in [name for name in tensors if written.one_qkv and ".attn_q." in name]:
        kinds, shapes, data = zip(*(tensors.pop(name.replace("attn_q", f"attn_{one}")) for one in "qkv"), strict=True)
        tensors[name.replace("attn_q", "attn_qkv")] = (kinds[0], (sum(shape[0] for shape in shapes), *shapes[0][1:]), b"".join(data))
    return gguf_bytes({**config_metadata(written.architecture, config, written.keys), **written.metadata}, tensors)


def assert_same(path: pathlib.Path, model_dir: pathlib.Path, architecture: str) -> None:
    found, expected = load_spec(path), load_spec(model_dir)
    for layer, other in zip(found.layers, expected.layers, strict=True):
        rope, other_rope = (None if one.attention is None else one.attention.rope for one in (layer, other))
        assert (rope is None) == (other_rope is None)
        if rope is None or other_rope is None:
            assert layer == other
        else:  # factors and thetas are float32 in the file
            assert rope.frequencies == pytest.approx(other_rope.frequencies, rel=1e-6)
            assert replace(rope, frequencies=(), attention_factor=0) == replace(other_rope, frequencies=(), attention_factor=0)
            assert rope.attention_factor == pytest.approx(other_rope.attention_factor, rel=1e-6)
            ours, theirs = (replace(each, attention=replace(each.attention, rope=None)) for each in (layer, other))
            assert ours == theirs
    changes = {"layers": (), "initializer_range": 0.0, "dtype": None, "eos_token_ids": ()}
    assert replace(found, **changes) == replace(expected, **changes)
    device = torch.device("cpu")
    weights = fused(found, stored_weights(found, path), torch.float32, device)
    others = fused(expected, stored_weights(expected, model_dir), torch.float32, device)
    for name, tensor in fused(expected, stored_weights(expected, model_dir), torch.float32, device).items():
        torch.testing.assert_close(
            weights[name],
            tensor,
            rtol=0,
            atol=2e-7 if architecture.startswith(("gemma", "qwen35", "gran", "nemo", "mamba", "jamba")) else 0,
            msg=name,
        )
    assert weights.keys() == others.keys()


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("name", CASES)
def test_spec_and_weights_are_those_of_the_directory(name: str, tmp_path: pathlib.Path) -> None:
    written = CASES[name]
    Case(name, written.config, written.changes).make().save_pretrained(tmp_path / "model")
    (tmp_path / "model.gguf").write_bytes(converted(tmp_path / "model", written))
    assert_same(tmp_path / "model.gguf", tmp_path / "model", written.architecture)


OTHERWISE = {
    "falcon-h1": Written(  # whose multipliers are in the weights
        *("falcon-h1", "FalconH1", {**MAMBA2, **FALCON, "num_hidden_layers": 2, "mamba_d_ssm": 192, "mamba_d_head": 48}),
        modules={
            **{**_MAMBA, **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}},
            **{"pre_ff_layernorm": "ffn_norm", "model.final_layernorm": "output_norm"},
        },
        metadata={**_sizes("falcon-h1", 4, 2, 16, 48), "falcon-h1.attention.key_length": 16},
        cut=_cut_falcon,
    ),
    "qwen3next": Written(  # whose projections of one key head are together in directories
        *("qwen3next", "Qwen3Next", {**DELTA, **EXPERTS, "num_hidden_layers": 4}),
        keys=(*_EXPERT_KEYS, ("expert_count", "num_experts"), ("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
        modules={**_QWEN35, "linear_attn.in_proj_ba": "ssm_ba"},
        metadata={**_sizes("qwen3next", 4, 2, 16, 32), "qwen3next.rope.dimension_count": 8, "qwen3next.rope.freq_base": 1e4},
        cut=_cut_qwen3_next,
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_tokens_of_other_weights(name: str, tmp_path: pathlib.Path) -> None:
    """The file has other matrices than the directory, and they say the same."""
    written = OTHERWISE[name]
    expected = reference(Case(name, written.config, written.changes), tmp_path)
    (tmp_path / "model.gguf").write_bytes(converted(tmp_path, written))
    config = EngineConfig(model=str(tmp_path / "model.gguf"), dtype="float32", device="cpu", kv_cache_memory=16 << 20)
    runner = ModelRunner(config, tmp_path / "model.gguf")
    assert Driver(runner).generate(expected.prompts, 8) == [tokens[:8] for tokens in expected.tokens]


@pytest.mark.parametrize(
    "name", ["qwen35", "gpt2", "gptneox", "llama", "chatglm-qkv", "mixtral", "phi3", "stablelm-parallel", "gpt-oss", "deepseek2"]
)
def test_quantised_matrices_have_the_same_layouts(name: str, tmp_path: pathlib.Path) -> None:
    """Rows stay quantised, whatever order or tensor they are in; 8 bits are within half a step of 1/127 of a group's largest."""
    written = CASES[name]
    Case(name, written.config, written.changes).make().save_pretrained(tmp_path / "model")
    (tmp_path / "model.gguf").write_bytes(converted(tmp_path / "model", written, "Q8_0"))
    found, expected = load_spec(tmp_path / "model.gguf"), load_spec(tmp_path / "model")
    parts = dict(stored_weights(found, tmp_path / "model.gguf"))
    plain = fused(expected, stored_weights(expected, tmp_path / "model"), torch.float32, torch.device("cpu"))
    for weight, tensor in plain.items():
        is_cut = weight.endswith(("key_up.weight", "value_up.weight", "conv.weight"))  # made of two tensors, or never quantised
        if tensor.dim() > 1 and not weight.endswith(".bias") and not is_cut:
            assert all(isinstance(part, QuantizedRows) for part in parts[weight]), weight
            rows = torch.cat([dequantized(part) for part in parts[weight] if isinstance(part, QuantizedRows)])
            assert (rows - tensor.flatten(0, -2)).abs().max() < 0.6 / 127 * tensor.abs().max(), weight


def test_factors_of_frequencies_are_llama_3_ropes(tmp_path: pathlib.Path) -> None:
    """The converter writes the factors by which Llama 3 divides its frequencies."""
    Case("llama3", "Llama", {"rope_parameters": LLAMA3}).make().save_pretrained(tmp_path / "model")
    spec = load_spec(tmp_path / "model")
    rope = spec.layers[0].attention.rope
    assert rope is not None
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    written = Written("llama", "Llama", tensors={"rope_freqs.weight": plain / torch.tensor(rope.frequencies)})
    (tmp_path / "model.gguf").write_bytes(converted(tmp_path / "model", written))
    assert_same(tmp_path / "model.gguf", tmp_path / "model", "llama")


def test_every_architecture_has_a_case() -> None:
    assert {written.architecture for written in (*CASES.values(), *OTHERWISE.values())} == set(ARCHITECTURES)


def test_other_architectures_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_bytes({"general.architecture": "rwkv6"}, {"token_embd.weight": stored(torch.ones(4, 4))}))
    with pytest.raises(ModelLoadError, match="GGUF architecture 'rwkv6' is not supported; supported are llama, mistral3"):
        load_spec(tmp_path / "model.gguf")
