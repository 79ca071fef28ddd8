"""StarCoder 2 and StableLM: as Llama, with LayerNorms."""

from __future__ import annotations

from aengine.models.config.reader import ConfigReader
from aengine.models.families.base import (
    LLAMA_NAMES,
    Family,
    attention,
    decoder_spec,
    gated_mlp,
    head_sizes,
    layer_norm,
    plain_mlp,
    rope_and_context,
)
from aengine.models.families.llama import uniform_windows
from aengine.models.spec import Layer, ModelSpec, Norm, NormKind, QkNorm


def _starcoder2(reader: ConfigReader) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, bias = layer_norm(reader), reader.flag("use_bias")
    layers = [
        Layer(
            attention=attention(reader, rope, window=window, qkv_bias=bias, output_bias=bias),
            mlp=plain_mlp(reader, bias=bias),
            attention_norm=norm,
            mlp_norm=norm,
        )
        for window in uniform_windows(reader, reader.positive_or_none("sliding_window"))
    ]
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context)


def _stablelm(reader: ConfigReader) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2], partial=True)
    norm, parallel = layer_norm(reader), reader.flag("use_parallel_residual")
    qk_norm = QkNorm(Norm(NormKind.LAYER, norm.eps), head_weights=True) if reader.flag("qk_layernorm") else None
    layer = Layer(
        attention=attention(reader, rope, qkv_bias=reader.flag("use_qkv_bias"), qk_norm=qk_norm),
        mlp=gated_mlp(reader),
        attention_norm=norm,
        mlp_norm=None if parallel else norm,
        parallel=parallel,
    )
    layers = [layer] * reader.positive("num_hidden_layers")
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context)


FAMILIES = (
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        _starcoder2,
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "initializer_range": 0.018042,
            "tie_word_embeddings": True,
        },
        keys={"layer_norm_eps": "norm_epsilon"},
        names={**LLAMA_NAMES, "up": "mlp.c_fc", "down": "mlp.c_proj"},
    ),
    Family(
        "stablelm",
        "StableLmForCausalLM",
        _stablelm,
        defaults={
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
        },
        names={
            **LLAMA_NAMES,
            "q_norm": "self_attn.q_layernorm.norms.{index}",
            "k_norm": "self_attn.k_layernorm.norms.{index}",
        },
    ),
)
