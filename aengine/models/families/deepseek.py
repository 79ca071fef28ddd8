"""DeepSeek V2, V3 and V3.2, and GLM-4.7-Flash: multi-head latent attention, and experts in all layers but the first ones. And Cohere 2 with
experts, and MiMo-V2."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from aengine.api.errors import ModelLoadError
from aengine.kernels.arrays import Array
from aengine.kernels.params import RouterScoring
from aengine.layers.rotary import RopeSpec
from aengine.models.config.reader import ConfigReader, NotNativeError
from aengine.models.config.rope import read_ropes
from aengine.models.families.family import (
    MTP_NAMES,
    Family,
    Transform,
    attention,
    decoder_spec,
    experts,
    gated_mlp,
    halves,
    head_sizes,
    layer_kinds,
    mixed_layers,
    one_channel,
    part_sizes,
    rms_norm,
    rope_and_context,
    routing,
    window_of,
)
from aengine.models.families.mixtures import (
    DEEPSEEK_NAMES,
    dense_layers,
    listed_dense_layers,
    shared_experts,
    sigmoid_experts,
)
from aengine.models.spec import Experts, LatentAttention, Layer, Mlp, ModelSpec, Norm, NormKind, Recurrence, RecurrenceKind, SparseIndex

_NAMES = {
    **DEEPSEEK_NAMES,
    "q": "self_attn.q_proj",
    "q_down": "self_attn.q_a_proj",
    "q_down_norm": "self_attn.q_a_layernorm",
    "q_up": "self_attn.q_b_proj",
    "kv_down": "self_attn.kv_a_proj_with_mqa",
    "kv_down_norm": "self_attn.kv_a_layernorm",
    "key_up": "self_attn.kv_b_proj",
    "value_up": "self_attn.kv_b_proj",
}

_INDEX_NAMES = {
    **{**_NAMES, "index_q": "self_attn.indexer.wq_b", "index_k": "self_attn.indexer.wk"},
    **{"index_k_norm": "self_attn.indexer.k_norm", "index_weights": "self_attn.indexer.weights_proj"},
}


def _spec(reader: ConfigReader, block: Experts, dense: list[bool]) -> ModelSpec:
    reader.refuse(rope_interleave=True)
    rope, context = rope_and_context(reader, reader.positive("qk_rope_head_dim"))
    attention, norm = _latent_attention(reader, rope), rms_norm(reader)
    layers = [Layer(attention, gated_mlp(reader) if is_dense else block, norm, norm) for is_dense in dense]
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _latent_attention(reader: ConfigReader, rope: RopeSpec) -> LatentAttention:
    nope_dim, rope_dim = reader.positive("qk_nope_head_dim"), reader.positive("qk_rope_head_dim")
    return LatentAttention(
        num_heads=reader.positive("num_attention_heads"),
        q_lora_rank=None if reader.get("q_lora_rank") is None else reader.positive("q_lora_rank"),
        kv_lora_rank=reader.positive("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=reader.positive("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * _mscale(reader) ** 2,
        rope=rope,
        norm=Norm(eps=1e-6),  # whatever the config's rms_norm_eps is
        bias=reader.flag("attention_bias"),
    )


def _kimi_linear(reader: ConfigReader) -> ModelSpec:
    """Latent attention without a rotation among recurrent layers."""
    reader.refuse(hidden_act="silu")
    num_layers, given = reader.positive("num_hidden_layers"), reader.get("linear_attn_config") or {}
    kinds = reader.layer_types(num_layers, ("linear_attention", "full_attention"))
    if kinds is None:
        attending = given.get("full_attn_layers", [number + 1 for number in range(num_layers) if number and not number % 4])
        kinds = ["full_attention" if number + 1 in attending else "linear_attention" for number in range(num_layers)]
    of_states = ConfigReader(given, {}, source=reader.source)
    heads, dim, taps = (
        of_states.positive(older, reader.positive(name))
        for older, name in (
            *(("num_heads", "linear_num_heads"), ("head_dim", "linear_head_dim")),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )
    norm, rope_dim = rms_norm(reader), reader.positive("qk_rope_head_dim")
    mixed = Recurrence(RecurrenceKind.KIMI_DELTA, heads, heads, dim, dim, taps, norm, gate_rank=dim)
    attended = _latent_attention(reader, RopeSpec((0.0,) * (rope_dim // 2)))
    block, plain = sigmoid_experts(reader), gated_mlp(reader)
    mlps = [plain if is_dense else block for is_dense in listed_dense_layers(reader)]
    layers = mixed_layers([kind == "full_attention" for kind in kinds], "layer_types", attended, mixed, mlps, norm)
    return decoder_spec(reader, layers, max_position_embeddings=reader.positive("max_position_embeddings"))


def _kimi_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    if name == "log_decay":
        return Transform((1, 1, shape[0], 1), np.ravel)
    return one_channel(spec, layer, name, part, shape) or _transform(spec, layer, name, part, shape)


def _mscale(reader: ConfigReader) -> float:
    """What queries and keys are multiplied with for a context that YaRN extends, as `transformers` has it."""
    rope = reader.get("rope_scaling") or reader.get("rope_parameters") or {}
    weight = rope.get("mscale_all_dim")
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not weight:
        return 1.0
    if rope.get("factor") is None:
        raise ModelLoadError(f"rope parameter mscale_all_dim needs 'factor' in {reader.source.file}")
    return 1.0 if rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0


def _v2(reader: ConfigReader) -> ModelSpec:
    reader.refuse(scoring_func="softmax", norm_topk_prob=False, mlp_bias=False)
    method = reader.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise NotNativeError(f"topk_method {method!r} in {reader.source.file} is not supported; supported are greedy, group_limited_greedy")
    grouped = method == "group_limited_greedy"
    how = routing(
        reader,
        normalize=False,
        scaling=reader.number("routed_scaling_factor"),
        num_groups=reader.positive("n_group") if grouped else 1,
        top_groups=reader.positive("topk_group") if grouped else 1,
    )
    return _spec(reader, experts(reader, how, shared=shared_experts(reader)), dense_layers(reader))


def _v3(reader: ConfigReader) -> ModelSpec:
    return _spec(reader, sigmoid_experts(reader), dense_layers(reader))


def _v32(reader: ConfigReader) -> ModelSpec:
    """DeepSeek-V3 with an index."""
    spec, layers = _spec(reader, sigmoid_experts(reader), listed_dense_layers(reader)), []
    heads, head_dim, top_k = map(reader.positive, ("index_n_heads", "index_head_dim", "index_topk"))
    index = SparseIndex(heads, head_dim, top_k, Norm(NormKind.LAYER, eps=1e-6, bias=True))
    for layer in spec.layers:
        assert isinstance(layer.attention, LatentAttention)
        if layer.attention.q_lora_rank is None:
            raise reader.unusable("q_lora_rank", None, "a positive integer: the index reads it")
        if index.head_dim < layer.attention.rope_dim:
            raise reader.unusable("index_head_dim", index.head_dim, f"{reader.name('qk_rope_head_dim')} {layer.attention.rope_dim} or more")
        layers.append(replace(layer, attention=replace(layer.attention, index=index)))
    return replace(spec, layers=tuple(layers))


def _glm_moe_dsa(reader: ConfigReader) -> ModelSpec:
    """DeepSeek-V3.2 whose index pairs neighbours in its rope."""
    num_layers = reader.positive("num_hidden_layers")
    kinds = reader.layer_types(num_layers, ("full", "shared"), "indexer_types") or []
    if "shared" in kinds or reader.get("index_topk_pattern") is not None or reader.number("index_topk_freq") > 1:
        raise NotNativeError(f"layers by {reader.source.file} that see what the index of an earlier one chose are not supported")
    return _v32(reader)


def _glm_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    attention, stem = None if layer is None else layer.attention, name.partition(".")[0]
    if not isinstance(attention, LatentAttention) or attention.index is None or stem not in ("index_q", "index_k", "index_k_norm"):
        return _transform(spec, layer, name, part, shape)
    heads, rope = (attention.index.num_heads if stem == "index_q" else 1), attention.rope_dim

    def apply(rows: Array) -> Array:
        by_head = rows.reshape(heads, -1, *rows.shape[1:])
        return np.concatenate((by_head[:, :rope:2], by_head[:, 1:rope:2], by_head[:, rope:]), 1).reshape(rows.shape)

    return Transform(shape, apply)


def _glm4_moe_lite(reader: ConfigReader) -> ModelSpec:
    num_layers = reader.positive("num_hidden_layers")
    kinds = reader.layer_types(num_layers, ("dense", "sparse"), "mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    return _spec(reader, sigmoid_experts(reader), [kind == "dense" for kind in kinds])


def _transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """The rotated part goes first, its pairs of neighbours apart into halves; `kv_b_proj` is cut into `key_up` and `value_up`."""
    attention = None if layer is None else layer.attention
    if not isinstance(attention, LatentAttention):
        return None
    stem, heads, rope, nope = name.partition(".")[0], attention.num_heads, attention.rope_dim, attention.nope_dim
    if stem in ("q", "q_up"):
        return Transform(
            shape, lambda tensor: _rope_first(tensor.reshape(heads, nope + rope, *tensor.shape[1:]), nope).reshape(tensor.shape)
        )
    if stem == "kv_down":
        return Transform(shape, lambda tensor: _rope_first(tensor[None], attention.kv_lora_rank)[0])
    if stem not in ("key_up", "value_up"):
        return None
    is_key, stored = stem == "key_up", (heads * (nope + attention.v_dim), attention.kv_lora_rank)

    def apply(tensor: Array) -> Array:
        part = tensor.reshape(heads, -1, tensor.shape[1])
        part = part[:, :nope].swapaxes(1, 2) if is_key else part[:, nope:]
        return part.reshape(-1, part.shape[-1])

    return Transform(stored, apply, by_rows=not is_key)


def _rope_first(tensor: Array, others: int) -> Array:
    """[heads, others + rope, ...] -> [heads, rope + others, ...]: of the rotated rows the even ones, then the odd ones."""
    return np.concatenate((tensor[:, others::2], tensor[:, others + 1 :: 2], tensor[:, :others]), 1)


_SIZES = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def _cohere2_moe(reader: ConfigReader) -> ModelSpec:
    """Attention and MLP are parallel, and layers without a window have no rope, but for dense ones at the begin."""
    dense, num_layers = reader.count("first_k_dense_replace", 0), reader.positive("num_hidden_layers")
    patterns = reader.positive("prefix_dense_sliding_window_pattern"), reader.positive("sliding_window_pattern")
    kinds = reader.layer_types(num_layers) or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for pattern, count in zip(patterns, (dense, num_layers - dense), strict=True)
        for layer in range(count)
    ]
    is_dense = listed_dense_layers(reader)
    shared, norm = reader.count("n_shared_experts"), _cohere_norm(reader)
    if shared and reader.get("shared_expert_combination_strategy") != "sum":
        raise NotNativeError(
            f"shared_expert_combination_strategy {reader.get('shared_expert_combination_strategy')!r} in {reader.source.file} is not "
            "supported; supported is 'sum'"
        )
    sigmoid = reader.get("expert_selection_fn") == "sigmoid"
    how = routing(
        reader,
        scoring=RouterScoring.SIGMOID if sigmoid else RouterScoring.SOFTMAX,
        normalize=not sigmoid or reader.flag("norm_topk_prob"),
    )
    width = reader.positive("intermediate_size")
    block = experts(reader, how, size="intermediate_size", shared=Mlp(shared * width, reader.activation()) if shared else None)
    mlp = gated_mlp(reader, size="prefix_dense_intermediate_size") if any(is_dense) else None
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    bias, layers = reader.flag("attention_bias"), []
    for kind, one in zip(kinds, is_dense, strict=True):
        window = window_of(reader, kind)
        rotated = rope if window or (one and patterns[0] == 1) else None
        attended = attention(reader, rotated, window=window, qkv_bias=bias, output_bias=bias)
        layers.append(Layer(attended, mlp if one and mlp is not None else block, norm, None, parallel=True))
    scale = reader.number("logit_scale")
    return decoder_spec(reader, layers, norm=norm, max_position_embeddings=context, logit_scale=scale)


def _cohere_norm(reader: ConfigReader) -> Norm:
    return rms_norm(reader) if reader.get("rms_norm_eps") is not None else Norm(NormKind.LAYER, reader.number("layer_norm_eps"))


def _mimo_v2(reader: ConfigReader) -> ModelSpec:
    """Twice the KV heads, and sinks, in layers with a window; values are narrower than keys."""
    count, norm = reader.positive("num_hidden_layers"), rms_norm(reader)
    kinds = layer_kinds(reader, full_every=6)
    if reader.get("layer_types") is None:
        kinds[0] = "full_attention"
    size = reader.positive_or_none("sliding_window_size")
    window = reader.positive("sliding_window") if size is None else size + 1
    heads = head_sizes(reader)
    same = {"swa_num_key_value_heads": 2 * heads[1], "swa_num_attention_heads": heads[0], "swa_head_dim": heads[2]}
    reader.refuse(**same, add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False)
    theta = {"full_attention": reader.get("rope_theta", 5e6), "sliding_attention": reader.get("swa_rope_theta", 1e4)}
    partial = reader.get("partial_rotary_factor", 0.334)
    older = {kind: {"rope_theta": theta[kind], "partial_rotary_factor": partial} for kind in dict.fromkeys(kinds)}
    ropes, context = read_ropes(reader, heads[2], older)
    dense = reader.layer_types(count, ("dense", "sparse"), "mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    mlp, block, bias = gated_mlp(reader), sigmoid_experts(reader), reader.flag("attention_bias")
    factor = reader.positive_number("attention_value_scale", 1.0)
    of_windows = {"num_kv_heads": 2 * heads[1], "window": window, "sinks": True}
    layers = [
        Layer(
            attention(
                reader,
                ropes[kind],
                v_dim=reader.positive("v_head_dim"),
                qkv_bias=bias,
                **(of_windows if kind == "sliding_attention" else {}),
            ),
            mlp if is_dense == "dense" else block,
            attention_norm=norm,
            mlp_norm=norm,
            weight_factors=(factor,),
        )
        for kind, is_dense in zip(kinds, dense, strict=True)
    ]
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _mimo_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """Values have a factor, which becomes one of their weights."""
    if layer is None or not name.startswith("qkv.") or part != 2 or layer.weight_factors == (1.0,):
        return None
    (factor,) = layer.weight_factors
    return Transform(shape, lambda rows: rows.astype(np.float32) * factor, by_rows=False)


FAMILIES = (
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _v2,
        {**_SIZES, "max_position_embeddings": 2048, "n_routed_experts": 64, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
        _NAMES,
        _transform,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _v3,
        {
            **_SIZES,
            "max_position_embeddings": 4096,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
        },
        _NAMES,
        _transform,
        mtp_names=MTP_NAMES,
        part_defaults=part_sizes(129_280, 7168, 18_432, 61, 128, moe_intermediate_size=2048),
    ),
    Family(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        _v32,
        {
            **{**_SIZES, "max_position_embeddings": 163_840, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
            **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3},
            **{"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "moe_intermediate_size": 2048},
        },
        _INDEX_NAMES,
        _transform,
        mtp_names=MTP_NAMES,
    ),
    Family(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        _glm_moe_dsa,
        {
            **{"kv_lora_rank": 512, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
            **{"max_position_embeddings": 202_752, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
            **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3},
            **{"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 1, "moe_intermediate_size": 2048},
            "rms_norm_eps": 1e-5,
        },
        _INDEX_NAMES,
        _glm_transform,
        mtp_names=MTP_NAMES,
    ),
    Family(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        _mimo_v2,
        {
            **{"rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128},
            **{"sliding_window": 129, "attention_value_scale": 0.707, "n_routed_experts": 256, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
        },
        {**DEEPSEEK_NAMES, "sinks": "self_attn.attention_sink_bias"},
        _mimo_transform,
        keys={"rms_norm_eps": "rms_norm_eps layernorm_epsilon"},
    ),
    Family(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        _glm4_moe_lite,
        {
            **{"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
            "max_position_embeddings": 202752,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
        },
        _NAMES,
        _transform,
        mtp_names=MTP_NAMES,
    ),
    Family(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        _cohere2_moe,
        {
            **{"max_position_embeddings": 8192, "head_dim": 128, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096},
            **{"sliding_window_pattern": 4, "prefix_dense_sliding_window_pattern": 1, "tie_word_embeddings": True},
            **{"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0, "norm_topk_prob": True},
            **{"shared_expert_combination_strategy": "average", "expert_selection_fn": "softmax"},
        },
        DEEPSEEK_NAMES,
        halves,
        keys={"n_shared_experts": "num_shared_experts"},
    ),
    Family(
        "kimi_linear",
        "KimiLinearForCausalLM",
        _kimi_linear,
        {
            **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            **{"model_max_length": 1_048_576, "rms_norm_eps": 1e-5, "num_shared_experts": 1, "first_k_dense_replace": 1},
            **{"num_experts": 256, "num_experts_per_token": 8, "moe_intermediate_size": 1024, "num_expert_group": 1, "topk_group": 1},
            **{"routed_scaling_factor": 2.446, "moe_renormalize": True},
            **{"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
        },
        {
            **_NAMES,
            **{"recur_in": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "recur_gates": "self_attn.b_proj"},
            **{"decay_down": "self_attn.f_a_proj", "decay_up": "self_attn.f_b_proj", "z_down": "self_attn.g_a_proj"},
            **{"z_up": "self_attn.g_b_proj", "recur_norm": "self_attn.o_norm", "recur_out": "self_attn.o_proj"},
            **{"conv": "self_attn.q_conv1d self_attn.k_conv1d self_attn.v_conv1d", "log_decay": "self_attn.A_log"},
            **{"step_bias": "self_attn.dt_bias", "router": "block_sparse_moe.gate"},
            **{"router_correction": "block_sparse_moe.gate.e_score_correction_bias"},
            "experts.gate_up": "block_sparse_moe.experts.{index}.w1 block_sparse_moe.experts.{index}.w3",
            "experts.down": "block_sparse_moe.experts.{index}.w2",
            "shared.gate_up": "block_sparse_moe.shared_experts.gate_proj block_sparse_moe.shared_experts.up_proj",
            "shared.down": "block_sparse_moe.shared_experts.down_proj",
        },
        _kimi_transform,
        keys={
            **{"max_position_embeddings": "model_max_length max_position_embeddings", "norm_topk_prob": "moe_renormalize norm_topk_prob"},
            **{"n_group": "num_expert_group n_group", "num_experts_per_tok": "num_experts_per_token num_experts_per_tok"},
            "n_shared_experts": "num_shared_experts n_shared_experts",
        },
    ),
)
