"""The architectures of GGUF files: of each the family's name, and what its files say otherwise than most.

Owns llama.cpp's names of architectures. Raises for what no family has a key of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.models.config.reader import NotNativeError
from aengine.models.gguf.gguf_file import GgufFile


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a GGUF architecture is, beside the common keys."""

    model_type: str
    fixed: Mapping[str, Any] = field(default_factory=dict)  # what its files do not say
    change: Callable[[GgufFile, dict[str, Any]], None] = lambda file, config: None  # completes the config
    modules: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # tensors that are other ones than in most architectures
    pairs_neighbours: bool = False  # the rows of q and k are in the order of a rope that pairs neighbours; the family's pairs halves
    by_head: bool = False  # the family has the rows of q, k and v head by head; the file has all of q, then of k, then of v
    transposed: int = 0  # tensors of layers with so many dimensions are [..., in_features, out_features] in the family, in the file never
    unit_offset: bool = False  # 1 is added to the weights of norms
    without_attention: bool = False  # some layers are, which have 0 KV heads
    states_alone: bool = False  # no layer has attention
    by_layer: tuple[str, ...] = ()  # keys of config.json of which files may have a number for each layer, which `change` reads
    tiled_heads: bool = False  # of a recurrence: head h reads key head h % their number; in the family all that read one are together


def _llama(file: GgufFile, config: dict[str, Any]) -> None:
    if config.get("num_experts"):
        config["model_type"] = "mixtral"
        config["num_local_experts"] = config.pop("num_experts")
        return
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors


def _mistral3(file: GgufFile, config: dict[str, Any]) -> None:
    """Ministral 3 if queries grow with their positions."""
    beta = file.get("mistral3.attention.temperature_scale", float, 0.0)
    if not beta:
        _llama(file, config)
        return
    config["model_type"] = "ministral3"
    scaling = {**config.get("rope_scaling", {}), "llama_4_scaling_beta": beta}
    weight = file.get("mistral3.rope.scaling.yarn_log_multiplier", float, 0.0)
    config["rope_scaling"] = {**scaling, "mscale": 1.0, "mscale_all_dim": weight} if weight else scaling
    config["sliding_window"] = None


def _granite(file: GgufFile, config: dict[str, Any]) -> None:
    config["logits_scaling"] = config.pop("logit_scale", 1.0)


def _qwen3_moe(file: GgufFile, config: dict[str, Any]) -> None:
    config.setdefault("moe_intermediate_size", config.get("intermediate_size"))


def _qwen2_moe(file: GgufFile, config: dict[str, Any]) -> None:
    config.setdefault("intermediate_size", config.get("shared_expert_intermediate_size"))
    config["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors


def _gemma2(file: GgufFile, config: dict[str, Any]) -> None:
    # The two largest models scale their scores by the width of a head as if all heads filled the hidden size; files do not say it.
    largest = config.get("num_hidden_layers") == {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]


def _gemma3(file: GgufFile, config: dict[str, Any]) -> None:
    _gemma2(file, config)
    config["rope_local_base_freq"] = file.get("gemma3.rope.freq_base_swa", float, 1e4)


def _gemma4(file: GgufFile, config: dict[str, Any]) -> None:
    """The lengths of keys are those of full attention. Files give its rope as factors of frequencies, which are huge where none is."""
    _add_layer_types(file, config)
    kinds = config.get("layer_types") or ["full_attention"]
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    wide, narrow = config["head_dim"], file.get("gemma4.attention.key_length_swa", int, config["head_dim"])
    kv_heads = _one_or_by_layer(file, "attention.head_count_kv", len(kinds))
    config["per_layer_config"] = {str(layer): {"head_dim": wide, "num_key_value_heads": kv_heads[layer]} for layer in full}
    config["num_key_value_heads"] = next((kv_heads[layer] for layer, kind in enumerate(kinds) if layer not in full), kv_heads[0])
    config["head_dim"] = narrow
    config["num_kv_shared_layers"] = file.get("gemma4.attention.shared_kv_layers", int, 0)
    config["attention_k_eq_v"] = bool(full) and f"blk.{full[0]}.attn_v.weight" not in file.tensors
    table = file.tensors.get("per_layer_token_embd.weight")
    config["hidden_size_per_layer_input"] = file.get("gemma4.embedding_length_per_layer_input", int, 0)
    config["vocab_size_per_layer_input"] = config["vocab_size"] if table is None else table.shape[0]
    config["use_double_wide_mlp"] = len(set(_one_or_by_layer(file, "feed_forward_length", len(kinds)))) > 1
    config["enable_moe_block"] = bool(config.get("num_experts"))
    factors = config.pop("rope_scaling", {}).get("long_factor") or [1.0]
    config["rope_parameters"] = {
        "sliding_attention": {"rope_theta": file.get("gemma4.rope.freq_base_swa", float, 1e4)},
        "full_attention": {
            **{"rope_type": "proportional", "rope_theta": config["rope_theta"]},
            "partial_rotary_factor": sum(factor == 1.0 for factor in factors) / len(factors),
        },
    }


def _phi3(file: GgufFile, config: dict[str, Any]) -> None:
    if config.get("sliding_window") == 0:
        del config["sliding_window"]
    config["original_max_position_embeddings"] = file.get(
        "phi3.rope.scaling.original_context_length", int, config.get("max_position_embeddings")
    )


def _stablelm(file: GgufFile, config: dict[str, Any]) -> None:
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in file.tensors


def _with_bias(file: GgufFile, config: dict[str, Any]) -> None:
    config["attention_bias"] = any(f"blk.0.{name}.bias" in file.tensors for name in ("attn_q", "attn_qkv"))


def _olmo2(file: GgufFile, config: dict[str, Any]) -> None:
    """OLMo 3 has windows, and scales the rope of the layers without one alone."""
    if not config.get("sliding_window"):
        config.pop("sliding_window", None)
        return
    config["model_type"] = "olmo3"
    theta = config["rope_theta"]
    ropes = {"full_attention": {"rope_theta": theta, **config.pop("rope_scaling", {})}}
    ropes["sliding_attention"] = {"rope_theta": file.get("olmo2.rope.freq_base_swa", float, theta)}
    config["rope_parameters"] = ropes
    _add_layer_types(file, config)


def _gpt_oss(file: GgufFile, config: dict[str, Any]) -> None:
    config["num_local_experts"] = config.pop("num_experts", None)
    config["intermediate_size"] = config.pop("moe_intermediate_size", None)
    config["rope_parameters"] = {"rope_theta": config["rope_theta"], **config.pop("rope_scaling", {})}
    if config["rope_parameters"].get("rope_type") == "yarn":
        config["rope_parameters"]["truncate"] = False
    _with_bias(file, config)
    _add_layer_types(file, config)


def _glm4_moe(file: GgufFile, config: dict[str, Any]) -> None:
    config["n_routed_experts"] = config.pop("num_experts", None)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    _with_bias(file, config)


def _deepseek2(file: GgufFile, config: dict[str, Any]) -> None:
    """DeepSeek V2 and V3, and GLM-4.7-Flash, which is V3 with other sizes. The lengths of keys are those of the heads, or, in a file with
    another name for these, those of the cache."""
    gating = file.get("deepseek2.expert_gating_func", int, 0)
    corrected = file.has(".exp_probs_b.bias")
    config["scoring_func"] = {0: "sigmoid" if corrected else "softmax", 1: "softmax", 2: "sigmoid"}.get(gating, gating)
    config["model_type"] = "deepseek_v2" if config["scoring_func"] == "softmax" else "deepseek_v3"
    config["n_routed_experts"] = config.pop("num_experts", None)
    defaults = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 0, "first_k_dense_replace": 0}
    for key, value in {**defaults, "norm_topk_prob": False, "routed_scaling_factor": 1.0}.items():
        config.setdefault(key, value)
    if config["model_type"] == "deepseek_v2" and config["n_group"] != 1:
        config["topk_method"] = "group_limited_greedy"
    ending = "_mla" if "deepseek2.attention.key_length_mla" in file.metadata else ""
    key_length, value_length = (file.get(f"deepseek2.attention.{name}_length{ending}", int, 0) for name in ("key", "value"))
    rotated = file.get("deepseek2.rope.dimension_count", int, 0)
    config |= {"qk_nope_head_dim": key_length - rotated, "qk_rope_head_dim": rotated, "v_head_dim": value_length}
    config["partial_rotary_factor"] = 1.0
    scaling = config.get("rope_scaling", {})
    weight = file.get("deepseek2.rope.scaling.yarn_log_multiplier", float)
    if scaling.get("rope_type") == "yarn" and weight:
        scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * weight, 6)


def _by_layer(file: GgufFile, key: str) -> list[int]:
    numbers = file.get(f"{file.architecture}.{key}", np.ndarray)
    if numbers is None:
        raise ModelLoadError(f"{file.path.name} lacks {file.architecture}.{key}, an array with a number for each layer")
    return list(map(int, numbers.tolist()))


def _one_or_by_layer(file: GgufFile, key: str, num_layers: int) -> list[int]:
    """The number of each layer, of a key that has one for all or for each."""
    if not isinstance(file.metadata.get(f"{file.architecture}.{key}"), np.ndarray):
        return [file.get(f"{file.architecture}.{key}", int, 0)] * num_layers
    numbers = _by_layer(file, key)
    if len(numbers) != num_layers:
        raise ModelLoadError(f"{file.architecture}.{key} in {file.path.name} has {len(numbers)} numbers for {num_layers} layers")
    return numbers


def _recurrence(file: GgufFile) -> tuple[int, int, int, int, int]:
    """Heads, key heads, key_dim, value_dim and taps."""
    keys = ("time_step_rank", "group_count", "state_size", "inner_size", "conv_kernel")
    found = [file.get(f"{file.architecture}.ssm.{key}", int, 0) for key in keys]
    heads, key_heads, key_dim, width, taps = found
    if min(found) < 1 or width % heads:
        raise ModelLoadError(f"{file.architecture}.ssm.{', '.join(keys)} {found} in {file.path.name} are not the sizes of a recurrence")
    return heads, key_heads, key_dim, width // heads, taps


def _qwen35(file: GgufFile, config: dict[str, Any]) -> None:
    keys = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    config |= {f"linear_{key}": number for key, number in zip(keys, _recurrence(file), strict=True)}
    config["full_attention_interval"] = file.get(f"{file.architecture}.full_attention_interval", int, 4)


def _mamba2(file: GgufFile, config: dict[str, Any]) -> None:
    keys = ("n_heads", "n_groups", "d_state", "d_head", "d_conv")
    config |= {f"mamba_{key}": number for key, number in zip(keys, _recurrence(file), strict=True)}
    config["mamba_conv_bias"] = file.has(".ssm_conv1d.bias")


def _mamba1(file: GgufFile, config: dict[str, Any]) -> None:
    names = {"conv_kernel": "mamba_d_conv", "state_size": "mamba_d_state", "time_step_rank": "mamba_dt_rank", "inner_size": "width"}
    found = {ours: file.get(f"{file.architecture}.ssm.{theirs}", int, 0) for theirs, ours in names.items()}
    if min(found.values()) < 1:
        raise ModelLoadError(f"{file.architecture}.ssm.{', '.join(names)} {[*found.values()]} in {file.path.name} are not those of Mamba")
    config["mamba_expand"] = found.pop("width") / config["hidden_size"]
    config |= {**found, "mamba_conv_bias": file.has(".ssm_conv1d.bias")}


def _states(file: GgufFile, config: dict[str, Any]) -> None:
    """Falcon Mamba is Mamba whose dt, B and C are normed, by the epsilon of all norms."""
    config.pop("intermediate_size", None)
    config["mamba_proj_bias"] = file.has(".ssm_in.bias")
    if config["model_type"] == "mamba2":
        _mamba2(file, config)
        config["mamba_expand"] = config["mamba_n_heads"] * config["mamba_d_head"] / config["hidden_size"]
        return
    _mamba1(file, config)
    if file.get("mamba.ssm.dt_b_c_rms", bool, False):
        config |= {"model_type": "falcon_mamba", "mixer_rms_eps": config.get("rms_norm_eps")}


def _jamba(file: GgufFile, config: dict[str, Any]) -> None:
    _mamba1(file, config)
    attending = [bool(count) for count in _by_layer(file, "attention.head_count_kv")]
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(len(attending))]
    for kind, chosen in (("attn", attending), ("expert", routed)):
        layers = [layer for layer, one in enumerate(chosen) if one] or [0]
        period = layers[1] - layers[0] if len(layers) > 1 else len(chosen)
        if any(chosen) and chosen != [layer % period == layers[0] for layer in range(len(chosen))]:
            raise NotNativeError(f"the layers {layers} with {kind} in {file.path.name} are not supported: they have no period")
        config |= {f"{kind}_layer_period": period, f"{kind}_layer_offset": layers[0]}
    config.setdefault("num_experts", 1)


def _granite_hybrid(file: GgufFile, config: dict[str, Any]) -> None:
    """Refuses Bamba, whose files say the same architecture: the rope is on a part of each head, and rows of q and k are ordered as if it
    were on all of it."""
    if file.get("granitehybrid.rope.scaling.finetuned", bool, False):
        raise NotNativeError(
            f"granitehybrid.rope.scaling.finetuned in {file.path.name} is not supported: it is a Bamba, whose rope is lost"
        )
    _mamba2(file, config)
    _granite(file, config)
    config["layer_types"] = ["attention" if count else "mamba" for count in _by_layer(file, "attention.head_count_kv")]
    config["num_local_experts"] = config.pop("num_experts", 0)
    shared = config.pop("shared_expert_intermediate_size", None)
    config["shared_intermediate_size"] = config.get("intermediate_size") if shared is None else shared
    config["mamba_expand"], rest = divmod(config["mamba_n_heads"] * config["mamba_d_head"], config["hidden_size"])
    if rest:
        raise ModelLoadError(f"granitehybrid.ssm.inner_size in {file.path.name} is no multiple of embedding_length {config['hidden_size']}")


def _nemotron_h(file: GgufFile, config: dict[str, Any]) -> None:
    """A layer with neither KV heads nor a width of an MLP is of Mamba-2."""
    _mamba2(file, config)
    widths, heads = _by_layer(file, "feed_forward_length"), _by_layer(file, "attention.head_count_kv")
    block = "moe" if file.architecture == "nemotron_h_moe" else "mlp"
    config["layers_block_type"] = [
        "attention" if count else block if width else "mamba" for width, count in zip(widths, heads, strict=False)
    ]
    config["intermediate_size"] = max(widths)
    config["n_routed_experts"] = config.pop("num_experts", None)
    config["moe_shared_expert_intermediate_size"] = config.pop("shared_expert_intermediate_size", None)


def _falcon_h1(file: GgufFile, config: dict[str, Any]) -> None:
    """All multipliers are in the weights."""
    _mamba2(file, config)
    config["mamba_d_ssm"] = config["mamba_n_heads"] * config["mamba_d_head"]
    config["mamba_rms_norm"] = file.has(".ssm_norm.weight")
    config["mamba_norm_before_gate"] = False


def _lfm2(file: GgufFile, config: dict[str, Any]) -> None:
    """Layers without KV heads are convolutions."""
    config["layer_types"] = ["full_attention" if count else "conv" for count in _by_layer(file, "attention.head_count_kv")]
    config["block_auto_adjust_ff_dim"] = False  # the length of its files is the width


def _lfm2_moe(file: GgufFile, config: dict[str, Any]) -> None:
    _lfm2(file, config)
    config.setdefault("first_k_dense_replace", 0)
    config["use_expert_bias"] = file.has(".exp_probs_b.bias")


def _add_layer_types(file: GgufFile, config: dict[str, Any]) -> None:
    """From a pattern that has a number for each layer, not 0 where there is a window; without one the family knows them."""
    pattern = file.get(f"{file.architecture}.attention.sliding_window_pattern", np.ndarray)
    if pattern is not None:
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _normalized(value: bool) -> Mapping[str, Any]:
    return {"norm_topk_prob": value}


_CONVOLUTIONS = {
    **{"shortconv.in_proj": ("conv_in", 0), "shortconv.conv": ("conv", 0), "shortconv.out_proj": ("conv_out", 0)},
    "token_embd_norm": ("norm", 0),
}
_BEFORE_MLP = {"post_attention_norm": ("mlp_norm", 0)}
_OF_STATES = {
    **{"ssm_conv1d": ("conv", 0), "ssm_a": ("log_decay", 0), "ssm_dt": ("step_bias", 0), "ssm_norm": ("recur_norm", 0)},
    "ssm_out": ("recur_out", 0),
}
_DELTA = {
    **{**_OF_STATES, **_BEFORE_MLP, "attn_qkv": ("recur_in", 0), "attn_gate": ("recur_in", 1)},
    **{"ssm_beta": ("recur_gates", 0), "ssm_alpha": ("recur_gates", 1)},
}
_MAMBA2 = {**_OF_STATES, "ssm_in": ("recur_in", 0), "ssm_d": ("skip", 0)}
_MAMBA1 = {
    **{**_OF_STATES, "ssm_in": ("recur_in", 0), "ssm_d": ("skip", 0), "ssm_x": ("recur_gates", 0), "ssm_dt": ("decay_up", 0)},
    **{"ssm_dt_norm": ("decay_norm", 0), "ssm_b_norm": ("gate_k_norm", 0), "ssm_c_norm": ("gate_q_norm", 0)},
}
_UNGATED = {"ffn_up_exps": ("experts.up", 0), "ffn_up_shexp": ("shared.up", 0), "ffn_down_shexp": ("shared.down", 0)}
_GEMMA4 = {
    **{"per_layer_token_embd": ("layer_embedding", 0), "per_layer_model_proj": ("layer_inputs", 0)},
    **{"per_layer_proj_norm": ("layer_inputs_norm", 0), "inp_gate": ("input_gate", 0), "proj": ("input_out", 0)},
    **{"post_norm": ("input_norm", 0), "layer_output_scale": ("scale", 0), "post_ffw_norm_1": ("shared_out_norm", 0)},
    **{"pre_ffw_norm_2": ("experts_norm", 0), "post_ffw_norm_2": ("experts_out_norm", 0)},
    **{"ffn_gate_inp.scale": ("router_norm.weight", 0), "ffn_down_exps.scale": ("expert_scale", 0)},
}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", change=_llama, pairs_neighbours=True),
    "mistral3": Architecture("llama", change=_mistral3, pairs_neighbours=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma2": Architecture("gemma2", change=_gemma2, unit_offset=True),
    "gemma3": Architecture("gemma3_text", change=_gemma3, unit_offset=True),
    "gemma4": Architecture("gemma4_text", {}, _gemma4, _GEMMA4, by_layer=("num_key_value_heads", "intermediate_size")),
    "phi3": Architecture("phi3", change=_phi3),
    "olmo2": Architecture("olmo2", change=_olmo2),
    "granite": Architecture("granite", change=_granite, pairs_neighbours=True),
    "smollm3": Architecture("smollm3", pairs_neighbours=True),
    "chatglm": Architecture("glm", change=_with_bias),
    "glm4": Architecture("glm4", change=_with_bias),
    "cohere2": Architecture("cohere2"),
    "starcoder2": Architecture("starcoder2"),
    "gpt2": Architecture("gpt2", transposed=2),
    "gptneox": Architecture("gpt_neox", by_head=True),
    "stablelm": Architecture("stablelm", change=_stablelm),
    "qwen2moe": Architecture("qwen2_moe", _normalized(False), _qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", _normalized(True), _qwen3_moe),
    "olmoe": Architecture("olmoe", _normalized(False)),
    "gpt-oss": Architecture("gpt_oss", change=_gpt_oss, modules=_BEFORE_MLP, transposed=3),
    "glm4moe": Architecture("glm4_moe", {"n_group": 1, "topk_group": 1}, _glm4_moe, _BEFORE_MLP),
    "lfm2": Architecture("lfm2", change=_lfm2, modules=_CONVOLUTIONS, without_attention=True),
    "lfm2moe": Architecture("lfm2_moe", change=_lfm2_moe, modules=_CONVOLUTIONS, without_attention=True),
    "qwen35": Architecture("qwen3_5_text", {}, _qwen35, _DELTA, unit_offset=True, tiled_heads=True),
    "qwen35moe": Architecture("qwen3_5_moe_text", {}, _qwen35, _DELTA, unit_offset=True, tiled_heads=True),
    # The same blocks as Qwen3.5's, which has their projections apart as the file has.
    "qwen3next": Architecture("qwen3_5_moe_text", {}, _qwen35, _DELTA, unit_offset=True),
    "granitehybrid": Architecture("granitemoehybrid", {}, _granite_hybrid, _MAMBA2, pairs_neighbours=True, without_attention=True),
    "nemotron_h": Architecture("nemotron_h", {}, _nemotron_h, _MAMBA2, pairs_neighbours=True, without_attention=True),
    "nemotron_h_moe": Architecture("nemotron_h", {}, _nemotron_h, {**_MAMBA2, **_UNGATED}, pairs_neighbours=True, without_attention=True),
    "mamba": Architecture("mamba", {}, _states, _MAMBA1, states_alone=True),
    "mamba2": Architecture("mamba2", {}, _states, _MAMBA2, states_alone=True),
    "jamba": Architecture("jamba", {}, _jamba, _MAMBA1, without_attention=True),
    "falcon-h1": Architecture("falcon_h1", {}, _falcon_h1, _MAMBA2),
    "deepseek2": Architecture("deepseek_v3", change=_deepseek2, modules={"attn_q": ("q", 0)}),
}
"""By llama.cpp's name."""
