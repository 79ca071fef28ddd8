"""Gemma: as Llama, with norms of 1 + weight and a scaled embedding. Gemma 2 and 3: norms before and after each block, and windows in most
layers, too. Gemma 4: other heads in the layers without a window, keys and values that several layers read, inputs of each layer, and
experts beside an MLP. Gemma 3n: some of that, with several residual streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from aengine.layers.rotary import RopeSpec
from aengine.models.config.reader import ConfigReader
from aengine.models.config.rope import read_ropes
from aengine.models.families.family import (
    LLAMA_NAMES,
    Family,
    Transform,
    attention,
    decoder_spec,
    experts,
    gated_mlp,
    head_sizes,
    layer_kinds,
    rms_norm,
    rope_and_context,
    routing,
    window_of,
    with_keys,
)
from aengine.models.spec import Attention, Experts, InputGate, Layer, LayerInputs, Mlp, ModelSpec, Norm, QkNorm, Streams

_NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def _spec(reader: ConfigReader, kinds: list[str], ropes: Mapping[str, RopeSpec], context: int, *, qk_norm: bool) -> ModelSpec:
    reader.refuse(use_bidirectional_attention=False)
    norm, bias = rms_norm(reader, unit_offset=True), reader.flag("attention_bias")
    layers = [
        Layer(
            attention=attention(
                reader,
                ropes[kind],
                scale=reader.positive_number("query_pre_attn_scalar") ** -0.5,
                window=window_of(reader, kind),
                soft_cap=reader.number("attn_logit_softcapping", 0.0),
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=QkNorm(norm) if qk_norm else None,
            ),
            mlp=gated_mlp(reader),
            attention_norm=norm,
            post_attention_norm=norm,
            mlp_norm=norm,
            post_mlp_norm=norm,
        )
        for kind in kinds
    ]
    return _scaled_and_capped(reader, layers, norm, context)


def _scaled_and_capped(reader: ConfigReader, layers: list[Layer], norm: Norm, context: int, **changes: Any) -> ModelSpec:
    """A model with a scaled embedding and capped logits; `changes` as of `decoder_spec`."""
    scale, cap = reader.positive("hidden_size") ** 0.5, reader.number("final_logit_softcapping", 0.0)
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context, embedding_scale=scale, logit_soft_cap=cap, **changes)


def _gemma(reader: ConfigReader) -> ModelSpec:
    reader.refuse(use_bidirectional_attention=None)
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, bias = rms_norm(reader, unit_offset=True), reader.flag("attention_bias")
    layer = Layer(attention(reader, rope, qkv_bias=bias, output_bias=bias), gated_mlp(reader), norm, norm)
    layers, scale = [layer] * reader.positive("num_hidden_layers"), reader.positive("hidden_size") ** 0.5
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context, embedding_scale=scale)


def _gemma2(reader: ConfigReader) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    kinds = layer_kinds(reader, full_every=2)
    return _spec(reader, kinds, dict.fromkeys(kinds, rope), context, qk_norm=False)


def _vaultgemma(reader: ConfigReader) -> ModelSpec:
    """Gemma 2 without norms behind its blocks."""
    spec = _gemma2(reader)
    return replace(spec, layers=tuple(replace(layer, post_attention_norm=None, post_mlp_norm=None) for layer in spec.layers))


def _gemma3(reader: ConfigReader) -> ModelSpec:
    reader.refuse(attn_logit_softcapping=None)  # transformers has no effect of it
    ropes, context = read_ropes(reader, head_sizes(reader)[2], _local_and_global(reader))
    kinds = layer_kinds(reader, reader.positive("sliding_window_pattern", 6))
    return _spec(reader, kinds, ropes, context, qk_norm=True)


def _local_and_global(reader: ConfigReader) -> dict[str, dict[str, Any]]:
    """The ropes of configs that have them by older keys."""
    return {
        "sliding_attention": {"rope_theta": reader.get("rope_local_base_freq", 1e4)},
        "full_attention": {"rope_theta": reader.get("rope_theta", 1e6), "rope_scaling": reader.get("rope_scaling")},
    }


def _gemma4(reader: ConfigReader) -> ModelSpec:
    if reader.get("use_bidirectional_attention") != "vision":  # which is of images alone
        reader.refuse(use_bidirectional_attention=None)
    norm, kinds = rms_norm(reader), layer_kinds(reader, full_every=6)
    kinds[-1] = "full_attention"  # as transformers has it
    readers = {kind: _gemma4_heads(reader, kinds, kind) for kind in dict.fromkeys(kinds)}
    ropes: dict[str, RopeSpec] = {}
    context = 0
    for kind, of_kind in readers.items():
        found, context = read_ropes(of_kind, head_sizes(of_kind)[2], {kind: _GEMMA4_ROPES[kind]})
        ropes |= found
    first_shared, sources = _sources(reader, kinds)
    inputs, bias = reader.positive_or_none("hidden_size_per_layer_input"), reader.flag("attention_bias")
    wide, as_values = reader.flag("use_double_wide_mlp"), reader.flag("attention_k_eq_v")
    layer_inputs = None
    if inputs is not None:
        layer_inputs = LayerInputs(inputs, reader.positive("vocab_size_per_layer_input"), norm)
        if layer_inputs.vocab_size < reader.positive("vocab_size"):
            least = f"at least vocab_size {reader.positive('vocab_size')}"
            raise reader.unusable("vocab_size_per_layer_input", layer_inputs.vocab_size, least)
    mlp = gated_mlp(reader)
    block = _gemma4_experts(reader, mlp, norm) if reader.flag("enable_moe_block") else None
    layers = []
    for index, kind in enumerate(kinds):
        shares = index >= first_shared
        attended = attention(
            readers[kind],
            ropes[kind],
            scale=1.0,
            window=window_of(reader, kind),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=QkNorm(norm),
            value_eps=norm.eps,
            keys_as_values=as_values and kind == "full_attention",
            kv_distance=index - sources[kind] if shares else 0,
        )
        own_mlp = replace(mlp, intermediate_size=2 * mlp.intermediate_size) if wide and shares else mlp
        layers.append(
            Layer(
                attended,
                own_mlp if block is None else replace(block, shared=own_mlp),
                attention_norm=norm,
                post_attention_norm=norm,
                mlp_norm=norm if block is None else None,
                post_mlp_norm=norm,
                input_gate=None if inputs is None else InputGate(mlp.activation, norm),
                scaled=True,
            )
        )
    return _scaled_and_capped(reader, layers, norm, context, layer_inputs=layer_inputs)


def _sources(reader: ConfigReader, kinds: list[str]) -> tuple[int, dict[str, int]]:
    """The first layer that reads keys and values of others, and by kind which these are."""
    first_shared = len(kinds) - reader.count("num_kv_shared_layers", 0)
    sources = {kind: index for index, kind in enumerate(kinds[: max(first_shared, 0)])}
    if first_shared < len(kinds) and not set(kinds) <= sources.keys():
        raise reader.unusable("num_kv_shared_layers", len(kinds) - first_shared, "a number that leaves a layer of each kind before these")
    return first_shared, sources


def _gemma3n(reader: ConfigReader) -> ModelSpec:
    reader.refuse(use_bidirectional_attention=False, altup_active_idx=0, altup_correct_scale=True)
    norm, kinds = rms_norm(reader), layer_kinds(reader, full_every=5)
    ropes, context = read_ropes(reader, head_sizes(reader)[2], _local_and_global(reader))
    first_shared, sources = _sources(reader, kinds)
    bias, activation = reader.flag("attention_bias"), reader.activation()
    is_list = isinstance(reader.get("intermediate_size"), list)
    sizes = list(reader.integers("intermediate_size", ())) if is_list else [reader.positive("intermediate_size")] * len(kinds)
    sparse = 10 if len(kinds) > 10 else 0
    sparsities = reader.numbers("activation_sparsity_pattern", [0.95] * sparse + [0.0] * (len(kinds) - sparse))
    if len(sizes) != len(kinds) or not all(size > 0 for size in sizes):
        raise reader.unusable("intermediate_size", sizes, f"{len(kinds)} positive numbers")
    if not all(0 <= share < 1 for share in sparsities):
        raise reader.unusable("activation_sparsity_pattern", sparsities, "numbers in [0, 1)")
    layers = [
        Layer(
            attention(
                reader,
                ropes[kind],
                scale=1.0,
                window=window_of(reader, kind),
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=QkNorm(norm),
                value_eps=norm.eps,
                kv_distance=index - sources[kind] if index >= first_shared else 0,
            ),
            Mlp(size, activation, sparsity=sparsity),
            attention_norm=norm,
            post_attention_norm=norm,
            mlp_norm=norm,
            post_mlp_norm=norm,
            input_gate=InputGate(activation, norm),
        )
        for index, (kind, size, sparsity) in enumerate(zip(kinds, sizes, sparsities, strict=True))
    ]
    inputs = LayerInputs(reader.positive("hidden_size_per_layer_input"), reader.positive("vocab_size_per_layer_input"), norm)
    streams = Streams(reader.positive("altup_num_inputs"), norm, reader.positive("laurel_rank"))
    return _scaled_and_capped(reader, layers, norm, context, layer_inputs=inputs, streams=streams)


def _gemma4_heads(reader: ConfigReader, kinds: list[str], kind: str) -> ConfigReader:
    """The reader of the heads of layers of this kind. Configs give those of full attention by names of their own, or layer by layer."""
    config = reader.config
    if "per_layer_config" in config:
        others = reader.part("per_layer_config")
        numbers = {int(key): key for key in others.config if key.isdecimal()}
        if len(numbers) < len(others.config) or not set(numbers) <= set(range(len(kinds))):
            raise reader.unusable("per_layer_config", config["per_layer_config"], "an object by number of layer")
        given = [others.part(numbers[index]).config if index in numbers else {} for index in range(len(kinds))]
        of_kind = [each for each, name in zip(given, kinds, strict=True) if name == kind]
        if any(each != of_kind[0] for each in of_kind) or not set(of_kind[0]) <= {"head_dim", "num_key_value_heads"}:
            raise reader.unusable("per_layer_config", config["per_layer_config"], "head_dim and num_key_value_heads by kind of layer")
        return with_keys(reader, dict(of_kind[0]))
    if kind != "full_attention":
        return reader
    changes: dict[str, Any] = {"head_dim": reader.positive("global_head_dim")}
    if reader.flag("attention_k_eq_v") and reader.get("num_global_key_value_heads") is not None:
        changes["num_key_value_heads"] = reader.positive("num_global_key_value_heads")
    return with_keys(reader, changes)


def _gemma4_experts(reader: ConfigReader, mlp: Mlp, norm: Norm) -> Experts:
    return experts(reader, routing(reader, normalize=True), shared=mlp, branch_norm=norm)


def _gemma4_names(layer: Layer) -> Mapping[str, str]:
    attended = layer.attention
    assert isinstance(attended, Attention)
    if attended.kv_distance:
        return {"qkv": "self_attn.q_proj"}
    return {"qkv": "self_attn.q_proj self_attn.k_proj"} if attended.keys_as_values else {}


def _gemma4_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """The router of the checkpoint has its norm without weights, and then multiplies by them and by hidden_size ** -0.5."""
    return Transform(shape, lambda scale: scale.astype(np.float32) * spec.hidden_size**-0.5) if name == "router_norm.weight" else None


_GEMMA4_ROPES: Mapping[str, Mapping[str, Any]] = {
    "sliding_attention": {"rope_theta": 1e4},
    "full_attention": {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}},
}
_GEMMA4_NAMES = {
    **_NAMES,
    "layer_embedding": "model.embed_tokens_per_layer",
    "layer_inputs": "model.per_layer_model_projection",
    "layer_inputs_norm": "model.per_layer_projection_norm",
    "input_gate": "per_layer_input_gate",
    "input_out": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
    "scale": "layer_scalar",
    "shared_norm": "pre_feedforward_layernorm",
    "shared.gate_up": "mlp.gate_proj mlp.up_proj",
    "shared.down": "mlp.down_proj",
    "shared_out_norm": "post_feedforward_layernorm_1",
    "router_norm.weight": "router.scale",
    "router": "router.proj",
    "expert_scale": "router.per_expert_scale",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts.gate_up": "experts.{index}.gate_proj experts.{index}.up_proj",
    "experts.down": "experts.{index}.down_proj",
    "experts_out_norm": "post_feedforward_layernorm_2",
}
_GEMMA3N_NAMES = {
    **_GEMMA4_NAMES,
    "streams_in": "model.altup_projections.{index}",
    "streams_out": "model.altup_unembed_projections.{index}",
    "streams_norm": "altup.router_norm",
    "streams_router": "altup.modality_router",
    "streams_predict": "altup.prediction_coefs",
    "streams_correct": "altup.correction_coefs",
    "streams_scale": "altup.correct_output_scale",
    "laurel_down": "laurel.linear_left",
    "laurel_up": "laurel.linear_right",
    "laurel_norm": "laurel.post_laurel_norm",
}
_COMMON = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA3 = {**_COMMON, "vocab_size": 262_208, "max_position_embeddings": 131_072}
_GEMMA2 = {
    **{**_COMMON, "vocab_size": 256_000, "max_position_embeddings": 8192},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
_KEYS = {"hidden_act": "hidden_activation"}
_OTHERS_KEYS = r".*\.rotary_emb\.inv_freq|.*\.self_attn\.[kv]_(proj|norm)\.weight"  # of layers that read those of others


def _gemma4_family(model_type: str, architecture: str, defaults: dict[str, Any]) -> Family:
    return Family(
        model_type,
        architecture,
        _gemma4,
        {**_COMMON, "num_hidden_layers": 30, "vocab_size": 262_144, "global_head_dim": 512, **defaults},
        _GEMMA4_NAMES,
        _gemma4_transform,
        ignored=_OTHERS_KEYS,
        capped_as_part=True,
        keys={**_KEYS, "num_experts_per_tok": "top_k_experts"},
        layer_names=_gemma4_names,
        joined={
            ".experts.gate_up_proj": ".experts.{index}.gate_proj.weight .experts.{index}.up_proj.weight",
            ".experts.down_proj": ".experts.{index}.down_proj.weight",
        },
    )


FAMILIES = (
    Family(
        "gemma",
        "GemmaForCausalLM",
        _gemma,
        {
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _gemma2,
        _GEMMA2,
        _NAMES,
        keys=_KEYS,
    ),
    Family("gemma3_text", "Gemma3ForCausalLM", _gemma3, _GEMMA3, _NAMES, keys=_KEYS),
    Family(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        _gemma3n,
        {
            **{key: value for key, value in _COMMON.items() if key != "query_pre_attn_scalar"},
            **{"hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35, "num_key_value_heads": 2, "sliding_window": 512},
            **{"vocab_size": 262_400, "max_position_embeddings": 32_768, "final_logit_softcapping": 30.0, "num_kv_shared_layers": 15},
            **{"vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "altup_num_inputs": 4, "laurel_rank": 64},
        },
        _GEMMA3N_NAMES,
        ignored=_OTHERS_KEYS,
        capped_as_part=True,
        keys=_KEYS,
        layer_names=_gemma4_names,
    ),
    _gemma4_family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        {
            **{"max_position_embeddings": 131_072, "sliding_window": 512},
            **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144},
        },
    ),
    _gemma4_family("gemma4_unified_text", "Gemma4UnifiedForCausalLM", {"max_position_embeddings": 262_144, "sliding_window": 1024}),
    Family(
        "vaultgemma", "VaultGemmaForCausalLM", _vaultgemma, _GEMMA2, {**LLAMA_NAMES, "mlp_norm": "pre_feedforward_layernorm"}, keys=_KEYS
    ),
)
