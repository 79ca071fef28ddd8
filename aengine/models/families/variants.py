"""StarCoder 2, StableLM, Phi 1 and 2, and Nemotron: as Llama, with LayerNorms.

Dense decoders that differ from Llama in a few blocks: Ministral, SmolLM3, Phi-3 and 4, GLM-4, OLMo 2 and 3, Cohere and Cohere 2, Seed-OSS,
AFM, ERNIE 4.5 and EXAONE 4."""

from __future__ import annotations

from typing import Any

from aengine.models.config.reader import ConfigReader
from aengine.models.config.rope import read_ropes
from aengine.models.families.family import (
    LLAMA_NAMES,
    Family,
    attention,
    decoder_spec,
    gated_mlp,
    halves,
    head_sizes,
    layer_kinds,
    layer_norm,
    part_sizes,
    plain_mlp,
    rms_norm,
    rope_and_context,
    window_of,
)
from aengine.models.families.llama import no_rope_layers, uniform_windows
from aengine.models.spec import Attention, Layer, ModelSpec, Norm, NormKind, QkNorm


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


def _phi(reader: ConfigReader) -> ModelSpec:
    """Attention and MLP are parallel, and all products have biases."""
    reader.refuse(qk_layernorm=False)
    rope, context = rope_and_context(reader, head_sizes(reader)[2], partial=True)
    norm = layer_norm(reader)
    attended = attention(reader, rope, qkv_bias=True, output_bias=True)
    layer = Layer(attended, plain_mlp(reader, bias=True), attention_norm=norm, mlp_norm=None, parallel=True)
    layers = [layer] * reader.positive("num_hidden_layers")
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context, head_bias=True)


def _nemotron(reader: ConfigReader) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2], partial=True)
    norm, bias = Norm(NormKind.LAYER, reader.number("norm_eps"), bias=True, unit_offset=True), reader.flag("attention_bias")
    attended, mlp = attention(reader, rope, qkv_bias=bias, output_bias=bias), plain_mlp(reader, bias=reader.flag("mlp_bias"))
    layers = [Layer(attended, mlp, norm, norm)] * reader.positive("num_hidden_layers")
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context)


_LAYER_NORM_FAMILIES = (
    Family(
        "phi",
        "PhiForCausalLM",
        _phi,
        {"hidden_act": "gelu_new", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        {
            **LLAMA_NAMES,
            "norm": "model.final_layernorm",
            "output": "self_attn.dense",
            "up": "mlp.fc1",
            "down": "mlp.fc2",
        },
    ),
    Family(
        "nemotron",
        "NemotronForCausalLM",
        _nemotron,
        {"hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5}
        | {"initializer_range": 0.0134},
    ),
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


def _ministral(reader: ConfigReader) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, mlp = rms_norm(reader), gated_mlp(reader)
    kinds = layer_kinds(reader, full_every=1 if reader.get("sliding_window") is None else None)
    layers = [Layer(attention(reader, rope, window=window_of(reader, kind)), mlp, norm, norm) for kind in kinds]
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _smollm3(reader: ConfigReader) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, bias, num_layers = rms_norm(reader), reader.flag("attention_bias"), reader.positive("num_hidden_layers")
    rotated = no_rope_layers(reader)
    slides = reader.flag("use_sliding_window") and reader.get("sliding_window") is not None
    default = ["sliding_attention" if slides and not one else "full_attention" for one in rotated]
    kinds = reader.layer_types(num_layers) or default
    layers = [
        Layer(
            attention(reader, rope if one else None, window=window_of(reader, kind), qkv_bias=bias, output_bias=bias),
            gated_mlp(reader, bias=reader.flag("mlp_bias")),
            norm,
            norm,
        )
        for one, kind in zip(rotated, kinds, strict=True)
    ]
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _phi3(reader: ConfigReader) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2], partial=True)
    norm, mlp = rms_norm(reader), gated_mlp(reader)
    windows = uniform_windows(reader, reader.positive_or_none("sliding_window"))
    layers = [Layer(attention(reader, rope, window=window), mlp, norm, norm) for window in windows]
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _glm(reader: ConfigReader, *, post_norms: bool = False) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2], partial=True)
    norm = rms_norm(reader)
    post_norm = norm if post_norms else None
    layer = Layer(
        attention=attention(reader, rope, qkv_bias=reader.flag("attention_bias")),
        mlp=gated_mlp(reader),
        attention_norm=norm,
        post_attention_norm=post_norm,
        mlp_norm=norm,
        post_mlp_norm=post_norm,
    )
    layers = [layer] * reader.positive("num_hidden_layers")
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _glm4(reader: ConfigReader) -> ModelSpec:
    return _glm(reader, post_norms=True)


def _glm4v(reader: ConfigReader) -> ModelSpec:
    reader.refuse(attention_bias=True, head_dim=None)  # transformers has no effect of them
    return _glm4(reader)


def _olmo2(reader: ConfigReader) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    layers = [_olmo_layer(reader, rope=rope)] * reader.positive("num_hidden_layers")
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _olmo3(reader: ConfigReader) -> ModelSpec:
    theta = 500_000.0
    older = {
        "sliding_attention": {"rope_theta": theta},  # in transformers, the config's rope_theta is that of full attention alone
        "full_attention": {"rope_theta": reader.get("rope_theta", theta), "rope_scaling": reader.get("rope_scaling")},
    }
    ropes, context = read_ropes(reader, head_sizes(reader)[2], older)
    layers = [_olmo_layer(reader, rope=ropes[kind], window=window_of(reader, kind)) for kind in layer_kinds(reader, full_every=4)]
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _olmo_layer(reader: ConfigReader, **changes: Any) -> Layer:
    """Norms stand behind the blocks, and before the rope over all heads together."""
    norm, bias = rms_norm(reader), reader.flag("attention_bias")
    return Layer(
        attention=attention(reader, **changes, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm(norm, whole=True)),
        mlp=gated_mlp(reader),
        attention_norm=None,
        post_attention_norm=norm,
        mlp_norm=None,
        post_mlp_norm=norm,
    )


def _cohere(reader: ConfigReader) -> ModelSpec:
    reader.refuse(use_qk_norm=False)
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, bias = Norm(NormKind.LAYER, reader.number("layer_norm_eps")), reader.flag("attention_bias")
    attended = attention(reader, rope, qkv_bias=bias, output_bias=bias)
    layers = [Layer(attended, gated_mlp(reader), norm, None, parallel=True)] * reader.positive("num_hidden_layers")
    scale = reader.number("logit_scale")
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context, logit_scale=scale)


def _cohere2(reader: ConfigReader) -> ModelSpec:
    """Attention and MLP are parallel; layers without a window have no rope."""
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, mlp, bias = Norm(NormKind.LAYER, reader.number("layer_norm_eps")), gated_mlp(reader), reader.flag("attention_bias")
    layers = [
        Layer(
            attention=attention(reader, rope if window else None, window=window, qkv_bias=bias, output_bias=bias),
            mlp=mlp,
            attention_norm=norm,
            mlp_norm=None,
            parallel=True,
        )
        for window in (window_of(reader, kind) for kind in layer_kinds(reader, reader.positive("sliding_window_pattern", 4)))
    ]
    scale = reader.number("logit_scale")
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context, logit_scale=scale)


def _llama_with_biases(reader: ConfigReader, *, output: str, mlp: str, gated: bool = True) -> ModelSpec:
    """Llama with biases; `output` and `mlp` are the keys of whether these have some, beside `attention_bias`."""
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, bias = rms_norm(reader), reader.flag(mlp)
    layer = Layer(
        attention=attention(reader, rope, qkv_bias=reader.flag("attention_bias"), output_bias=reader.flag(output)),
        mlp=gated_mlp(reader, bias=bias) if gated else plain_mlp(reader, bias=bias),
        attention_norm=norm,
        mlp_norm=norm,
    )
    return decoder_spec(reader, [layer] * reader.positive("num_hidden_layers"), max_position_embeddings=context)


def _seed_oss(reader: ConfigReader) -> ModelSpec:
    return _llama_with_biases(reader, output="attention_out_bias", mlp="mlp_bias")


def _arcee(reader: ConfigReader) -> ModelSpec:
    return _llama_with_biases(reader, output="attention_bias", mlp="mlp_bias", gated=False)


def _ernie4_5(reader: ConfigReader) -> ModelSpec:
    return _llama_with_biases(reader, output="attention_bias", mlp="attention_bias")


def exaone_attention(reader: ConfigReader) -> tuple[list[Attention], int]:
    """Return the attention of each layer of EXAONE 4, and the longest context. Where some layers have windows, the others have no rope."""
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    pattern, slides = reader.get("sliding_window_pattern"), reader.get("sliding_window") is not None
    full_every = len(pattern) if isinstance(pattern, str) else reader.positive_or_none("sliding_window_pattern")  # or "LLLG"
    kinds = layer_kinds(reader, full_every) if slides else ["full_attention"] * reader.positive("num_hidden_layers")
    qk_norm = QkNorm(rms_norm(reader))
    windows = [window_of(reader, kind) for kind in kinds]
    rotated = [rope if window or not slides else None for window in windows]
    return [attention(reader, one, window=window, qk_norm=qk_norm) for one, window in zip(rotated, windows, strict=True)], context


def _exaone4(reader: ConfigReader) -> ModelSpec:
    norm, mlp = rms_norm(reader), gated_mlp(reader)
    attentions, context = exaone_attention(reader)
    layers = [Layer(one, mlp, attention_norm=None, mlp_norm=None, post_attention_norm=norm, post_mlp_norm=norm) for one in attentions]
    return decoder_spec(reader, layers, max_position_embeddings=context)


_OLMO = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_OLMO_NAMES = {**LLAMA_NAMES, "post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
_GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_GLM_NAMES = {**LLAMA_NAMES, "gate_up": "mlp.gate_up_proj"}
_GLM4_NAMES = {**_GLM_NAMES, "post_attention_norm": "post_self_attn_layernorm", "post_mlp_norm": "post_mlp_layernorm"}
FAMILIES = (
    *_LAYER_NORM_FAMILIES,
    Family(
        "ministral",
        "MinistralForCausalLM",
        _ministral,
        {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        _smollm3,
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        _phi3,
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        {**LLAMA_NAMES, "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
    ),
    Family("glm", "GlmForCausalLM", _glm, _GLM, _GLM_NAMES, halves),
    Family(
        "glm4",
        "Glm4ForCausalLM",
        _glm4,
        _GLM,
        _GLM4_NAMES,
        halves,
    ),
    Family(  # the text part of GLM-4.1V and GLM-4.6V
        "glm4v_text",
        "",
        _glm4v,
        {"num_key_value_heads": 2, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "attention_bias": True},
        _GLM4_NAMES,
        halves,
        part_defaults=part_sizes(151_552, 4096, 13_696, 40, 32),
    ),
    Family("olmo2", "Olmo2ForCausalLM", _olmo2, _OLMO, _OLMO_NAMES),
    Family("olmo3", "Olmo3ForCausalLM", _olmo3, {**_OLMO, "sliding_window": 4096}, _OLMO_NAMES),
    Family(
        "cohere",
        "CohereForCausalLM",
        _cohere,
        {"max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 5e5} | {"tie_word_embeddings": True},
        transform=halves,
    ),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        _cohere2,
        {
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        transform=halves,
        part_defaults=part_sizes(256_000, 8192, 22_528, 40, 64),
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        _seed_oss,
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288, "attention_bias": True},
    ),
    Family("arcee", "ArceeForCausalLM", _arcee, {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        _ernie4_5,
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        transform=halves,
        keys={"attention_bias": "use_bias"},
    ),
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        _exaone4,
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        _OLMO_NAMES,
    ),
)
