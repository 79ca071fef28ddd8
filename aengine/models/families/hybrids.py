"""Layers of attention among others: LFM2 has short convolutions, Qwen3-Next and Qwen3.5 have the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aengine.kernels.arrays import Array
from aengine.kernels.params import RouterScoring
from aengine.models.config.reader import ConfigReader
from aengine.models.families.family import (
    LLAMA_NAMES,
    Family,
    Transform,
    attention,
    check_attends,
    decoder_spec,
    experts,
    gated_mlp,
    head_sizes,
    mixed_layers,
    one_channel,
    part_sizes,
    rms_norm,
    rope_and_context,
    routing,
)
from aengine.models.families.mixtures import QWEN_NAMES, dense_layers, qwen_dense_layers
from aengine.models.spec import Attention, Experts, Layer, Mlp, ModelSpec, Norm, QkNorm, Recurrence, RecurrenceKind, ShortConvolution


def _lfm2_layers(reader: ConfigReader, mlps: Sequence[Mlp | Experts]) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, num_layers = rms_norm(reader), reader.positive("num_hidden_layers")
    kinds = reader.layer_types(num_layers, ("conv", "full_attention"))
    if kinds is None:
        full = reader.integers("full_attn_idxs", list(range(num_layers)))
        kinds = ["full_attention" if index in full else "conv" for index in range(num_layers)]
    check_attends([kind == "full_attention" for kind in kinds], "layer_types")
    convolution = ShortConvolution(reader.positive("hidden_size"), reader.positive("conv_L_cache"), reader.flag("conv_bias"))
    attended = attention(reader, rope, qk_norm=QkNorm(norm))
    layers = [
        Layer(attention=convolution if kind == "conv" else attended, mlp=mlp, attention_norm=norm, mlp_norm=norm)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]
    tied = reader.flag("tie_embedding", reader.flag("tie_word_embeddings"))  # the older name wins
    return decoder_spec(reader, layers, max_position_embeddings=context, tied_head=tied)


def _width(reader: ConfigReader) -> int:
    return reader.positive("intermediate_size" if reader.get("block_ff_dim") is None else "block_ff_dim")


def _lfm2(reader: ConfigReader) -> ModelSpec:
    size = _width(reader)
    if reader.flag("block_auto_adjust_ff_dim", True):
        multiple = reader.positive("block_multiple_of")
        size = int(reader.positive_number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return _lfm2_layers(reader, [Mlp(size)] * reader.positive("num_hidden_layers"))


def _lfm2_moe(reader: ConfigReader) -> ModelSpec:
    how = routing(
        reader,
        scoring=RouterScoring.SIGMOID,
        normalize=reader.flag("norm_topk_prob"),
        scaling=reader.number("routed_scaling_factor", 1.0),
    )
    block, mlp = experts(reader, how, correction=reader.flag("use_expert_bias")), Mlp(_width(reader))
    return _lfm2_layers(reader, [mlp if dense else block for dense in dense_layers(reader)])


_LFM2_NAMES = {
    **LLAMA_NAMES,
    "norm": "model.embedding_norm",
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "output": "self_attn.out_proj",
    "conv_in": "conv.in_proj",
    "conv": "conv.conv",
    "conv_out": "conv.out_proj",
    "gate_up": "feed_forward.w1 feed_forward.w3",
    "down": "feed_forward.w2",
    "router": "feed_forward.gate",
    "router_correction": "feed_forward.expert_bias",
    "experts.gate_up": "feed_forward.experts.{index}.w1 feed_forward.experts.{index}.w3",
    "experts.down": "feed_forward.experts.{index}.w2",
}


def _lfm2_family(model_type: str, architecture: str, read: Any, sizes: dict[str, Any], **defaults: Any) -> Family:
    common = {"tie_word_embeddings": True, "norm_eps": 1e-5, "num_key_value_heads": 8, "conv_L_cache": 3, "rope_theta": 1e6}
    return Family(
        model_type,
        architecture,
        read,
        defaults={"max_position_embeddings": 128_000, "eos_token_id": 2, **common, **defaults},
        names=_LFM2_NAMES,
        transform=one_channel,
        part_defaults=sizes,
        keys={"rms_norm_eps": "norm_eps", "first_k_dense_replace": "num_dense_layers"},
    )


_KINDS = ("linear_attention", "full_attention")


def _delta(reader: ConfigReader) -> Recurrence:
    reader.refuse(hidden_act="silu")
    heads, key_heads = reader.positive("linear_num_value_heads"), reader.positive("linear_num_key_heads")
    if heads % key_heads:
        raise reader.unusable("linear_num_value_heads", heads, f"a multiple of {reader.name('linear_num_key_heads')} {key_heads}")
    key_dim, value_dim, taps = map(reader.positive, ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"))
    norm = Norm(eps=reader.number("rms_norm_eps", 1e-6))
    return Recurrence(RecurrenceKind.GATED_DELTA, heads, key_heads, key_dim, value_dim, taps, norm)


def _qwen_layers(reader: ConfigReader, mlps: Sequence[Mlp | Experts]) -> ModelSpec:
    reader.refuse(attention_bias=False)
    num_layers, every = reader.positive("num_hidden_layers"), reader.positive("full_attention_interval", 4)
    kinds = reader.layer_types(num_layers, _KINDS)
    if kinds is None:
        kinds = [_KINDS[(index + 1) % every == 0] for index in range(num_layers)]
    rope, context = rope_and_context(reader, head_sizes(reader)[2], partial=True)
    norm = rms_norm(reader, unit_offset=True)
    attended = attention(reader, rope, qk_norm=QkNorm(norm), output_gate=True)
    delta = _delta(reader) if "linear_attention" in kinds else None
    layers = mixed_layers([kind == "full_attention" for kind in kinds], "layer_types", attended, delta, mlps, norm)
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context)


def _experts(reader: ConfigReader, *, normalize: bool) -> Experts:
    how = routing(reader, scoring=RouterScoring.SOFTMAX, normalize=normalize)
    shared = gated_mlp(reader, size="shared_expert_intermediate_size")
    return experts(reader, how, shared=shared, shared_gate=True)


def _qwen3_next(reader: ConfigReader) -> ModelSpec:
    block, plain = _experts(reader, normalize=reader.flag("norm_topk_prob", True)), gated_mlp(reader)
    return _qwen_layers(reader, [plain if dense else block for dense in qwen_dense_layers(reader)])


def _qwen3_5(reader: ConfigReader) -> ModelSpec:
    return _qwen_layers(reader, [gated_mlp(reader)] * reader.positive("num_hidden_layers"))


def _qwen3_5_moe(reader: ConfigReader) -> ModelSpec:
    return _qwen_layers(reader, [_experts(reader, normalize=True)] * reader.positive("num_hidden_layers"))


def _qwen_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """Queries and their gates are one tensor, in turns by head."""
    mixer = None if layer is None else layer.attention
    if not isinstance(mixer, Attention) or name != "qkv.weight" or part in (1, 2):
        return one_channel(spec, layer, name, part, shape)
    dim, number = mixer.head_dim, int(part == 3)
    return Transform(
        (2 * shape[0], shape[1]), lambda rows: rows.reshape(-1, 2, dim, *rows.shape[1:])[:, number].reshape(-1, *rows.shape[1:])
    )


def _next_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """The projections of the delta rule have the rows of each key head together."""
    mixer = None if layer is None else layer.recurrence
    if mixer is None or name not in ("recur_in.weight", "recur_gates.weight"):
        return _qwen_transform(spec, layer, name, part, shape)
    per_key, key_heads = mixer.num_heads // mixer.num_key_heads, mixer.num_key_heads
    values = per_key * mixer.value_dim
    sizes = [mixer.key_dim, mixer.key_dim, values, values] if name == "recur_in.weight" else [per_key, per_key]

    def apply(rows: Array) -> Array:
        by_head = rows.reshape(key_heads, sum(sizes), *rows.shape[1:])
        return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in np.split(by_head, np.cumsum(sizes[:-1]), axis=1)])

    return Transform(shape, apply)


_QWEN_NAMES: Mapping[str, str] = {
    **QWEN_NAMES,
    "qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.q_proj",
    "recur_in": "linear_attn.in_proj_qkv linear_attn.in_proj_z",
    "recur_gates": "linear_attn.in_proj_b linear_attn.in_proj_a",
    "conv": "linear_attn.conv1d",
    "log_decay": "linear_attn.A_log",
    "step_bias": "linear_attn.dt_bias",
    "recur_norm": "linear_attn.norm",
    "recur_out": "linear_attn.out_proj",
}
_NEXT_NAMES = {**_QWEN_NAMES, "recur_in": "linear_attn.in_proj_qkvz", "recur_gates": "linear_attn.in_proj_ba"}
_JOINED = {
    "mlp.experts.gate_up_proj": "mlp.experts.{index}.gate_proj.weight mlp.experts.{index}.up_proj.weight",
    "mlp.experts.down_proj": "mlp.experts.{index}.down_proj.weight",
}
_COMMON = {
    **{"rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "partial_rotary_factor": 0.25, "rope_theta": 1e4, "head_dim": 256},
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
}


def _qwen_family(model_type: str, architecture: str, read: Any, names: Mapping[str, str], transform: Any, **others: Any) -> Family:
    defaults = {**_COMMON, **others.pop("defaults")}
    ignored = r"(model\.)?mtp\..*|.*\.rotary_emb\.inv_freq"
    return Family(
        model_type, architecture, read, defaults=defaults, names=names, transform=transform, ignored=ignored, mtp_names=_MTP_NAMES, **others
    )


_MTP_NAMES = {
    "layer": "mtp.layers.0",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "combine": "mtp.fc",
    "norm": "mtp.norm",
}
_MOE = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_DENSE = {"defaults": {"num_key_value_heads": 4}, "part_defaults": part_sizes(248_320, 4096, 12_288, 32, 16)}
_MIXED = {
    "defaults": {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, **_MOE},
    "part_defaults": part_sizes(248_320, 2048, 5632, 40, 16),
}
FAMILIES = (
    _lfm2_family(
        "lfm2",
        "Lfm2ForCausalLM",
        _lfm2,
        part_sizes(65_536, 2560, 12_288, 32, 32),
        block_multiple_of=256,
    ),
    _lfm2_family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _lfm2_moe,
        part_sizes(65_536, 2048, 7168, 32, 32),
        num_experts=32,
        moe_intermediate_size=1792,
        num_experts_per_tok=4,
        num_dense_layers=2,
        norm_topk_prob=True,
        use_expert_bias=True,
    ),
    _qwen_family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _qwen3_next,
        _NEXT_NAMES,
        _next_transform,
        defaults={"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, **_MOE},
    ),
    _qwen_family("qwen3_5_text", "Qwen3_5ForCausalLM", _qwen3_5, _QWEN_NAMES, _qwen_transform, **_DENSE),
    _qwen_family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _qwen3_5_moe, _QWEN_NAMES, _qwen_transform, joined=_JOINED, **_MIXED),
)
