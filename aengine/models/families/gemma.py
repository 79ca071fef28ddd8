"""Gemma: as Llama, with norms of 1 + weight and a scaled embedding. Gemma 2 and 3: norms before and after each block, and windows in most
layers, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aengine.layers.rotary import RopeSpec
from aengine.models.config.reader import ConfigReader
from aengine.models.config.rope import read_ropes
from aengine.models.families.family import (
    LLAMA_NAMES,
    Family,
    attention,
    decoder_spec,
    gated_mlp,
    head_sizes,
    layer_kinds,
    rms_norm,
    rope_and_context,
    window_of,
)
from aengine.models.spec import Layer, ModelSpec, QkNorm

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
    return decoder_spec(
        reader,
        layers,
        norm=norm,
        max_position_embeddings=context,
        embedding_scale=reader.positive("hidden_size") ** 0.5,
        logit_soft_cap=reader.number("final_logit_softcapping", 0.0),
    )


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
    older = {
        "sliding_attention": {"rope_theta": reader.get("rope_local_base_freq", 1e4)},
        "full_attention": {"rope_theta": reader.get("rope_theta", 1e6), "rope_scaling": reader.get("rope_scaling")},
    }
    ropes, context = read_ropes(reader, head_sizes(reader)[2], older)
    kinds = layer_kinds(reader, reader.positive("sliding_window_pattern", 6))
    return _spec(reader, kinds, ropes, context, qk_norm=True)


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
        "vaultgemma", "VaultGemmaForCausalLM", _vaultgemma, _GEMMA2, {**LLAMA_NAMES, "mlp_norm": "pre_feedforward_layernorm"}, keys=_KEYS
    ),
)
