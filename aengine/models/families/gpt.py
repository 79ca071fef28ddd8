"""Families before Llama: GPT-2, GPT-NeoX (Pythia) and OPT, with LayerNorms, biases everywhere and a plain MLP."""

from __future__ import annotations

from torch import Tensor

from aengine.models.config_reader import ConfigReader
from aengine.models.families.base import Family, Transform, attention, decoder_spec, head_sizes, layer_norm, plain_mlp, rope_and_context
from aengine.models.spec import Attention, Layer, LearnedPositions, ModelSpec


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
    return Transform(shape[::-1], Tensor.t, transposed=True) if layer is not None and len(shape) > 1 else None


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


def _by_kind(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """GPT-NeoX stores the rows of query, key and value of each head together, one head after another."""
    if layer is None or not name.startswith("qkv."):
        return None
    assert isinstance(layer.attention, Attention)
    by_head = (layer.attention.num_heads, 3, layer.attention.head_dim)
    return Transform(shape, lambda tensor: tensor.view(*by_head, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape))


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
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_key_value_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
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
            "qkv": "attn.c_attn",
            "output": "attn.c_proj",
            "mlp_norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
        transform=_transposed,
        ignored=r".*\.attn\.(masked_)?bias",  # causal masks
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
        transform=_by_kind,
        ignored=r".*\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)",  # causal masks
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
)
