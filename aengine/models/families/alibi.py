"""Bloom, MPT and Falcon: positions lower the scores of keys (ALiBi, Press et al. 2022); newer Falcons have a rope instead."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aengine.kernels.layer_params import Activation
from aengine.models.config.reader import ConfigReader
from aengine.models.families.family import (
    Family,
    attention,
    by_kv_head,
    decoder_spec,
    head_sizes,
    layer_norm,
    plain_mlp,
    rope_and_context,
)
from aengine.models.spec import Layer, Mlp, ModelSpec, Norm, NormKind


def slopes_of(num_heads: int) -> tuple[float, ...]:
    """Return the ALiBi slope of each head. For n heads, a power of 2, they are 2^(-8 / n), 2^(-16 / n), ... to 2^-8; for another number
    the slopes of the power below it, then those of the power above it that lie between these."""
    power = 1 << (num_heads.bit_length() - 1)
    own = [2.0 ** (-8 * index / power) for index in range(1, power + 1)]
    between = [2.0 ** (-4 * index / power) for index in range(1, 2 * power, 2)]
    return tuple([*own, *between][:num_heads])


def _bloom(reader: ConfigReader) -> ModelSpec:
    reader.refuse(apply_residual_connection_post_layernorm=False, slow_but_exact=False)
    norm, slopes = layer_norm(reader), slopes_of(head_sizes(reader)[0])
    layer = Layer(
        attention=attention(reader, None, slopes=slopes, qkv_bias=True, output_bias=True),
        mlp=Mlp(4 * reader.positive("hidden_size"), Activation.GELU_TANH, gated=False, up_bias=True, down_bias=True),
        attention_norm=norm,
        mlp_norm=norm,
    )
    return decoder_spec(reader, [layer] * reader.positive("num_hidden_layers"), norm=norm, embedding_norm=norm)


def _mpt(reader: ConfigReader) -> ModelSpec:
    """The code of transformers ignores most of what is refused here."""
    reader.refuse(expansion_ratio=4, no_bias=True, logit_scale=None)
    if reader.get("norm_type") != "layernorm":  # another name of the same
        reader.refuse(norm_type="low_precision_layernorm")
    own = reader.part("attn_config")
    own.refuse(attn_type="multihead_attention", alibi=True, alibi_bias_max=8, clip_qkv=None, qk_ln=False)
    own.refuse(prefix_lm=False, attn_uses_sequence_id=False)
    num_heads, _, head_dim = head_sizes(reader)
    norm, scale = Norm(NormKind.LAYER, reader.number("layer_norm_eps")), own.positive_number("softmax_scale", head_dim**-0.5)
    layer = Layer(
        attention=attention(reader, None, scale=scale, slopes=slopes_of(num_heads)),
        mlp=Mlp(4 * reader.positive("hidden_size"), Activation.GELU, gated=False),
        attention_norm=norm,
        mlp_norm=norm,
    )
    return decoder_spec(reader, [layer] * reader.positive("num_hidden_layers"), norm=norm)


def _falcon(reader: ConfigReader) -> ModelSpec:
    num_heads, num_kv_heads, head_dim = head_sizes(reader)
    is_new, parallel, bias = reader.flag("new_decoder_architecture"), reader.flag("parallel_attn"), reader.flag("bias")
    most_norms = 2 if is_new else 1
    num_norms = reader.positive("num_ln_in_parallel_attn", most_norms)
    if num_norms > most_norms:
        raise reader.unusable("num_ln_in_parallel_attn", num_norms, f"in [1, {most_norms}]")
    if is_new:
        reader.refuse(parallel_attn=True)
    else:
        num_kv_heads = 1 if reader.flag("multi_query") else num_heads
    if reader.flag("alibi"):
        rope, context = None, reader.positive("max_position_embeddings")
        # Biases are scaled as scores are. The slopes were bfloat16 in training.
        slopes = tuple((torch.tensor(slopes_of(num_heads)).bfloat16().double() * head_dim**-0.5).tolist())
    else:
        (rope, context), slopes = rope_and_context(reader, head_dim), ()
    norm = layer_norm(reader)
    layer = Layer(
        attention=attention(reader, rope, num_kv_heads=num_kv_heads, slopes=slopes, qkv_bias=bias, output_bias=bias),
        mlp=plain_mlp(reader, bias=bias, size=reader.positive("intermediate_size", 4 * reader.positive("hidden_size"))),
        attention_norm=norm,
        mlp_norm=None if parallel and num_norms == 1 else norm,
        parallel=parallel,
    )
    layers = [layer] * reader.positive("num_hidden_layers")
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context)


def _falcon_names(layer: Layer) -> Mapping[str, str]:
    return {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"} if layer.parallel and layer.mlp_norm is not None else {}


_BLOOM_NAMES = {
    "embedding": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "layer": "transformer.h.{layer}",
    "attention_norm": "input_layernorm",
    "qkv": "self_attention.query_key_value",
    "output": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
FAMILIES = (
    Family(
        "bloom",
        "BloomForCausalLM",
        _bloom,
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "seq_length": 2048},
        keys={
            "hidden_size": "hidden_size n_embed",
            "num_hidden_layers": "n_layer num_hidden_layers",
            "num_attention_heads": "n_head num_attention_heads",
            "num_key_value_heads": "n_head num_attention_heads",
            "max_position_embeddings": "seq_length",
            "layer_norm_eps": "layer_norm_epsilon",
        },
        names=_BLOOM_NAMES,
        transform=by_kv_head,
    ),
    Family(
        "mpt",
        "MptForCausalLM",
        _mpt,
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "max_seq_len": 2048},
        keys={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "layer_norm_eps": "layer_norm_epsilon",
        },
        names={
            "embedding": "transformer.wte",
            "norm": "transformer.norm_f",
            "head": "lm_head",
            "layer": "transformer.blocks.{layer}",
            "attention_norm": "norm_1",
            "qkv": "attn.Wqkv",
            "output": "attn.out_proj",
            "mlp_norm": "norm_2",
            "up": "ffn.up_proj",
            "down": "ffn.down_proj",
        },
    ),
    Family(
        "falcon",
        "FalconForCausalLM",
        _falcon,
        defaults={
            "activation": "gelu",
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
            "parallel_attn": True,
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
        },
        keys={
            "hidden_size": "hidden_size n_embed",
            "num_key_value_heads": "num_kv_heads",
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
            "layer_norm_eps": "layer_norm_epsilon",
        },
        names=_BLOOM_NAMES,
        transform=by_kv_head,
        ignored=r".*\.(rotary_emb|maybe_rotary)\.inv_freq",
        layer_names=_falcon_names,
    ),
)
