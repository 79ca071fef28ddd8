"""`ModelSpec`: the description of a decoder, read from a Hugging Face config.json; and the defaults of generation_config.json.

Owns the meaning of every field of the config, and which configs are refused. Follows the configuration and modeling files of transformers
for the families below, without importing transformers. Does not know how a model is executed.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aengine.errors import InvalidRequestError, ModelLoadError
from aengine.layers.rotary import RopeSpec
from aengine.models.json_file import read_json
from aengine.models.rope_config import read_rope
from aengine.params import SamplingParams

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: pre-norm blocks of grouped-query attention and a gated SiLU MLP."""

    architecture: str  # the name in config.json
    family: str  # model_type of the architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens, the query itself included; None: full attention
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head of q and k, before rotation
    tied_head: bool  # the output head is the embedding
    max_position_embeddings: int  # longest sequence in tokens
    dtype: str | None  # the checkpoint's, as config.json names it
    initializer_range: float  # standard deviation of random weights
    eos_token_ids: tuple[int, ...]  # of config.json; those of a generation_config.json override them


@dataclass(frozen=True, slots=True)
class _Family:
    """What differs between architectures: the values that the HF config class assumes for absent keys, biases, norms and windows."""

    model_type: str
    defaults: Mapping[str, Any]  # values of keys that are absent from config.json
    qkv_bias: bool | None = None  # None: config key attention_bias
    output_bias: bool | None = False  # None: config key attention_bias
    mlp_bias: bool | None = False  # None: config key mlp_bias
    qk_norm: bool = False
    per_layer_windows: bool = False  # by use_sliding_window, max_window_layers and layer_types; else sliding_window holds for all layers
    windows: bool = True  # whether sliding_window is read at all


_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_FAMILIES = {
    "Qwen3ForCausalLM": _Family(
        "qwen3", {**_QWEN, "num_key_value_heads": 32, "head_dim": 128}, output_bias=None, qk_norm=True, per_layer_windows=True
    ),
    "Qwen2ForCausalLM": _Family("qwen2", {**_QWEN, "num_key_value_heads": 32}, qkv_bias=True, per_layer_windows=True),
    "LlamaForCausalLM": _Family("llama", {"max_position_embeddings": 2048}, output_bias=None, mlp_bias=None, windows=False),
    "MistralForCausalLM": _Family(
        "mistral", {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}, qkv_bias=False
    ),
}


def load_spec(model_dir: pathlib.Path) -> ModelSpec:
    """The spec of the config.json in `model_dir`. Raises ModelLoadError."""
    return read_spec(read_json(model_dir / "config.json"))


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config.json. Raises ModelLoadError naming what is missing or not supported."""
    architecture, family = _family(config)
    reader = _Reader(config, family.defaults)
    quantization = config.get("quantization_config")
    if quantization and not _is_of_kv_alone(quantization):
        method = quantization.get("quant_method", "unknown")
        raise ModelLoadError(
            f"quantization_config is not supported (quant_method {method!r}); supported are unquantized weights, with or without an 8-bit"
            " float kv_cache_scheme"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"hidden_act {activation!r} is not supported; supported is silu")

    hidden_size, num_heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    num_layers = reader.positive("num_hidden_layers")
    num_kv_heads = reader.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if reader.get("head_dim") is None and hidden_size % num_heads:
        raise ModelLoadError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, and head_dim is absent")
    head_dim = reader.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelLoadError(f"head_dim {head_dim} is odd; rotary embedding needs an even one")
    attention_bias = reader.flag("attention_bias")
    rope, context = read_rope(config, head_dim, reader.positive("max_position_embeddings"))
    return ModelSpec(
        architecture=architecture,
        family=family.model_type,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(reader.get("rms_norm_eps", 1e-6)),
        rope=rope,
        windows=_windows(reader, family, num_layers),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=reader.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tied_head=reader.flag("tie_word_embeddings"),
        max_position_embeddings=context,
        dtype=config.get("dtype") or config.get("torch_dtype"),
        initializer_range=float(reader.get("initializer_range", 0.02)),
        eos_token_ids=read_token_ids(config.get("eos_token_id"), "eos_token_id"),
    )


def _is_of_kv_alone(quantization: Mapping[str, Any]) -> bool:
    """Whether a compressed-tensors config quantizes only the KV cache: in 8-bit float with one scale per layer."""
    scheme = quantization.get("kv_cache_scheme") or {}
    return (
        quantization.get("quant_method") == "compressed-tensors"
        and not quantization.get("config_groups")
        and (scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy", "tensor")) == ("float", 8, "tensor")
        and not scheme.get("dynamic")
    )


def read_token_ids(value: Any, key: str) -> tuple[int, ...]:
    """None, an id or a list of ids -> the distinct ids in order. Raises ModelLoadError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
        raise ModelLoadError(f"{key} {value!r} is not a token id or a list of token ids")
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True, slots=True)
class _Reader:
    config: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, key: str, fallback: Any = None) -> Any:
        value = self.config[key] if key in self.config else self.defaults.get(key)
        return fallback if value is None else value

    def positive(self, key: str, fallback: int | None = None) -> int:
        value = self.get(key, fallback)
        if value is None:
            raise ModelLoadError(f"config.json lacks {key}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelLoadError(f"{key} {value!r} in config.json is not a positive integer")
        return value

    def flag(self, key: str) -> bool:
        return bool(self.get(key, False))


def _family(config: Mapping[str, Any]) -> tuple[str, _Family]:
    supported = ", ".join(_FAMILIES)
    architectures = config.get("architectures")
    if architectures:
        name = architectures[0]
        if name not in _FAMILIES:
            raise ModelLoadError(f"architecture {name!r} is not supported; supported are {supported}")
        return name, _FAMILIES[name]
    model_type = config.get("model_type")
    for name, family in _FAMILIES.items():
        if family.model_type == model_type:
            return name, family
    raise ModelLoadError(f"config.json has no architectures and its model_type {model_type!r} is not supported; supported are {supported}")


def _windows(reader: _Reader, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    kinds = reader.get("layer_types")
    if kinds is not None and len(kinds) != num_layers:
        raise ModelLoadError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    unknown = sorted(set(kinds or ()) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelLoadError(f"layer_types {unknown[0]!r} is not supported; supported are full_attention, sliding_attention")

    if family.per_layer_windows:
        window = reader.positive("sliding_window") if reader.flag("use_sliding_window") and reader.get("sliding_window") else None
        if kinds is None:
            first = reader.get("max_window_layers", num_layers)
            kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(num_layers)]
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    window = reader.positive("sliding_window") if family.windows and reader.get("sliding_window") else None
    expected = "full_attention" if window is None else "sliding_attention"
    if kinds is not None and set(kinds) != {expected}:
        raise ModelLoadError(f"layer_types other than {expected} in every layer is not supported for {family.model_type}")
    return (window,) * num_layers


def load_generation(model_dir: pathlib.Path, spec: ModelSpec) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """The end-of-sequence ids, and those of temperature, top_p, top_k, min_p and repetition_penalty that the model sets, as keyword
    arguments of `SamplingParams`.

    Reads `model_dir`/generation_config.json if there is one. If it has no end-of-sequence ids, those of config.json are taken.
    Raises ModelLoadError for values out of range.
    """
    path = model_dir / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    sampling = {key: config[key] for key in _SAMPLING_KEYS if config.get(key) is not None}
    try:
        SamplingParams(**sampling)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{path} has a value out of range: {error}") from error
    eos = read_token_ids(config.get("eos_token_id"), "eos_token_id")
    return eos or spec.eos_token_ids, sampling
