"""Granite: as Llama, with multipliers; with experts, with experts and an MLP for all tokens; and Granite 4, where most layers have Mamba-2.
And Cohere 2 with experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from aengine.kernels.layer_params import RouterScoring
from aengine.models.config.reader import ConfigReader, NotNativeError
from aengine.models.families.family import (
    LLAMA_NAMES,
    Family,
    Transform,
    attention,
    decoder_spec,
    gated_mlp,
    halves,
    head_sizes,
    part_sizes,
    rms_norm,
    rope_and_context,
    window_of,
)
from aengine.models.families.hybrids import MAMBA2_DEFAULTS, MAMBA2_NAMES, mamba2, mamba2_transform
from aengine.models.families.mixtures import DEEPSEEK_NAMES, experts, listed_dense_layers, routing
from aengine.models.spec import Experts, Layer, Mlp, ModelSpec, Norm, NormKind, Recurrence


def _spec(
    reader: ConfigReader, mlp: Mlp | Experts, *, rotated: bool = True, recurrence: Recurrence | None = None, attends: Sequence[bool] = ()
) -> ModelSpec:
    """`attends`: by layer, whether it has attention, or else the recurrence."""
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, bias = rms_norm(reader), reader.flag("attention_bias")
    scale = reader.number("attention_multiplier")
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


def _experts(reader: ConfigReader) -> Experts:
    shared = gated_mlp(reader, size="shared_intermediate_size") if reader.positive_or_none("shared_intermediate_size") else None
    return experts(reader, routing(reader), size="intermediate_size", shared=shared)


def _granitemoe(reader: ConfigReader) -> ModelSpec:
    return _spec(reader, _experts(reader))


def _granitemoehybrid(reader: ConfigReader) -> ModelSpec:
    num_layers = reader.positive("num_hidden_layers")
    kinds = reader.layer_types(num_layers, ("mamba", "linear_attention", "attention", "full_attention")) or ["mamba"] * num_layers
    attends = [kind in ("attention", "full_attention") for kind in kinds]
    if not any(attends):
        raise NotNativeError("no layer has attention by layer_types, which is not supported")
    mlp = _experts(reader) if reader.positive_or_none("num_local_experts") else gated_mlp(reader, size="shared_intermediate_size")
    rotated = reader.get("position_embedding_type") == "rope"
    width = reader.positive("mamba_expand") * reader.positive("hidden_size")
    return _spec(reader, mlp, rotated=rotated, recurrence=None if all(attends) else mamba2(reader, width=width), attends=attends)


def _transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """A tensor holds all experts: [experts, out, in]."""
    if layer is None or not name.startswith("experts.") or not isinstance(layer.mlp, Experts):
        return mamba2_transform(spec, layer, name, part, shape)
    count = layer.mlp.num_experts

    def apply(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, tensor.shape[-1])

    return Transform((count, shape[0] // count, *shape[1:]), apply)


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
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _granitemoehybrid,
        {**_EXPERTS, **MAMBA2_DEFAULTS, "shared_intermediate_size": 1024},
        _NAMES,
        _transform,
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
)
