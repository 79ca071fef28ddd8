"""What a family of models is: how its config.json becomes a `ModelSpec`, and how its checkpoints name and store the parameters.

Owns the parts of a description that most families share. Knows nothing of files or of how a model is executed.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.kernels.arrays import Array
from aengine.kernels.params import ExpertRouting
from aengine.layers.rotary import RopeSpec
from aengine.models.config.reader import ConfigReader, NotNativeError, read_token_ids
from aengine.models.config.rope import read_rope
from aengine.models.spec import Attention, Experts, LatentAttention, Layer, Mlp, ModelSpec, Norm, NormKind, Recurrence, ShortConvolution

_MOST_EXPERTS = 1 << 18  # several times those of any model
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
LLAMA_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.{layer}",
    "attention_norm": "input_layernorm",
    "qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_up": "mlp.gate_proj mlp.up_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Our names of modules -> the checkpoint's, several where a parameter is made of several tensors; those of a layer stand behind "layer".

A name with "{index}" stands for one tensor for each of a parameter's experts or heads. A key that ends with ".weight" or ".bias", or that
is a parameter which has neither ending, gives the whole name of the tensor.
"""

MTP_NAMES: Mapping[str, str] = {
    "layer": "model.layers.{layer}",
    "embedding_norm": "model.layers.{layer}.enorm",
    "hidden_norm": "model.layers.{layer}.hnorm",
    "combine": "model.layers.{layer}.eh_proj",
    "norm": "model.layers.{layer}.shared_head.norm",
}
"""Those of DeepSeek-V3 and GLM-4.5."""


@dataclass(frozen=True, slots=True)
class Transform:
    """How a tensor of the checkpoint becomes rows of a parameter."""

    shape: tuple[int, ...]  # in the checkpoint
    apply: Callable[[Array], Array]
    """If it is `by_rows`, also of a tensor with another number of in_features: of what belongs to the rows of a quantised matrix."""
    transposed: bool = False  # the checkpoint has [..., in_features, out_features]
    by_rows: bool = True  # rows of the parameter are rows of the checkpoint's matrix


def part_sizes(vocab_size: int, hidden: int, intermediate: int, layers: int, heads: int, **others: int) -> dict[str, Any]:
    """Return keys for `Family.part_defaults`: the sizes that most families have, and `others`."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {**dict(zip(keys, (vocab_size, hidden, intermediate, layers, heads), strict=True)), **others}


def no_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """A `Family.transform` that takes every tensor as it is."""
    return None


@dataclass(frozen=True, slots=True)
class Family:
    model_type: str  # in config.json
    architecture: str  # in config.json; empty for one that is a part of others alone
    read: Callable[[ConfigReader], ModelSpec]
    """From the config. Raises ModelLoadError for values that are not supported."""
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the values that the HF config class has for absent keys
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    transform: Callable[[ModelSpec, Layer | None, str, int, tuple[int, ...]], Transform | None] = no_transform
    """For part number `part` of our parameter `name` (such as "qkv.weight", without the layer's number) whose rows have `shape`: how they
    are made of the checkpoint's tensor; None: it has that shape and is taken as it is."""
    ignored: str = r".*\.rotary_emb\.inv_freq"  # regular expression for tensors that a checkpoint may have and that nothing needs
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys as most families call them -> as this one calls them in its config.json; several names where it may have any of them."""
    layer_names: Callable[[Layer], Mapping[str, str]] = lambda layer: {}
    """What takes the place of `names` in a layer."""
    other_names: Mapping[str, str] = field(default_factory=dict)  # how names begin in some checkpoints -> how they begin in `names`
    joined: Mapping[str, str] = field(default_factory=dict)
    """Endings of names of tensors that some checkpoints have for all experts of a layer, [experts, rows, columns] -> how the names of those
    end that they stand for, {index} being that of an expert; several share the rows evenly."""
    capped_as_part: bool = False  # a model whose text part this is scales and caps logits as the part alone does
    part_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults for keys that only the text part of another model may lack: its config has what differs from the HF class alone."""
    mtp_names: Mapping[str, str] = field(default_factory=dict)
    """What takes the place of `names` for the first MTP layer that its checkpoints may have; {layer} is the model's number of layers."""

    def own_name(self, stored: str) -> str:
        """A name that begins as in `names`, for one that may begin as in `other_names`."""
        return next((new + stored.removeprefix(old) for old, new in self.other_names.items() if stored.startswith(old)), stored)


def decoder_spec(reader: ConfigReader, layers: Sequence[Layer], **changes: Any) -> ModelSpec:
    """A model of `layers`, with what the families have in common; `changes` are other fields of `ModelSpec`."""
    fields: dict[str, Any] = {
        "vocab_size": reader.positive("vocab_size"),
        "hidden_size": reader.positive("hidden_size"),
        "norm": changes["norm"] if "norm" in changes else rms_norm(reader),
        "max_position_embeddings": reader.positive("max_position_embeddings"),
        "tied_head": reader.flag("tie_word_embeddings"),
        "dtype": reader.config.get("dtype") or reader.config.get("torch_dtype"),
        "initializer_range": reader.number("initializer_range", 0.02),
        "eos_token_ids": read_token_ids(reader.config.get("eos_token_id"), "eos_token_id"),
    }
    fields |= changes
    within = tuple(_without_idle_window(layer, fields["max_position_embeddings"]) for layer in layers)
    return ModelSpec(family=reader.family, architecture=reader.architecture, layers=within, **fields)


def _without_idle_window(layer: Layer, context: int) -> Layer:
    """A window that no sequence is longer than is none."""
    attention = layer.attention
    if attention is None or isinstance(attention, ShortConvolution) or attention.window is None or attention.window < context:
        return layer
    return replace(layer, attention=replace(attention, window=None))


def rms_norm(reader: ConfigReader, key: str = "rms_norm_eps", *, unit_offset: bool = False) -> Norm:
    return Norm(eps=reader.number(key, 1e-6), unit_offset=unit_offset)


def rope_and_context(reader: ConfigReader, head_dim: int, *, partial: bool = False) -> tuple[RopeSpec, int]:
    """The rope that all layers share, and the longest context in tokens. `partial`: it may rotate a part of each head."""
    keys = ("rope_theta", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings")
    given = {key: reader.get(key) for key in keys}
    maximum = reader.positive("max_position_embeddings")
    rope, context = read_rope({**reader.config, **given}, head_dim, maximum, reader.max_model_len, reader.source)
    rotated = 2 * len(rope.frequencies)
    if rotated != head_dim and not partial:
        raise NotNativeError(
            f"{reader.name('partial_rotary_factor')} {rotated / head_dim:g} in {reader.source.file} is not supported for this family; "
            "supported is 1"
        )
    return rope, context


def head_sizes(reader: ConfigReader) -> tuple[int, int, int]:
    """Read num_heads, num_kv_heads and head_dim. Raises ModelLoadError for sizes that do not fit each other."""
    hidden_size, num_heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    num_kv_heads = reader.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{reader.name('num_attention_heads')} {num_heads} is not a multiple of {reader.name('num_key_value_heads')} {num_kv_heads}"
        )
    if reader.get("head_dim") is None and hidden_size % num_heads:
        names = [reader.name(key) for key in ("hidden_size", "num_attention_heads", "head_dim")]
        raise ModelLoadError(f"{names[0]} {hidden_size} is not a multiple of {names[1]} {num_heads}, and {names[2]} is absent")
    head_dim = reader.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelLoadError(f"{reader.name('head_dim')} {head_dim} is odd; rotary embedding needs an even one")
    return num_heads, num_kv_heads, head_dim


def with_keys(reader: ConfigReader, changes: dict[str, Any]) -> ConfigReader:
    """The reader of the same config with other values of some keys."""
    return replace(reader, config=ChainMap(changes, reader.config))  # type: ignore[arg-type]  # a Mapping is enough to read


def mixed_layers(
    attends: Sequence[bool],
    key: str,
    attended: Attention | LatentAttention,
    recurrence: Recurrence | None,
    mlps: Sequence[Mlp | Experts],
    norm: Norm,
) -> list[Layer]:
    """Layers that have attention where they are to attend by the config's `key`, else the recurrence. Raises NotNativeError if none is."""
    check_attends(attends, key)
    return [
        Layer(attended if one else None, mlp, norm, norm, recurrence=None if one else recurrence)
        for one, mlp in zip(attends, mlps, strict=True)
    ]


def check_attends(attends: Sequence[bool], key: str) -> None:
    """Raises NotNativeError if no layer has attention."""
    if not any(attends):
        raise NotNativeError(f"no layer has attention by {key}, which is not supported")


def attention(reader: ConfigReader, rope: RopeSpec | None, **changes: Any) -> Attention:
    """Grouped-query attention with the sizes of the config; `changes` are other fields of `Attention`."""
    num_heads, num_kv_heads, head_dim = head_sizes(reader)
    fields = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "scale": head_dim**-0.5, "rope": rope}
    return Attention(**{**fields, **changes})


def layer_kinds(reader: ConfigReader, full_every: int | None, *, first: bool = False) -> list[str]:
    """The `layer_types`; if they are absent, every layer slides but each `full_every`-th; None: no layer is full. `first`: counted from the
    first layer, which is full."""
    num_layers = reader.positive("num_hidden_layers")
    kinds = reader.layer_types(num_layers)
    if kinds is not None:
        return kinds
    is_full = [bool(full_every) and not (layer + (not first)) % (full_every or 1) for layer in range(num_layers)]
    return ["full_attention" if one else "sliding_attention" for one in is_full]


def window_of(reader: ConfigReader, kind: str) -> int | None:
    """The window of layers of this kind."""
    return reader.positive("sliding_window") if kind == "sliding_attention" else None


def one_channel(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """The checkpoint's convolution is one of one input channel for each output channel."""
    return Transform((shape[0], 1, shape[1]), lambda rows: rows[:, 0]) if name == "conv.weight" else None


def halves(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """Return the transform that puts rows of q and k, whose rope pairs neighbours, into the order in which it pairs halves of the
    rotated dimensions.

    A family's `transform`, for models without norms of q and k.
    """
    attention = None if layer is None else layer.attention
    if not isinstance(attention, Attention) or attention.rope is None or not name.startswith("qkv.") or part == 2:
        return None
    head_dim, order = attention.head_dim, neighbours_to_halves(attention)
    return Transform(shape, lambda rows: rows.reshape(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape))


def neighbours_to_halves(attention: Attention) -> list[int]:
    """[head_dim]: which row of a head whose rope pairs neighbours each row of a head is whose rope pairs halves."""
    rotary_dim = 0 if attention.rope is None else 2 * len(attention.rope.frequencies)
    return [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, attention.head_dim)]


def by_kv_head(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """Return the transform of a tensor that has the rows of each KV head together (those of its query heads, of its key, of its value):
    all of q, then of k, then of v.

    A family's `transform`.
    """
    if layer is None or not name.startswith("qkv."):
        return None
    assert isinstance(layer.attention, Attention)
    kv_heads, head_dim = layer.attention.num_kv_heads, layer.attention.head_dim
    queries = layer.attention.num_heads // kv_heads

    def apply(tensor: Array) -> Array:
        by_head = tensor.reshape(kv_heads, queries + 2, head_dim, *tensor.shape[1:])
        return np.concatenate([kind.reshape(-1, *tensor.shape[1:]) for kind in np.split(by_head, (queries, queries + 1), axis=1)])

    return Transform(shape, apply)


def layer_norm(reader: ConfigReader, key: str = "layer_norm_eps") -> Norm:
    return Norm(NormKind.LAYER, reader.number(key), bias=True)


def plain_mlp(reader: ConfigReader, *, bias: bool, size: int | None = None) -> Mlp:
    """Describe an MLP without a gate, whose width is `size`, or intermediate_size if that is None."""
    size = size or reader.positive("intermediate_size")
    return Mlp(size, reader.activation(), gated=False, up_bias=bias, down_bias=bias)


def gated_mlp(reader: ConfigReader, *, bias: bool = False, size: str = "intermediate_size") -> Mlp:
    return Mlp(reader.positive(size), reader.activation(), up_bias=bias, down_bias=bias)


def routing(reader: ConfigReader, **others: Any) -> ExpertRouting:
    """Describe routing to num_experts_per_tok experts; `others` are fields of `ExpertRouting` beside `top_k`."""
    return ExpertRouting(reader.positive("num_experts_per_tok"), **others)


def experts(reader: ConfigReader, routing: ExpertRouting, *, size: str = "moe_intermediate_size", **others: Any) -> Experts:
    """Experts with the sizes of the config; `others` are other fields of `Experts`. Raises ModelLoadError for counts that do not fit."""
    places = (reader.config, reader.defaults)
    named = [key for place in places for key in _COUNTS if key in place]
    key = next((key for place in places for key in _COUNTS if place.get(key) is not None), (*named, _COUNTS[0])[0])
    count = reader.positive(key)
    if count * reader.positive("num_hidden_layers") > _MOST_EXPERTS:
        raise reader.unusable(key, count, f"at most {_MOST_EXPERTS} in all layers")
    groups, chosen, top_k = routing.num_groups, routing.top_groups, routing.top_k
    if count % groups or chosen > groups or routing.group_top > count // groups:
        raise ModelLoadError(f"{count} experts in n_group {groups} groups, of which topk_group {chosen} are chosen, do not fit together")
    if top_k > count // groups * chosen:
        raise ModelLoadError(
            f"{reader.name('num_experts_per_tok')} {top_k} is more than the {count // groups * chosen} experts that it chooses from"
        )
    return Experts(**{"num_experts": count, "expert": gated_mlp(reader, size=size), "routing": routing, **others})


def transposed_experts(
    spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...], *, alternating: bool
) -> Transform | None:
    """A tensor holds all experts, transposed: [experts, in, out]. The columns of gate and up alternate, or those of gate come first."""
    if layer is None or not name.startswith("experts.") or not isinstance(layer.mlp, Experts):
        return None
    count, gated, is_bias = layer.mlp.num_experts, "gate_up" in name, name.endswith("bias")
    rows = shape[0] // count

    def apply(tensor: Array) -> Array:
        whole = tensor if is_bias else tensor.swapaxes(1, 2)
        if gated and alternating:
            whole = whole.reshape(count, rows // 2, 2, *whole.shape[2:]).swapaxes(1, 2)
        return whole.reshape(-1) if is_bias else whole.reshape(count * rows, -1)

    return Transform((count, rows) if is_bias else (count, shape[1], rows), apply, transposed=not is_bias)
