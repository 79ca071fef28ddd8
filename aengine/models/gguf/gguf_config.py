"""From the metadata of a GGUF file to the config.json that the model would have, which the families read.

Owns llama.cpp's names of keys. Raises for what no family has a key of.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from aengine.api.errors import ModelLoadError
from aengine.models.config.reader import ConfigReader, ConfigSource, NotNativeError
from aengine.models.families import FAMILIES
from aengine.models.gguf.architectures import ARCHITECTURES, Architecture
from aengine.models.gguf.gguf_file import GgufFile, GgufTensor, end_tokens, open_gguf

_KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
    "shortconv.l_cache": "conv_L_cache",
}
"""Keys behind the architecture's name -> keys of config.json."""
_ROPE_KEYS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""Those of the rope, by which errors call them."""
_FACTORS = {"both": "rope_freqs", "long": "rope_factors_long", "short": "rope_factors_short"}
_MOST_FACTORS = 32_768


def read_config(path: pathlib.Path) -> tuple[dict[str, Any], ConfigSource]:
    """The config.json of the model in a GGUF file, and what errors about it name. Raises ModelLoadError for files that are broken or whose
    model is not supported."""
    return config_of(open_gguf(path))


def architecture_of(file: GgufFile) -> Architecture:
    if file.architecture not in ARCHITECTURES:
        raise ModelLoadError(f"GGUF architecture {file.architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[file.architecture]


def config_of(file: GgufFile) -> tuple[dict[str, Any], ConfigSource]:
    """Make the config.json that the model would have; the `ConfigSource` says what errors about it name. Raises ModelLoadError."""
    architecture = architecture_of(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} has no token_embd.weight")
    prefix = f"{file.architecture}."
    config: dict[str, Any] = {"model_type": architecture.model_type, **architecture.fixed}
    for theirs, ours in _KEYS.items():
        value = file.metadata.get(prefix + theirs)
        if value is not None:
            some = architecture.without_attention and ours in ("num_key_value_heads", "intermediate_size")
            if ours in architecture.by_layer and isinstance(value, np.ndarray):
                value = value[:1]
            config[ours] = _one(prefix + theirs, value[value != 0] if some and isinstance(value, np.ndarray) else value)
    named = {ours: prefix + theirs for theirs, ours in {**_KEYS, **_ROPE_KEYS}.items()}
    named |= dict.fromkeys(("num_local_experts", "n_routed_experts"), f"{prefix}expert_count")
    reader = ConfigReader(config, {}, source=ConfigSource(file.path.name, named))
    if reader.positive("num_hidden_layers") > len(file.tensors):
        raise ModelLoadError(f"{prefix}block_count {config['num_hidden_layers']} is more than the file's {len(file.tensors)} tensors")
    config["num_hidden_layers"] -= file.get(f"{prefix}nextn_predict_layers", int, 0)  # the last layers, which predict further tokens
    if file.metadata.get(f"{prefix}attention.causal") is False:
        raise NotNativeError(f"{prefix}attention.causal False in {file.path.name} is not supported: it is no model that continues texts")
    if architecture.states_alone:
        config = {key: value for key, value in config.items() if key not in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    else:
        heads = reader.positive("num_attention_heads")
        config["num_key_value_heads"] = reader.positive("num_key_value_heads", heads)
        config["head_dim"] = reader.positive("head_dim", reader.positive("hidden_size") // heads)
    config.setdefault("rope_theta", 1e4)
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["dtype"] = _dtype(file)
    if not {tensor.type for tensor in file.tensors.values()} <= {"F32", "F16", "BF16", "F64"}:
        config["quantization_config"] = {"quant_method": "gguf"}
    config["eos_token_id"] = end_tokens(file)
    if not architecture.states_alone:
        _add_rope(file, prefix, config)
    architecture.change(file, config)
    family = FAMILIES[config["model_type"]]
    config["architectures"] = [family.architecture]
    source = ConfigSource(file.path.name, {family.keys.get(key, key): name for key, name in named.items()})
    return {family.keys.get(key, key): value for key, value in config.items()}, source


def _one(key: str, value: Any) -> Any:
    """A value of all layers; some files have one for each layer."""
    if not isinstance(value, np.ndarray):
        return value
    distinct = np.unique(value)
    if len(distinct) != 1:
        raise ModelLoadError(f"{key} differs between layers: {distinct.tolist()[:8]}; supported is one value")
    return distinct[0].item()


def _dtype(file: GgufFile) -> str:
    """That of the matrices if they are not quantised: bfloat16, which all kernels have, if they are."""
    types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "float32" if types == {"F32"} else "float16" if types == {"F16"} else "bfloat16"


def _add_rope(file: GgufFile, prefix: str, config: dict[str, Any]) -> None:
    """Scaling by a type, or by the factors of each frequency that some files have as tensors."""

    def number(name: str) -> Any:
        return file.get(f"{prefix}rope.scaling.{name}", float)

    rotated = file.get(f"{prefix}rope.dimension_count", int, config["head_dim"])
    if rotated % 2 or not 2 <= rotated <= config["head_dim"]:
        raise ModelLoadError(f"{prefix}rope.dimension_count {rotated} is not an even number in [2, {config['head_dim']}]")
    config["partial_rotary_factor"] = rotated / config["head_dim"]
    kind = file.get(f"{prefix}rope.scaling.type", str, "linear")
    factor = number("factor") or file.get(f"{prefix}rope.scale_linear", float)
    original = file.get(f"{prefix}rope.scaling.original_context_length", int)
    factors = {name: file.tensors.get(f"{tensor}.weight") for name, tensor in _FACTORS.items()}
    if any(factors.values()):
        long = _numbers(factors["both"] or factors["long"])
        short = _numbers(factors["both"] or factors["short"])
        attention = 1.0 if number("attn_factor") is None else number("attn_factor")
        config["rope_scaling"] = {"rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": attention}
        config["rope_scaling"]["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    elif kind == "linear" and factor:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and factor:
        if number("attn_factor") not in (None, 1.0):
            raise NotNativeError(f"{prefix}rope.scaling.attn_factor {number('attn_factor')} is not supported for yarn")
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        scaling |= {name: number(f"yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling["attention_factor"] = number("yarn_attn_factor")
        config["rope_scaling"] = {name: value for name, value in scaling.items() if value is not None}
    elif kind not in ("none", "linear", "yarn"):
        raise NotNativeError(
            f"{prefix}rope.scaling.type {kind!r} is not supported; supported are none, linear, yarn and factors by frequency"
        )


def _numbers(tensor: GgufTensor | None) -> list[float] | None:
    if tensor is None:
        return None
    if tensor.type != "F32" or tensor.data.size > 4 * _MOST_FACTORS:
        raise ModelLoadError(f"factors of the rope's frequencies of shape {list(tensor.shape)} in {tensor.type} are not supported")
    return [float(number) for number in tensor.data.view(np.float32)]
