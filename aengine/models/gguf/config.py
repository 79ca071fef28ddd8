"""From the metadata of a GGUF file to the config.json that the model would have, which the families read.

Owns llama.cpp's names of architectures and keys. Raises for what no family has a key of.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aengine.errors import ModelLoadError
from aengine.models.config_reader import ConfigReader
from aengine.models.families import FAMILIES
from aengine.models.gguf.file import GgufFile, open_gguf

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
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
}
"""Keys behind the architecture's name -> keys of config.json."""
_ENDS = ("eos", "eot", "eom")
_END_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<EOT>",
        "<|END_OF_TURN_TOKEN|>",
    )
)
"""Control tokens that end a turn in the chats of some model, which a file need not name otherwise."""
_CONTROL = 3


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a GGUF architecture is, beside the common keys."""

    model_type: str
    fixed: Mapping[str, Any] = field(default_factory=dict)  # what its files do not say
    change: Callable[[GgufFile, dict[str, Any]], None] = lambda file, config: None  # completes the config
    pairs_neighbours: bool = False  # the rows of q and k are in the order of a rope that pairs neighbours; the family's pairs halves
    transposed: bool = False  # the family's matrices of layers are [in_features, out_features]; those of the file never are
    unit_offset: bool = False  # 1 is added to the weights of norms


def _llama(file: GgufFile, config: dict[str, Any]) -> None:
    if "num_experts" in config:
        config["model_type"] = "mixtral"
        config["num_local_experts"] = config.pop("num_experts")
        return
    tensors = file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors


def _granite(file: GgufFile, config: dict[str, Any]) -> None:
    config["logits_scaling"] = config.pop("logit_scale", 1.0)


def _qwen3_moe(file: GgufFile, config: dict[str, Any]) -> None:
    config.setdefault("moe_intermediate_size", config.get("intermediate_size"))


def _qwen2_moe(file: GgufFile, config: dict[str, Any]) -> None:
    config.setdefault("intermediate_size", config.get("shared_expert_intermediate_size"))


def _gemma2(file: GgufFile, config: dict[str, Any]) -> None:
    # The two largest models scale their scores by the width of a head as if all heads filled the hidden size; files do not say it.
    largest = config.get("num_hidden_layers") == {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]


def _gemma3(file: GgufFile, config: dict[str, Any]) -> None:
    _gemma2(file, config)
    config["rope_local_base_freq"] = file.get("gemma3.rope.freq_base_swa", float, 1e4)


def _phi3(file: GgufFile, config: dict[str, Any]) -> None:
    if config.get("sliding_window") == 0:
        del config["sliding_window"]
    config["original_max_position_embeddings"] = file.get(
        "phi3.rope.scaling.original_context_length", int, config.get("max_position_embeddings")
    )


def _stablelm(file: GgufFile, config: dict[str, Any]) -> None:
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in file.tensors


def _glm4(file: GgufFile, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def _normalized(value: bool) -> Mapping[str, Any]:
    return {"norm_topk_prob": value}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", change=_llama, pairs_neighbours=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma2": Architecture("gemma2", change=_gemma2, unit_offset=True),
    "gemma3": Architecture("gemma3_text", change=_gemma3, unit_offset=True),
    "phi3": Architecture("phi3", change=_phi3),
    "olmo2": Architecture("olmo2"),
    "granite": Architecture("granite", change=_granite, pairs_neighbours=True),
    "smollm3": Architecture("smollm3", pairs_neighbours=True),
    "glm4": Architecture("glm4", change=_glm4),
    "cohere2": Architecture("cohere2"),
    "starcoder2": Architecture("starcoder2"),
    "gpt2": Architecture("gpt2", transposed=True),
    "stablelm": Architecture("stablelm", change=_stablelm),
    "qwen2moe": Architecture("qwen2_moe", _normalized(False), _qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", _normalized(True), _qwen3_moe),
    "olmoe": Architecture("olmoe", _normalized(False)),
}
"""By llama.cpp's name."""


def read_config(path: pathlib.Path) -> dict[str, Any]:
    """The config.json of the model in a GGUF file. Raises ModelLoadError for files that are broken or whose model is not supported."""
    return config_of(open_gguf(path))


def architecture_of(file: GgufFile) -> Architecture:
    if file.architecture not in ARCHITECTURES:
        raise ModelLoadError(f"GGUF architecture {file.architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[file.architecture]


def config_of(file: GgufFile) -> dict[str, Any]:
    architecture = architecture_of(file)
    if file.get("split.count", int, 1) > 1:
        raise ModelLoadError(f"{file.path} is one of {file.metadata['split.count']} files of a model; supported are models in one file")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} has no token_embd.weight")
    prefix = f"{file.architecture}."
    config: dict[str, Any] = {"model_type": architecture.model_type, **architecture.fixed}
    for theirs, ours in _KEYS.items():
        value = file.metadata.get(prefix + theirs)
        if value is not None:
            config[ours] = _one(prefix + theirs, value)
    experts = file.get(f"{prefix}expert_count", int, 0)
    if experts:
        config["num_experts"] = experts
    reader = ConfigReader(config, {})
    if reader.positive("num_hidden_layers") > len(file.tensors):
        raise ModelLoadError(f"{prefix}block_count {config['num_hidden_layers']} is more than the file's {len(file.tensors)} tensors")
    heads = reader.positive("num_attention_heads")
    config.setdefault("num_key_value_heads", heads)
    config["head_dim"] = reader.positive("head_dim", reader.positive("hidden_size") // heads)
    config.setdefault("rope_theta", 1e4)
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["dtype"] = _dtype(file)
    if not {tensor.type for tensor in file.tensors.values()} <= {"F32", "F16", "BF16", "F64"}:
        config["quantization_config"] = {"quant_method": "gguf"}
    config["eos_token_id"] = _ends(file)
    _add_rope(file, prefix, config)
    architecture.change(file, config)
    family = FAMILIES[config["model_type"]]
    config["architectures"] = [family.architecture]
    return {family.keys.get(key, key): value for key, value in config.items()}


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


def _ends(file: GgufFile) -> list[int]:
    named = [file.get(f"tokenizer.ggml.{name}_token_id", int) for name in _ENDS]
    ids = {token_id for token_id in named if token_id is not None}
    tokens, kinds = file.metadata.get("tokenizer.ggml.tokens", ()), file.metadata.get("tokenizer.ggml.token_type", ())
    ids.update(number for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL and token in _END_TEXTS)
    return sorted(ids)


def _add_rope(file: GgufFile, prefix: str, config: dict[str, Any]) -> None:
    """Scaling by a type, or by the factors of each frequency that some files have as tensors."""
    config["partial_rotary_factor"] = file.get(f"{prefix}rope.dimension_count", int, config["head_dim"]) / config["head_dim"]
    kind = file.get(f"{prefix}rope.scaling.type", str, "none")
    factor = file.get(f"{prefix}rope.scaling.factor", float)
    original = file.get(f"{prefix}rope.scaling.original_context_length", int)
    factors = {name: file.tensors.get(f"{tensor}.weight") for name, tensor in _FACTORS.items()}
    if any(factors.values()):
        long = _numbers(factors["both"] or factors["long"])
        short = _numbers(factors["both"] or factors["short"])
        attention = file.get(f"{prefix}rope.scaling.attn_factor", float, 1.0)
        config["rope_scaling"] = {"rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": attention}
        config["rope_scaling"]["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    elif kind == "linear" and factor:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and factor:
        config["rope_scaling"] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        attention = file.get(f"{prefix}rope.scaling.attn_factor", float)
        if attention is not None:
            config["rope_scaling"]["attention_factor"] = attention
    elif kind not in ("none", "linear", "yarn"):
        raise ModelLoadError(
            f"{prefix}rope.scaling.type {kind!r} is not supported; supported are none, linear, yarn and factors by frequency"
        )


_FACTORS = {"both": "rope_freqs", "long": "rope_factors_long", "short": "rope_factors_short"}


def _numbers(tensor: Any) -> list[float] | None:
    if tensor is None:
        return None
    if tensor.type != "F32":
        raise ModelLoadError(f"factors of the rope's frequencies in {tensor.type} are not supported; supported is F32")
    return [float(number) for number in tensor.data.view(np.float32)]
