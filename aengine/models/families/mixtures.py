"""Mixtures of experts with grouped-query attention: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GPT-OSS, GLM-4.5-MoE, MiniMax-M2, dots.llm1,
Solar Open, EXAONE-MoE and ERNIE 4.5 MoE."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aengine.kernels.params import Activation, RouterScoring
from aengine.models.config.reader import ConfigReader, NotNativeError
from aengine.models.families.family import (
    LLAMA_NAMES,
    MTP_NAMES,
    Family,
    Transform,
    attention,
    decoder_spec,
    experts,
    gated_mlp,
    halves,
    head_sizes,
    part_sizes,
    rms_norm,
    rope_and_context,
    routing,
    transposed_experts,
    window_of,
)
from aengine.models.families.llama import late_windows, uniform_windows
from aengine.models.families.variants import exaone_attention
from aengine.models.spec import Experts, Layer, Mlp, ModelSpec, QkNorm

QWEN_NAMES = {
    **LLAMA_NAMES,
    "router": "mlp.gate",
    "router_correction": "mlp.gate.e_score_correction_bias",
    "experts.gate_up": "mlp.experts.{index}.gate_proj mlp.experts.{index}.up_proj",
    "experts.down": "mlp.experts.{index}.down_proj",
    "shared.gate_up": "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
    "shared.down": "mlp.shared_expert.down_proj",
    "shared_gate": "mlp.shared_expert_gate",
}
DEEPSEEK_NAMES = {
    **QWEN_NAMES,
    "shared.gate_up": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
}
MIXTRAL_NAMES = {
    **LLAMA_NAMES,
    "router": "block_sparse_moe.gate",
    "experts.gate_up": "block_sparse_moe.experts.{index}.w1 block_sparse_moe.experts.{index}.w3",
    "experts.down": "block_sparse_moe.experts.{index}.w2",
}
_GPT_OSS_NAMES = {
    **LLAMA_NAMES,
    "sinks": "self_attn.sinks",
    "router": "mlp.router",
    "experts.gate_up.weight": "mlp.experts.gate_up_proj",
    "experts.gate_up.bias": "mlp.experts.gate_up_proj_bias",
    "experts.down.weight": "mlp.experts.down_proj",
    "experts.down.bias": "mlp.experts.down_proj_bias",
}


def sigmoid_experts(reader: ConfigReader) -> Experts:
    """The experts of DeepSeek-V3 and GLM-4.5: sigmoid scores with a correction; a group's score is the sum of its two highest."""
    reader.refuse(scoring_func="sigmoid", topk_method="noaux_tc")
    how = routing(
        reader,
        scoring=RouterScoring.SIGMOID,
        normalize=reader.flag("norm_topk_prob"),
        scaling=reader.number("routed_scaling_factor"),
        num_groups=reader.positive("n_group"),
        top_groups=reader.positive("topk_group"),
        group_top=2,
    )
    return experts(reader, how, correction=True, shared=shared_experts(reader))


def shared_experts(reader: ConfigReader) -> Mlp | None:
    """The experts that all tokens share, as one block."""
    count = reader.positive_or_none("n_shared_experts")
    return None if count is None else Mlp(count * reader.positive("moe_intermediate_size"), reader.activation())


def dense_layers(reader: ConfigReader) -> list[bool]:
    """Which layers have no experts: the first `first_k_dense_replace`."""
    reader.refuse(moe_layer_freq=1)
    count = reader.count("first_k_dense_replace", 0)
    return [layer < count for layer in range(reader.positive("num_hidden_layers"))]


def listed_dense_layers(reader: ConfigReader) -> list[bool]:
    """Return which layers have no experts: by `mlp_layer_types`, or as `dense_layers` says."""
    kinds = reader.layer_types(reader.positive("num_hidden_layers"), ("dense", "sparse"), "mlp_layer_types")
    return dense_layers(reader) if kinds is None else [kind == "dense" for kind in kinds]


def qwen_dense_layers(reader: ConfigReader) -> list[bool]:
    """Return for each layer whether it has a dense MLP: those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    step, listed = reader.positive("decoder_sparse_step", 1), reader.integers("mlp_only_layers", ())
    return [layer in listed or (layer + 1) % step > 0 for layer in range(reader.positive("num_hidden_layers"))]


def _spec(
    reader: ConfigReader,
    block: Experts,
    *,
    dense: Sequence[bool] = (),
    windows: Sequence[int | None] = (),
    partial: bool = False,
    **attention_fields: Any,
) -> ModelSpec:
    """Layers that differ in their windows, and in whether they have experts. `partial`: see `rope_and_context`."""
    rope, context = rope_and_context(reader, head_sizes(reader)[2], partial=partial)
    norm, num_layers = rms_norm(reader), reader.positive("num_hidden_layers")
    mlp = gated_mlp(reader) if any(dense) else None
    layers = [
        Layer(
            attention=attention(reader, rope, window=window, **attention_fields),
            mlp=mlp if mlp is not None and is_dense else block,
            attention_norm=norm,
            mlp_norm=norm,
        )
        for window, is_dense in zip(windows or [None] * num_layers, dense or [False] * num_layers, strict=True)
    ]
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _mixtral(reader: ConfigReader) -> ModelSpec:
    window = reader.positive_or_none("sliding_window")
    block = experts(reader, routing(reader), size="intermediate_size")
    return _spec(reader, block, windows=uniform_windows(reader, window))


def _qwen2_moe(reader: ConfigReader) -> ModelSpec:
    num_layers = reader.positive("num_hidden_layers")
    window = reader.positive_or_none("sliding_window") if reader.flag("use_sliding_window") else None
    kinds = reader.layer_types(num_layers)
    if kinds is None:  # of the first max_window_layers, every second
        windowed = [window is not None and layer % 2 == 0 and layer < reader.count("max_window_layers", 28) for layer in range(num_layers)]
    else:
        windowed = [kind == "sliding_attention" for kind in kinds]
    block = experts(
        reader,
        routing(reader, normalize=reader.flag("norm_topk_prob")),
        shared=gated_mlp(reader, size="shared_expert_intermediate_size"),
        shared_gate=True,
    )
    windows = [window if is_windowed else None for is_windowed in windowed]
    bias = reader.flag("qkv_bias", True)
    return _spec(reader, block, dense=qwen_dense_layers(reader), windows=windows, qkv_bias=bias)


def _qwen3_moe(reader: ConfigReader) -> ModelSpec:
    window = reader.positive_or_none("sliding_window") if reader.flag("use_sliding_window") else None
    block = experts(reader, routing(reader, normalize=reader.flag("norm_topk_prob")))
    bias = reader.flag("attention_bias")
    return _spec(
        reader,
        block,
        dense=qwen_dense_layers(reader),
        windows=uniform_windows(reader, window),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QkNorm(rms_norm(reader)),
    )


def _olmoe(reader: ConfigReader) -> ModelSpec:
    if reader.get("clip_qkv") is not None:
        raise NotNativeError(f"clip_qkv {reader.get('clip_qkv')!r} in {reader.source.file} is not supported; supported is null")
    block = experts(reader, routing(reader, normalize=reader.flag("norm_topk_prob")), size="intermediate_size")
    bias, norm = reader.flag("attention_bias"), QkNorm(rms_norm(reader), whole=True)
    return _spec(reader, block, qkv_bias=bias, output_bias=bias, qk_norm=norm)


def _gpt_oss(reader: ConfigReader) -> ModelSpec:
    reader.refuse(swiglu_alpha=1.702, swiglu_limit=7.0)
    num_layers = reader.positive("num_hidden_layers")
    kinds = reader.layer_types(num_layers) or ["sliding_attention", "full_attention"] * num_layers
    windows = [reader.positive("sliding_window") if kind == "sliding_attention" else None for kind in kinds[:num_layers]]
    mlp = Mlp(reader.positive("intermediate_size"), Activation.CLIPPED_SWIGLU, up_bias=True, down_bias=True)
    block = experts(reader, routing(reader), size="intermediate_size", expert=mlp, router_bias=True)
    bias = reader.flag("attention_bias")
    return _spec(reader, block, windows=windows, qkv_bias=bias, output_bias=bias, sinks=True)


def _qwen3_vl_moe(reader: ConfigReader) -> ModelSpec:
    reader.refuse(norm_topk_prob=True, use_sliding_window=False)  # transformers has no effect of them
    return _qwen3_moe(reader)


def _qwen3_omni_moe(reader: ConfigReader) -> ModelSpec:
    reader.refuse(sliding_window=None, use_sliding_window=False)
    return _qwen3_moe(reader)


def _glm4_moe(reader: ConfigReader) -> ModelSpec:
    qk_norm = QkNorm(rms_norm(reader)) if reader.flag("use_qk_norm") else None
    bias, block, dense = reader.flag("attention_bias"), sigmoid_experts(reader), dense_layers(reader)
    return _spec(reader, block, dense=dense, partial=True, qkv_bias=bias, qk_norm=qk_norm)


def _minimax_m2(reader: ConfigReader) -> ModelSpec:
    if reader.get("rotary_dim") is not None:
        factor = reader.positive("rotary_dim") / head_sizes(reader)[2]
        reader = replace(reader, config={"partial_rotary_factor": factor, **reader.config})
    block = experts(reader, routing(reader, scoring=RouterScoring.SIGMOID), size="intermediate_size", correction=True)
    return _spec(reader, block, partial=True, qk_norm=QkNorm(rms_norm(reader), whole=True))


def _dots1(reader: ConfigReader) -> ModelSpec:
    kinds = late_windows(reader, reader.positive_or_none("sliding_window"))
    return _spec(
        reader,
        sigmoid_experts(reader),
        dense=dense_layers(reader),
        windows=[window_of(reader, kind) for kind in kinds],
        qkv_bias=reader.flag("attention_bias"),
        output_bias=reader.flag("attention_bias"),
        qk_norm=QkNorm(rms_norm(reader)),
    )


def _solar_open(reader: ConfigReader) -> ModelSpec:
    return _spec(reader, sigmoid_experts(reader), partial=True, qkv_bias=reader.flag("attention_bias"))


def _exaone_moe(reader: ConfigReader) -> ModelSpec:
    attentions, context = exaone_attention(reader)
    dense = listed_dense_layers(reader)
    norm, block, mlp = rms_norm(reader), sigmoid_experts(reader), gated_mlp(reader)
    layers = [Layer(one, mlp if is_dense else block, norm, norm) for one, is_dense in zip(attentions, dense, strict=True)]
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _ernie4_5_moe(reader: ConfigReader) -> ModelSpec:
    reader.refuse(moe_norm_min=1e-12)
    num_layers, bias = reader.positive("num_hidden_layers"), reader.flag("use_bias")
    first, last, step = reader.count("moe_layer_start_index"), reader.get("moe_layer_end_index"), reader.positive("moe_layer_interval")
    if not isinstance(last, int) or not -1 <= last < num_layers:
        raise reader.unusable("moe_layer_end_index", last, f"-1 or an integer below {num_layers}")
    last = num_layers - 1 if last == -1 else last
    dense = [(layer + 1) % step > 0 or not first <= layer <= last for layer in range(num_layers)]
    size, shared = reader.positive("moe_intermediate_size"), reader.count("n_shared_experts")
    block = experts(
        reader,
        routing(reader),
        correction=True,
        expert=gated_mlp(reader, size="moe_intermediate_size"),
        shared=Mlp(shared * size, reader.activation(), up_bias=bias, down_bias=bias) if shared else None,
    )
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, mlp, attended = rms_norm(reader), gated_mlp(reader, bias=bias), attention(reader, rope, qkv_bias=bias, output_bias=bias)
    layers = [Layer(attended, mlp if is_dense else block, norm, norm) for is_dense in dense]
    return decoder_spec(reader, layers, max_position_embeddings=context, head_bias=bias)


def _ernie_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """ERNIE's rope pairs neighbours, and the correction of its router is the row of a matrix."""
    if name == "router_correction":
        return Transform((1, *shape), lambda tensor: tensor[0])
    return halves(spec, layer, name, part, shape)


_SIGMOID = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "rms_norm_eps": 1e-5}
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "rms_norm_eps": 1e-6}
_QWEN_VL = {"max_position_embeddings": 128_000, "rms_norm_eps": 1e-6, "norm_topk_prob": True}
FAMILIES = (
    Family(
        "mixtral",
        "MixtralForCausalLM",
        _mixtral,
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        MIXTRAL_NAMES,
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _qwen2_moe,
        {**_QWEN, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4},
        QWEN_NAMES,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _qwen3_moe,
        {**_QWEN, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
        QWEN_NAMES,
        part_defaults=part_sizes(151_936, 2048, 6144, 24, 32, moe_intermediate_size=768),
    ),
    # The text parts of Qwen3-VL and Qwen3-Omni.
    Family(
        "qwen3_vl_moe_text",
        "",
        _qwen3_vl_moe,
        {
            **_QWEN_VL,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        {**QWEN_NAMES, "experts.gate_up.weight": "mlp.experts.gate_up_proj", "experts.down.weight": "mlp.experts.down_proj"},
        functools.partial(transposed_experts, alternating=False),
        part_defaults=part_sizes(151_936, 2048, 5632, 24, 16, moe_intermediate_size=1408),
    ),
    Family(
        "qwen3_omni_moe_text",
        "",
        _qwen3_omni_moe,
        {**_QWEN, "sliding_window": None, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "rope_theta": 1e6}
        | {"norm_topk_prob": True},
        QWEN_NAMES,
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        _olmoe,
        {"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
        QWEN_NAMES,
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        _gpt_oss,
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        },
        _GPT_OSS_NAMES,
        functools.partial(transposed_experts, alternating=True),
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _glm4_moe,
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
        DEEPSEEK_NAMES,
        mtp_names=MTP_NAMES,
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        _minimax_m2,
        {
            "max_position_embeddings": 196_608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5e6,
        },
        {**MIXTRAL_NAMES, "router_correction": "block_sparse_moe.e_score_correction_bias"},
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        _dots1,
        {**_SIGMOID, "max_position_embeddings": 2048, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62}
        | {"norm_topk_prob": False, "rms_norm_eps": 1e-6, "moe_intermediate_size": 1408, "first_k_dense_replace": 0}
        | {"n_routed_experts": None},
        DEEPSEEK_NAMES,
    ),
    Family(
        "solar_open",
        "SolarOpenForCausalLM",
        _solar_open,
        {**_SIGMOID, "max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128}
        | {"num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1280, "rope_theta": 1e6},
        DEEPSEEK_NAMES,
    ),
    Family(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        _exaone_moe,
        {**_SIGMOID, "max_position_embeddings": 2048, "num_key_value_heads": 32, "num_experts": 64, "num_experts_per_tok": 8}
        | {"num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
        | {"sliding_window": 4096, "sliding_window_pattern": 4},
        {**DEEPSEEK_NAMES, "router_correction": "mlp.e_score_correction_bias"},
        ignored=r".*\.rotary_emb\.inv_freq|mtp\..*",
        keys={"n_shared_experts": "num_shared_experts"},
    ),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        _ernie4_5_moe,
        {
            **{"max_position_embeddings": 131_072, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
            **{"moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2},
            **{
                "moe_layer_start_index": 1,
                "moe_layer_end_index": -1,
                "moe_layer_interval": 1,
                "moe_norm_min": 1e-12,
                "tie_word_embeddings": True,
            },
        },
        {**DEEPSEEK_NAMES, "router_correction": "mlp.moe_statics.e_score_correction_bias"},
        _ernie_transform,
        ignored=r".*\.rotary_emb\.inv_freq|model\.mtp_.*",
        keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k", "n_shared_experts": "moe_num_shared_experts"},
    ),
)
