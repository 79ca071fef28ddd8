"""Families before Llama, with LayerNorms and a plain MLP. Bloom, MPT and Falcon: positions lower the scores of keys (ALiBi, Press et al.
2022); newer Falcons have a rope instead. And GPT-2, GPT-NeoX (Pythia), GPT-J, CodeGen, GPT-Neo and OPT, which have biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aengine.kernels.arrays import BFLOAT16, Array, cast
from aengine.kernels.params import Activation
from aengine.layers.rotary import RopeSpec, unscaled
from aengine.models.config.reader import ConfigReader
from aengine.models.families.family import (
    Family,
    Transform,
    attention,
    by_kv_head,
    decoder_spec,
    halves,
    head_sizes,
    layer_norm,
    neighbours_to_halves,
    plain_mlp,
    rope_and_context,
)
from aengine.models.spec import Attention, Layer, LearnedPositions, Mlp, ModelSpec, Norm, NormKind

_CODEGEN_BLOCKS = 4  # of the accelerator that its first code ran on


def _gpt2(reader: ConfigReader) -> ModelSpec:
    reader.refuse(add_cross_attention=False)
    norm = layer_norm(reader)
    mlp = plain_mlp(reader, bias=True, size=reader.positive("intermediate_size", 4 * reader.positive("hidden_size")))
    scale = head_sizes(reader)[2] ** -0.5 if reader.flag("scale_attn_weights") else 1.0
    by_layer = reader.flag("scale_attn_by_inverse_layer_idx")
    layers = [
        Layer(
            attention=attention(reader, None, scale=scale / (index + 1) if by_layer else scale, qkv_bias=True, output_bias=True),
            mlp=mlp,
            attention_norm=norm,
            mlp_norm=norm,
        )
        for index in range(reader.positive("num_hidden_layers"))
    ]
    positions = LearnedPositions(reader.positive("max_position_embeddings"))
    return decoder_spec(reader, layers, norm=norm, learned_positions=positions)


def _transposed(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """GPT-2 stores the matrices of its layers as [in_features, out_features]."""
    return Transform(shape[::-1], np.transpose, transposed=True) if layer is not None and len(shape) > 1 else None


def _gpt_neox(reader: ConfigReader) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2], partial=True)
    norm, bias = layer_norm(reader), reader.flag("attention_bias")
    layer = Layer(
        attention=attention(reader, rope, qkv_bias=bias, output_bias=bias),
        mlp=plain_mlp(reader, bias=True),
        attention_norm=norm,
        mlp_norm=norm,
        parallel=reader.flag("use_parallel_residual"),
    )
    layers = [layer] * reader.positive("num_hidden_layers")
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context)


def _gptj(reader: ConfigReader) -> ModelSpec:
    head_dim, rotary_dim = head_sizes(reader)[2], reader.positive("rotary_dim")
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise reader.unusable("rotary_dim", rotary_dim, f"an even number up to the width of a head, {head_dim}")
    norm = layer_norm(reader)
    layer = Layer(
        attention=attention(reader, RopeSpec.of(unscaled(rotary_dim, 10000.0))),
        mlp=plain_mlp(reader, bias=True, size=reader.positive("intermediate_size", 4 * reader.positive("hidden_size"))),
        attention_norm=norm,
        mlp_norm=None,
        parallel=True,
    )
    return decoder_spec(reader, [layer] * reader.positive("num_hidden_layers"), norm=norm, head_bias=True)


def _codegen(reader: ConfigReader) -> ModelSpec:
    if (num_heads := reader.positive("num_attention_heads")) % _CODEGEN_BLOCKS:
        raise reader.unusable("num_attention_heads", num_heads, f"a multiple of {_CODEGEN_BLOCKS}")
    return _gptj(reader)


def _from_blocks(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """CodeGen stores the rows of queries, values and keys of a quarter of the heads together, one quarter after another."""
    if layer is None or not name.startswith("qkv."):
        return None
    assert isinstance(layer.attention, Attention)
    order = neighbours_to_halves(layer.attention)
    head_dim = layer.attention.head_dim

    def apply(tensor: Array) -> Array:
        rows = tensor.reshape(_CODEGEN_BLOCKS, 3, -1, head_dim, *tensor.shape[1:]).swapaxes(0, 1)
        query, value, key = (kind.reshape(-1, head_dim, *tensor.shape[1:]) for kind in rows)
        return np.concatenate((query[:, order], key[:, order], value)).reshape(tensor.shape)

    return Transform(shape, apply)


def _gpt_neo(reader: ConfigReader) -> ModelSpec:
    norm, window = layer_norm(reader), reader.positive("window_size")
    mlp = plain_mlp(reader, bias=True, size=reader.positive("intermediate_size", 4 * reader.positive("hidden_size")))
    windows = (window if kind == "local" else None for kind in _attention_kinds(reader))
    layers = [Layer(attention(reader, None, scale=1.0, window=each, output_bias=True), mlp, norm, norm) for each in windows]
    positions = LearnedPositions(reader.positive("max_position_embeddings"))
    return decoder_spec(reader, layers, norm=norm, learned_positions=positions)


def _attention_kinds(reader: ConfigReader) -> list[str]:
    """By layer, of GPT-Neo's lists of kinds and how often each list is repeated."""
    num_layers, given = reader.positive("num_hidden_layers"), reader.get("attention_types")
    kinds: list[Any] = []
    for item in given if isinstance(given, list | tuple) else [None]:
        match item:
            case [list() | tuple() as repeated, int(count)] if count <= num_layers:
                kinds += [*repeated] * count
            case _:
                kinds.append(None)
    if len(kinds) != num_layers or not all(kind in ("global", "local") for kind in kinds):
        needed = f"a list of pairs of kinds, global or local, and how often they are repeated, for {num_layers} layers"
        raise reader.unusable("attention_types", given, needed)
    return kinds


def _opt(reader: ConfigReader) -> ModelSpec:
    reader.refuse(
        do_layer_norm_before=True,
        word_embed_proj_dim=reader.positive("hidden_size"),
        layer_norm_elementwise_affine=True,
        _remove_final_layer_norm=False,
    )
    norm, bias = layer_norm(reader), reader.flag("enable_bias")
    layer = Layer(
        attention=attention(reader, None, qkv_bias=bias, output_bias=bias),
        mlp=plain_mlp(reader, bias=bias),
        attention_norm=norm,
        mlp_norm=norm,
    )
    positions = LearnedPositions(reader.positive("max_position_embeddings"), offset=2)
    layers = [layer] * reader.positive("num_hidden_layers")
    return decoder_spec(reader, layers, norm=norm, learned_positions=positions)


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
        slopes = tuple((cast(np.array(slopes_of(num_heads), np.float32), BFLOAT16).astype(np.float64) * head_dim**-0.5).tolist())
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


_GPT_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}
_GPTJ_DEFAULTS = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "rotary_dim": 64, "n_positions": 2048}
_GPTJ_NAMES = {
    "embedding": "transformer.wte",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "layer": "transformer.h.{layer}",
    "attention_norm": "ln_1",
    "qkv": "attn.q_proj attn.k_proj attn.v_proj",
    "output": "attn.out_proj",
    "up": "mlp.fc_in",
    "down": "mlp.fc_out",
}
_MASKS = r".*\.attn\.(attention\.)?(masked_bias|bias|causal_mask)"
FAMILIES = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        _gpt2,
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
        },
        keys=_GPT_KEYS,
        names={
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
            "layer": "transformer.h.{layer}",
            "attention_norm": "ln_1",
            "qkv": "attn.c_attn",
            "output": "attn.c_proj",
            "mlp_norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
        transform=_transposed,
        ignored=_MASKS,
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _gpt_neox,
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
            "attention_bias": True,
            "max_position_embeddings": 2048,
        },
        keys={
            "num_key_value_heads": "num_attention_heads",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        names={
            "embedding": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "head": "lm_head",
            "layer": "gpt_neox.layers.{layer}",
            "attention_norm": "input_layernorm",
            "qkv": "attention.query_key_value",
            "output": "attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
        other_names={"embed_out.": "lm_head."},
        transform=by_kv_head,
        ignored=r".*\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)",  # causal masks
    ),
    Family("gptj", "GPTJForCausalLM", _gptj, _GPTJ_DEFAULTS, _GPTJ_NAMES, halves, _MASKS, _GPT_KEYS),
    Family(
        "codegen",
        "CodeGenForCausalLM",
        _codegen,
        _GPTJ_DEFAULTS,
        {**_GPTJ_NAMES, "qkv": "attn.qkv_proj"},
        _from_blocks,
        _MASKS,
        _GPT_KEYS,
    ),
    Family(
        "gpt_neo",
        "GPTNeoForCausalLM",
        _gpt_neo,
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "attention_types": [[["global", "local"], 12]],
            "window_size": 256,
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
        },
        keys={
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "num_key_value_heads": "num_heads",
            "hidden_act": "activation_function",
            "layer_norm_eps": "layer_norm_epsilon",
        },
        names={
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
            "layer": "transformer.h.{layer}",
            "attention_norm": "ln_1",
            "qkv": "attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj",
            "output": "attn.attention.out_proj",
            "mlp_norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
        ignored=_MASKS,
    ),
    Family(
        "opt",
        "OPTForCausalLM",
        _opt,
        defaults={
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
        },
        keys={
            "num_key_value_heads": "num_attention_heads",
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
            "initializer_range": "init_std",
        },
        names={
            "embedding": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "norm": "model.decoder.final_layer_norm",
            "head": "lm_head",
            "layer": "model.decoder.layers.{layer}",
            "attention_norm": "self_attn_layer_norm",
            "qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            "output": "self_attn.out_proj",
            "mlp_norm": "final_layer_norm",
            "up": "fc1",
            "down": "fc2",
        },
    ),
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
