"""Models with Mamba-2 in most layers: Granite 4, Bamba, Falcon-H1 and Nemotron-H. And older Granite: as Llama, with multipliers; with
experts; with experts and an MLP for all tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from aengine.kernels.arrays import Array
from aengine.models.config.reader import ConfigReader, NotNativeError, is_number
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
    layer_kinds,
    mixed_layers,
    part_sizes,
    rms_norm,
    rope_and_context,
    routing,
    window_of,
    with_keys,
)
from aengine.models.families.mixtures import sigmoid_experts
from aengine.models.spec import Attention, Experts, Layer, Mlp, ModelSpec, Recurrence, RecurrenceKind


def _spec(
    reader: ConfigReader, mlp: Mlp | Experts, *, rotated: bool = True, recurrence: Recurrence | None = None, attends: Sequence[bool] = ()
) -> ModelSpec:
    """`attends`: by layer, whether it has attention, or else the recurrence."""
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, bias = rms_norm(reader), reader.flag("attention_bias")
    scale = reader.number("attention_multiplier", head_sizes(reader)[2] ** -0.5)
    layer = Layer(
        attention=attention(reader, rope if rotated else None, scale=scale, qkv_bias=bias, output_bias=bias),
        mlp=mlp,
        attention_norm=norm,
        mlp_norm=norm,
        residual_multiplier=reader.number("residual_multiplier"),
    )
    recurrent = replace(layer, attention=None, recurrence=recurrence)
    return decoder_spec(
        reader,
        [layer if one else recurrent for one in attends or [True] * reader.positive("num_hidden_layers")],
        max_position_embeddings=context,
        embedding_scale=reader.number("embedding_multiplier"),
        logit_scale=1.0 / reader.positive_number("logits_scaling"),
    )


def _granite(reader: ConfigReader) -> ModelSpec:
    return _spec(reader, gated_mlp(reader, bias=reader.flag("mlp_bias")))


def _hyperclovax(reader: ConfigReader) -> ModelSpec:
    """Granite whose logits are multiplied, with norms behind its blocks."""
    spec = _granite(reader)
    norm = rms_norm(reader) if reader.flag("use_post_norm", True) else None
    layers = tuple(replace(layer, post_attention_norm=norm, post_mlp_norm=norm) for layer in spec.layers)
    return replace(spec, layers=layers, logit_scale=1 / spec.logit_scale)


def _experts(reader: ConfigReader) -> Experts:
    shared = gated_mlp(reader, size="shared_intermediate_size") if reader.positive_or_none("shared_intermediate_size") else None
    return experts(reader, routing(reader), size="intermediate_size", shared=shared)


def _granitemoe(reader: ConfigReader) -> ModelSpec:
    return _spec(reader, _experts(reader))


def _granitemoehybrid(reader: ConfigReader) -> ModelSpec:
    num_layers = reader.positive("num_hidden_layers")
    kinds = reader.layer_types(num_layers, ("mamba", "linear_attention", "attention", "full_attention")) or ["mamba"] * num_layers
    attends = [kind in ("attention", "full_attention") for kind in kinds]
    check_attends(attends, "layer_types")
    mlp = _experts(reader) if reader.positive_or_none("num_local_experts") else gated_mlp(reader, size="shared_intermediate_size")
    rotated = reader.get("position_embedding_type") == "rope"
    width = reader.positive("mamba_expand") * reader.positive("hidden_size")
    return _spec(reader, mlp, rotated=rotated, recurrence=None if all(attends) else mamba2(reader, width=width), attends=attends)


def _transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """A tensor holds all experts: [experts, out, in]."""
    if layer is None or not name.startswith("experts.") or not isinstance(layer.mlp, Experts):
        return mamba2_transform(spec, layer, name, part, shape)
    count = layer.mlp.num_experts

    def apply(tensor: Array) -> Array:
        return tensor.reshape(-1, tensor.shape[-1])

    return Transform((count, shape[0] // count, *shape[1:]), apply)


def _granite_swa(reader: ConfigReader) -> ModelSpec:
    """Windows, sinks, and a rope of each layer's own theta, 0 for none."""
    kinds = layer_kinds(reader, 4, first=True)
    thetas = None if reader.get("layer_rope_theta") is None else reader.numbers("layer_rope_theta", [0.0] * len(kinds))
    spec = _granite(reader) if reader.get("num_local_experts") is None else _granitemoe(reader)
    given, layers = reader.get("rope_parameters") or {"rope_type": "default"}, []
    for number, (kind, layer) in enumerate(zip(kinds, spec.layers, strict=True)):
        attended = layer.attention
        assert isinstance(attended, Attention)
        rope = attended.rope
        if thetas is not None:
            own = with_keys(reader, {"rope_parameters": {**given, "rope_theta": thetas[number]}})
            rope = rope_and_context(own, attended.head_dim)[0] if thetas[number] else None
        layers.append(replace(layer, attention=replace(attended, window=window_of(reader, kind), sinks=True, rope=rope)))
    return replace(spec, layers=tuple(layers))


def mamba2(reader: ConfigReader, *, gated_first: bool = True, normed: bool = True, width: int | None = None) -> Recurrence:
    """`width`: of the outputs of all heads, which give the width of each if the config does not."""
    reader.refuse(hidden_act="silu")
    limits = reader.get("time_step_limit")
    if isinstance(limits, list) and (limits[:1] != [0.0] or any(map(is_number, limits[1:]))):  # infinity is none
        raise NotNativeError(f"time_step_limit {limits} in {reader.source.file} is not supported: steps are not limited")
    heads, groups, state, taps = map(reader.positive, ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"))
    if heads % groups:
        raise reader.unusable("mamba_n_heads", heads, f"a multiple of {reader.name('mamba_n_groups')} {groups}")
    if width is not None and width % heads:
        raise reader.unusable("mamba_n_heads", heads, f"a divisor of the width {width} of all heads")
    fixed = reader.get("mamba_d_head") not in (None, "auto")
    head_dim = reader.positive("mamba_d_head") if fixed or width is None else width // heads
    if width is not None and head_dim * heads != width:
        raise reader.unusable("mamba_d_head", head_dim, f"{width // heads}: {reader.name('mamba_n_heads')} {heads} have {width} outputs")
    return Recurrence(
        *(RecurrenceKind.MAMBA2, heads, groups, state, head_dim, taps, rms_norm(reader) if normed else None),
        norm_groups=groups if normed else None,
        gated_first=gated_first,
        conv_bias=reader.flag("mamba_conv_bias", True),
        bias=reader.flag("mamba_proj_bias"),
    )


def mamba2_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """One projection has z, x, B, C and dt, and the convolution is of x, B and C: `Recurrence` has C, B, x, then z; and dt by itself."""
    recurrence = None if layer is None else layer.recurrence
    stem, _, kind = name.rpartition(".")
    if recurrence is None or stem not in ("recur_in", "recur_gates", "conv"):
        return None
    width, keys = recurrence.width, recurrence.num_key_heads * recurrence.key_dim

    def convolved(rows: Array) -> Array:
        x, b, c = np.split(rows, (width, width + keys))
        return np.concatenate((c, b, x))

    channels = recurrence.channels
    if stem == "conv":
        wide = (1,) if kind == "weight" else ()
        return Transform((channels, *wide, *shape[1:]), lambda rows: convolved(rows[:, 0] if wide else rows))
    whole = (width + channels + recurrence.num_heads, *shape[1:])
    if stem == "recur_gates":
        return Transform(whole, lambda rows: rows[width + channels :])
    if part == 1:
        return Transform(whole, lambda rows: rows[:width])
    return Transform(whole, lambda rows: convolved(rows[width : width + channels]))


MAMBA2_NAMES = {
    "recur_in": "mamba.in_proj mamba.in_proj",
    "recur_gates": "mamba.in_proj",
    "conv": "mamba.conv1d",
    "log_decay": "mamba.A_log",
    "step_bias": "mamba.dt_bias",
    "skip": "mamba.D",
    "recur_norm": "mamba.norm",
    "recur_out": "mamba.out_proj",
}


def mixer_names(names: Mapping[str, str]) -> dict[str, str]:
    """The names of models that call a layer's recurrence its mixer."""
    return {ours: theirs.replace("mamba.", "mixer.") for ours, theirs in names.items()}


_FEED_FORWARD_NAMES = {
    **{**LLAMA_NAMES, **MAMBA2_NAMES, "norm": "model.final_layernorm", "mlp_norm": "pre_ff_layernorm"},
    **{"gate_up": "feed_forward.gate_proj feed_forward.up_proj", "down": "feed_forward.down_proj"},
}
_MAMBA2_DEFAULTS = {
    **{"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True},
    "mamba_proj_bias": False,
}


def _bamba(reader: ConfigReader) -> ModelSpec:
    num_layers, attending = reader.positive("num_hidden_layers"), reader.integers("attn_layer_indices", [])
    rope, context = rope_and_context(reader, head_sizes(reader)[2], partial=True)
    bias, norm = reader.flag("attention_bias"), rms_norm(reader)
    attended = attention(reader, rope, qkv_bias=bias, output_bias=bias)
    mixed = mamba2(reader, width=reader.positive("mamba_expand") * reader.positive("hidden_size"))
    attends = [index in attending for index in range(num_layers)]
    mlps = [gated_mlp(reader, bias=reader.flag("mlp_bias"))] * num_layers
    layers = mixed_layers(attends, "attn_layer_indices", attended, mixed, mlps, norm)
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _falcon_h1(reader: ConfigReader) -> ModelSpec:
    """The multipliers that are not those of `ModelSpec` are of weights: `Layer.weight_factors` of z, x, B, C, dt, of the outputs of both
    mixers, and of gate and down of the MLP."""
    reader.refuse(attention_bias=False, mlp_bias=False, mamba_proj_bias=False, projectors_bias=False)
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    ssm_in, ssm_out, attention_in, attention_out, of_keys = (
        reader.number(f"{name}_multiplier", 1.0) for name in ("ssm_in", "ssm_out", "attention_in", "attention_out", "key")
    )
    of_inputs, of_mlp = reader.numbers("ssm_multipliers", [1.0] * 5), reader.numbers("mlp_multipliers", [1.0] * 2)
    scale = head_sizes(reader)[2] ** -0.5 * of_keys * attention_in**2
    width = reader.positive_or_none("mamba_d_ssm") or reader.positive("mamba_expand") * reader.positive("hidden_size")
    normed, norm = reader.flag("mamba_rms_norm"), rms_norm(reader)
    layer = Layer(
        *(attention(reader, rope, scale=scale), gated_mlp(reader), norm, norm),
        recurrence=mamba2(reader, width=width, normed=normed, gated_first=not (normed and reader.flag("mamba_norm_before_gate", True))),
        weight_factors=(*(ssm_in * factor for factor in of_inputs), ssm_out, attention_out * attention_in, *of_mlp),
    )
    return decoder_spec(
        reader,
        [layer] * reader.positive("num_hidden_layers"),
        max_position_embeddings=context,
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        logit_scale=reader.number("lm_head_multiplier", 1.0),
    )


def _falcon_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    transform = mamba2_transform(spec, layer, name, part, shape)
    if layer is None or layer.recurrence is None:
        return transform
    z, x, b, c, dt, ssm_out, attention_out, gate, down = layer.weight_factors
    keys = layer.recurrence.num_key_heads * layer.recurrence.key_dim
    factors = {("recur_in", 1): z, ("recur_gates", 0): dt, ("recur_out", 0): ssm_out, ("output", 0): attention_out}
    factors |= {("gate_up", 0): gate, ("down", 0): down}
    factor: Array | float = factors.get((name.removesuffix(".weight"), part), 1.0)
    if name == "conv.weight":
        factor = np.repeat(np.array([c, b, x], np.float32), (keys, keys, layer.recurrence.width))[:, None]
    elif factor == 1.0:
        return transform
    taken = transform or Transform(shape, lambda rows: rows)
    return Transform(taken.shape, lambda rows: taken.apply(rows).astype(np.float32) * factor, by_rows=False)


_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_BLOCK_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def _relu_experts(reader: ConfigReader, mlp: Mlp | Experts | None) -> Experts:
    """The router is that of DeepSeek-V3, and each expert is as the `mlp`, but for its width."""
    reader.refuse(moe_latent_size=None)
    assert isinstance(mlp, Mlp)
    expert, shared = (
        replace(mlp, intermediate_size=reader.positive(key)) for key in ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    return replace(sigmoid_experts(reader), expert=expert, shared=shared)


def _nemotron_h(reader: ConfigReader) -> ModelSpec:
    """A layer is one block."""
    reader.refuse(use_bias=False, sliding_window=None)
    pattern, key = reader.get("hybrid_override_pattern"), "layers_block_type"
    kinds = reader.get(key)
    if kinds is None and isinstance(pattern, str):
        key, kinds = "hybrid_override_pattern", [_BLOCKS.get(letter, letter) for letter in pattern]
    if not isinstance(kinds, list) or not kinds:
        raise reader.unusable(key, kinds, "a block for each layer")
    kinds = [_BLOCK_NAMES.get(kind, kind) for kind in kinds]
    for kind in kinds:
        if kind not in _BLOCKS.values():
            raise NotNativeError(f"a block {kind!r} by {key} in {reader.source.file} is not one of {', '.join(_BLOCKS.values())}")
    norm, bias, mlp_bias = rms_norm(reader), reader.flag("attention_bias"), reader.flag("mlp_bias")
    mixed = mamba2(reader)
    blocks = {
        "mamba": Layer(None, None, norm, None, recurrence=mixed),
        "attention": Layer(attention(reader, None, qkv_bias=bias, output_bias=bias), None, norm, None),
        "mlp": Layer(
            None,
            Mlp(
                reader.positive("intermediate_size"),
                reader.activation("mlp_hidden_act", "relu2"),
                gated=False,
                up_bias=mlp_bias,
                down_bias=mlp_bias,
            ),
            None,
            norm,
        ),
    }
    if "moe" in kinds:
        blocks["moe"] = Layer(None, _relu_experts(reader, blocks["mlp"].mlp), None, norm)
    layers = [blocks[kind] for kind in kinds]
    check_attends([kind == "attention" for kind in kinds], key)
    return decoder_spec(reader, layers, max_position_embeddings=reader.positive("max_position_embeddings"))


_DEFAULTS = {
    "max_position_embeddings": 2048,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_EXPERTS = {**_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}
_NAMES = {
    **LLAMA_NAMES,
    **MAMBA2_NAMES,
    "router": "block_sparse_moe.router.layer",
    "experts.gate_up": "block_sparse_moe.input_linear",
    "experts.down": "block_sparse_moe.output_linear",
    "shared.gate_up": "shared_mlp.input_linear",
    "shared.down": "shared_mlp.output_linear",
    "gate_up": "shared_mlp.input_linear",
    "down": "shared_mlp.output_linear",
}
FAMILIES = (
    Family("granite", "GraniteForCausalLM", _granite, _DEFAULTS, part_defaults=part_sizes(32_000, 4096, 11_008, 32, 32)),
    Family("granitemoe", "GraniteMoeForCausalLM", _granitemoe, _EXPERTS, _NAMES, _transform),
    Family("granitemoeshared", "GraniteMoeSharedForCausalLM", _granitemoe, _EXPERTS, _NAMES, _transform),
    Family(
        "granite_swa",
        "GraniteSWAForCausalLM",
        _granite_swa,
        {
            **{**_DEFAULTS, "max_position_embeddings": 8192, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
            "sliding_window": 128,
        },
        {**LLAMA_NAMES, "sinks": "self_attn.sinks"},
    ),
    Family(
        "granitemoe_swa",
        "GraniteMoeSWAForCausalLM",
        _granite_swa,
        {**_EXPERTS, "sliding_window": 128, "shared_intermediate_size": 0},
        {
            **{**_NAMES, "sinks": "self_attn.sinks", "router": "block_sparse_moe.router"},
            **{f"experts.{name}.weight": f"block_sparse_moe.experts.{name}_proj" for name in ("gate_up", "down")},
        },
        _transform,
    ),
    Family(
        "hyperclovax",
        "HyperCLOVAXForCausalLM",
        _hyperclovax,
        {**_DEFAULTS, "attention_multiplier": None, "use_post_norm": True},
        {**LLAMA_NAMES, "post_attention_norm": "post_norm1", "post_mlp_norm": "post_norm2"},
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _granitemoehybrid,
        {**_EXPERTS, **_MAMBA2_DEFAULTS, "shared_intermediate_size": 1024},
        _NAMES,
        _transform,
    ),
    Family(
        "bamba",
        "BambaForCausalLM",
        _bamba,
        defaults={
            **_MAMBA2_DEFAULTS,
            "max_position_embeddings": 262_144,
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
        names=_FEED_FORWARD_NAMES,
        transform=mamba2_transform,
    ),
    Family(
        "falcon_h1",
        "FalconH1ForCausalLM",
        _falcon_h1,
        defaults={**_MAMBA2_DEFAULTS, "max_position_embeddings": 8192, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024},
        names=_FEED_FORWARD_NAMES,
        transform=_falcon_transform,
    ),
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        _nemotron_h,
        defaults={
            **{
                "max_position_embeddings": 4096,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "layer_norm_epsilon": 1e-5,
                "intermediate_size": 21_504,
            },
            **{"num_hidden_layers": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "n_group": 1},
            **{"moe_shared_expert_intermediate_size": 7688, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "topk_group": 1},
            **{"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True},
        },
        names={
            **{**LLAMA_NAMES, **mixer_names(MAMBA2_NAMES)},
            **{"layer": "backbone.layers.{layer}", "embedding": "backbone.embeddings", "norm": "backbone.norm_f"},
            **{"attention_norm": "norm", "mlp_norm": "norm", "qkv": "mixer.q_proj mixer.k_proj mixer.v_proj", "output": "mixer.o_proj"},
            **{"up": "mixer.up_proj", "down": "mixer.down_proj", "router": "mixer.gate"},
            **{"router_correction": "mixer.gate.e_score_correction_bias", "experts.up": "mixer.experts.{index}.up_proj"},
            **{"experts.down": "mixer.experts.{index}.down_proj", "shared.up": "mixer.shared_experts.up_proj"},
            "shared.down": "mixer.shared_experts.down_proj",
        },
        transform=mamba2_transform,
        keys={
            **{"rms_norm_eps": "layer_norm_epsilon", "mamba_n_heads": "mamba_num_heads", "mamba_n_groups": "n_groups"},
            **{"mamba_d_state": "ssm_state_size", "mamba_d_conv": "conv_kernel", "mamba_d_head": "mamba_head_dim"},
            **{"mamba_conv_bias": "use_conv_bias", "hidden_act": "mamba_hidden_act"},
        },
    ),
)
