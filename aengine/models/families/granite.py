"""Granite: as Llama, with multipliers; with experts, with experts and an MLP for all tokens; and Granite 4 where no layer is recurrent."""

from __future__ import annotations

from torch import Tensor

from aengine.models.config.reader import ConfigReader
from aengine.models.families.family import (
    LLAMA_NAMES,
    Family,
    Transform,
    attention,
    decoder_spec,
    gated_mlp,
    head_sizes,
    part_sizes,
    rms_norm,
    rope_and_context,
)
from aengine.models.families.mixtures import experts, routing
from aengine.models.spec import Experts, Layer, Mlp, ModelSpec


def _spec(reader: ConfigReader, mlp: Mlp | Experts, *, rotated: bool = True) -> ModelSpec:
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
    return decoder_spec(
        reader,
        [layer] * reader.positive("num_hidden_layers"),
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
    """Raises NotNativeError for a layer that is recurrent."""
    num_layers = reader.positive("num_hidden_layers")
    known = ("attention", "full_attention")
    reader.layer_types(num_layers, known)
    mlp = _experts(reader) if reader.positive_or_none("num_local_experts") else gated_mlp(reader, size="shared_intermediate_size")
    return _spec(reader, mlp, rotated=reader.get("position_embedding_type") == "rope")


def _transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """A tensor holds all experts: [experts, out, in]."""
    if layer is None or not name.startswith("experts.") or not isinstance(layer.mlp, Experts):
        return None
    count = layer.mlp.num_experts

    def apply(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, tensor.shape[-1])

    return Transform((count, shape[0] // count, *shape[1:]), apply)


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
        {**_EXPERTS, "shared_intermediate_size": 1024},
        _NAMES,
        _transform,
    ),
)
