"""Models of states alone: Mamba, Falcon Mamba and Mamba-2. Jamba, which has Mamba-1 in most layers, and MiniMax, which has lightning
attention in half of them."""

from __future__ import annotations

import numpy as np

from aengine.kernels.arrays import Array
from aengine.models.config.reader import ConfigReader
from aengine.models.families.family import (
    LLAMA_NAMES,
    Family,
    Transform,
    attention,
    decoder_spec,
    experts,
    gated_mlp,
    head_sizes,
    mixed_layers,
    one_channel,
    rms_norm,
    rope_and_context,
    routing,
)
from aengine.models.families.mamba import MAMBA2_NAMES, mamba2, mamba2_transform, mixer_names
from aengine.models.families.mixtures import MIXTRAL_NAMES
from aengine.models.spec import Layer, ModelSpec, Norm, Recurrence, RecurrenceKind

_CONTEXT = 131_072
"""Tokens of models whose configs name no longest sequence, and which need no more memory for a longer one."""
_CHANNELS = (64, 32, 16)  # of a head of Mamba-1: as many as the kernels take together


def _expanded(reader: ConfigReader) -> int:
    """The width of what the hidden states become."""
    return int(reader.positive_number("mamba_expand") * reader.positive("hidden_size"))


def _mamba1(reader: ConfigReader, width: int, gate_norm: Norm | None) -> Recurrence:
    reader.refuse(hidden_act="silu")
    hidden, state, taps = reader.positive("hidden_size"), reader.positive("mamba_d_state"), reader.positive("mamba_d_conv")
    channels = next((count for count in _CHANNELS if width % count == 0), width)
    rank = -(-hidden // 16) if reader.get("mamba_dt_rank") == "auto" else reader.positive("mamba_dt_rank")
    return Recurrence(
        *(RecurrenceKind.MAMBA1, width // channels, 1, state, channels, taps, None),
        conv_bias=reader.flag("mamba_conv_bias"),
        bias=reader.flag("mamba_proj_bias"),
        gate_rank=rank,
        gate_norm=gate_norm,
    )


def _mamba1_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """One projection of the convolved x has what makes dt, and B and C: `Recurrence` has C, then B; and the others by themselves."""
    recurrence = None if layer is None else layer.recurrence
    if recurrence is None or recurrence.kind is not RecurrenceKind.MAMBA1:
        return None
    rank, keys, width = recurrence.gate_rank, recurrence.key_dim, recurrence.width
    assert rank is not None
    projected = (rank + 2 * keys, width)
    match name:
        case "recur_gates.weight":
            first, count = (rank + keys, keys) if part == 0 else (rank, keys)
            return Transform(projected, lambda rows: rows[first : first + count])
        case "decay_down.weight":
            return Transform(projected, lambda rows: rows[:rank])
        case "gate_q_norm.weight" | "gate_k_norm.weight" | "decay_norm.weight" if spec.family == "falcon_mamba":
            return Transform(projected, lambda rows: np.ones(shape, np.float32), by_rows=False)  # its norms have no weights
    return one_channel(spec, layer, name, part, shape)


def _state_spec(reader: ConfigReader, recurrence: Recurrence) -> ModelSpec:
    layers = [Layer(None, None, rms_norm(reader), None, recurrence=recurrence)] * reader.positive("num_hidden_layers")
    return decoder_spec(reader, layers)


def _mamba(reader: ConfigReader) -> ModelSpec:
    return _state_spec(reader, _mamba1(reader, reader.positive("intermediate_size", _expanded(reader)), None))


def _falcon_mamba(reader: ConfigReader) -> ModelSpec:
    width = reader.positive("intermediate_size", _expanded(reader))
    return _state_spec(reader, _mamba1(reader, width, rms_norm(reader, "mixer_rms_eps")))


def _mamba2(reader: ConfigReader) -> ModelSpec:
    recurrence, width = mamba2(reader), _expanded(reader)
    if recurrence.width != width:
        heads = f"the width of num_heads {recurrence.num_heads} of head_dim {recurrence.value_dim}"
        raise reader.unusable("hidden_size", reader.get("hidden_size"), f"{heads} by expand {reader.get('mamba_expand')}")
    return _state_spec(reader, recurrence)


def _jamba(reader: ConfigReader) -> ModelSpec:
    """Layers with experts among those with one MLP, by a period of their own."""
    num_layers, norm = reader.positive("num_hidden_layers"), rms_norm(reader)

    def every(kind: str) -> list[bool]:
        period, offset = reader.positive(f"{kind}_layer_period"), reader.count(f"{kind}_layer_offset")
        return [index % period == offset for index in range(num_layers)]

    routed, mlp = every("expert"), gated_mlp(reader)
    if reader.positive("num_experts") > 1:
        block = experts(reader, routing(reader, normalize=False), size="intermediate_size")
        mlps = [block if one else mlp for one in routed]
    else:
        mlps = [mlp] * num_layers
    layers = mixed_layers(every("attn"), "attn_layer_period", attention(reader, None), _mamba1(reader, _expanded(reader), norm), mlps, norm)
    return decoder_spec(reader, layers)


def _minimax(reader: ConfigReader) -> ModelSpec:
    """The residual of each block begins as its normed input times a factor."""
    reader.refuse(full_attn_beta_factor=1, linear_attn_beta_factor=1, mlp_beta_factor=1, sliding_window=None)
    num_layers, (heads, _, head_dim) = reader.positive("num_hidden_layers"), head_sizes(reader)
    rope, context = rope_and_context(reader, head_dim, partial=True)
    kinds = reader.layer_types(num_layers, ("full_attention", "linear_attention"))
    attends = [kind == "full_attention" for kind in kinds or ["full_attention", "linear_attention"] * num_layers][:num_layers]
    block = experts(reader, routing(reader), size="intermediate_size")
    of_attention, of_lightning, of_mlp = (reader.number(f"{name}_alpha_factor") for name in ("full_attn", "linear_attn", "mlp"))
    attended, norm, layers = attention(reader, rope), rms_norm(reader), []
    for index, attends_all in enumerate(attends):
        depth = 1 - index / (num_layers - 1 + 1e-5) + 1e-5
        mixed = Recurrence(
            *(RecurrenceKind.LIGHTNING, heads, heads, head_dim, head_dim, 1, Norm()),
            norm_groups=1,
            slopes=tuple(2 ** (-8 / heads * (head + 1)) * depth for head in range(heads)),
        )
        factors = (of_attention if attends_all else of_lightning, of_mlp)
        recurrence = None if attends_all else mixed
        layers.append(Layer(attended if attends_all else None, block, norm, norm, recurrence=recurrence, normed_residuals=factors))
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _minimax_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """One projection has q, k and v of each head."""
    recurrence = None if layer is None else layer.recurrence
    if recurrence is None or name != "recur_in.weight" or part == 1:
        return None

    def apply(rows: Array) -> Array:
        return rows.reshape(recurrence.num_heads, 3, recurrence.key_dim, -1).swapaxes(0, 1).reshape(rows.shape)

    return Transform(shape, apply)


_MAMBA1_NAMES = {
    "recur_in": "mamba.in_proj",
    "conv": "mamba.conv1d",
    "recur_gates": "mamba.x_proj mamba.x_proj",
    "decay_down": "mamba.x_proj",
    "decay_up": "mamba.dt_proj",
    "step_bias": "mamba.dt_proj.bias",
    "log_decay": "mamba.A_log",
    "skip": "mamba.D",
    "recur_out": "mamba.out_proj",
}
_STATE_NAMES = {
    "embedding": "backbone.embeddings",
    "layer": "backbone.layers.{layer}",
    "attention_norm": "norm",
    "norm": "backbone.norm_f",
    "head": "lm_head",
}
_STATE_KEYS = {
    **{"rms_norm_eps": "layer_norm_epsilon", "mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand"},
    **{"mamba_conv_bias": "use_conv_bias", "mamba_proj_bias": "use_bias", "mamba_dt_rank": "time_step_rank"},
}
_STATE_DEFAULTS = {
    **{"vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-5, "state_size": 16, "conv_kernel": 4},
    **{"expand": 2, "use_conv_bias": True, "use_bias": False, "time_step_rank": "auto", "hidden_act": "silu", "tie_word_embeddings": True},
    **{"initializer_range": 0.1, "max_position_embeddings": _CONTEXT},
}


FAMILIES = (
    Family(
        "mamba", "MambaForCausalLM", _mamba, _STATE_DEFAULTS, _STATE_NAMES | mixer_names(_MAMBA1_NAMES), _mamba1_transform, keys=_STATE_KEYS
    ),
    Family(
        "falcon_mamba",
        "FalconMambaForCausalLM",
        _falcon_mamba,
        {**_STATE_DEFAULTS, "mixer_rms_eps": 1e-6},
        _STATE_NAMES | mixer_names(_MAMBA1_NAMES | dict.fromkeys(("gate_q_norm", "gate_k_norm", "decay_norm"), "mamba.x_proj")),
        _mamba1_transform,
        keys=_STATE_KEYS,
    ),
    Family(
        "mamba2",
        "Mamba2ForCausalLM",
        _mamba2,
        {
            **{**_STATE_DEFAULTS, "vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64, "state_size": 128},
            **{"num_heads": 128, "head_dim": 64, "n_groups": 8, "tie_word_embeddings": False},
        },
        _STATE_NAMES | mixer_names(MAMBA2_NAMES),
        mamba2_transform,
        keys={**_STATE_KEYS, "mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_n_groups": "n_groups"},
    ),
    Family(
        "jamba",
        "JambaForCausalLM",
        _jamba,
        {
            **{"max_position_embeddings": 262_144, "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2},
            **{"expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4},
            **{"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto", "mamba_conv_bias": True},
            **{"mamba_proj_bias": False, "rms_norm_eps": 1e-6},
        },
        {
            **{**LLAMA_NAMES, **_MAMBA1_NAMES, "norm": "model.final_layernorm", "mlp_norm": "pre_ff_layernorm"},
            **{"gate_q_norm": "mamba.c_layernorm", "gate_k_norm": "mamba.b_layernorm", "decay_norm": "mamba.dt_layernorm"},
            **{"gate_up": "feed_forward.gate_proj feed_forward.up_proj", "down": "feed_forward.down_proj", "router": "feed_forward.router"},
            "experts.gate_up": "feed_forward.experts.{index}.gate_proj feed_forward.experts.{index}.up_proj",
            "experts.down": "feed_forward.experts.{index}.down_proj",
        },
        _mamba1_transform,
    ),
    Family(
        "minimax",
        "MiniMaxForCausalLM",
        _minimax,
        {
            **{"max_position_embeddings": 131_072, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
            **{"rms_norm_eps": 1e-5, "rope_theta": 1e6},
            **{f"{name}_alpha_factor": 1 for name in ("full_attn", "linear_attn", "mlp")},
        },
        {
            **{**MIXTRAL_NAMES, "recur_in": "self_attn.qkv_proj self_attn.output_gate"},
            **{"recur_norm": "self_attn.norm", "recur_out": "self_attn.out_proj"},
        },
        _minimax_transform,
        r".*(rotary_emb\.inv_freq|slope_rate|query_decay|key_decay|diagonal_decay)",
    ),
)
