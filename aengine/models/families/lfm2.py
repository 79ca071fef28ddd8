"""LFM2: layers of grouped-query attention among layers of short convolutions, with a gated MLP or experts."""

from __future__ import annotations

from typing import Any

from aengine.kernels.layer_params import RouterScoring
from aengine.models.config.reader import ConfigReader, NotNativeError
from aengine.models.families.family import (
    LLAMA_NAMES,
    Family,
    Transform,
    attention,
    decoder_spec,
    head_sizes,
    part_sizes,
    rms_norm,
    rope_and_context,
)
from aengine.models.families.mixtures import dense_layers, experts, routing
from aengine.models.spec import Experts, Layer, Mlp, ModelSpec, QkNorm, ShortConvolution


def _layers(reader: ConfigReader, mlps: list[Mlp | Experts]) -> ModelSpec:
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm, num_layers = rms_norm(reader), reader.positive("num_hidden_layers")
    kinds = reader.layer_types(num_layers, ("conv", "full_attention"))
    if kinds is None:
        full = reader.integers("full_attn_idxs", list(range(num_layers)))
        kinds = ["full_attention" if index in full else "conv" for index in range(num_layers)]
    if "full_attention" not in kinds:
        raise NotNativeError("layers of convolutions alone, without any full_attention in layer_types, are not supported")
    convolution = ShortConvolution(reader.positive("hidden_size"), reader.positive("conv_L_cache"), reader.flag("conv_bias"))
    attended = attention(reader, rope, qk_norm=QkNorm(norm))
    layers = [
        Layer(attention=convolution if kind == "conv" else attended, mlp=mlp, attention_norm=norm, mlp_norm=norm)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]
    tied = reader.flag("tie_embedding", reader.flag("tie_word_embeddings"))  # the older name wins
    return decoder_spec(reader, layers, max_position_embeddings=context, tied_head=tied)


def _width(reader: ConfigReader) -> int:
    return reader.positive("intermediate_size" if reader.get("block_ff_dim") is None else "block_ff_dim")


def _lfm2(reader: ConfigReader) -> ModelSpec:
    size = _width(reader)
    if reader.flag("block_auto_adjust_ff_dim", True):
        multiple = reader.positive("block_multiple_of")
        size = int(reader.positive_number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return _layers(reader, [Mlp(size)] * reader.positive("num_hidden_layers"))


def _lfm2_moe(reader: ConfigReader) -> ModelSpec:
    how = routing(
        reader,
        scoring=RouterScoring.SIGMOID,
        normalize=reader.flag("norm_topk_prob"),
        scaling=reader.number("routed_scaling_factor", 1.0),
    )
    block, mlp = experts(reader, how, correction=reader.flag("use_expert_bias")), Mlp(_width(reader))
    return _layers(reader, [mlp if dense else block for dense in dense_layers(reader)])


def _transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """The checkpoint's convolution is one of one input channel for each output channel."""
    return Transform((shape[0], 1, shape[1]), lambda rows: rows.flatten(1)) if name == "conv.weight" else None


_NAMES = {
    **LLAMA_NAMES,
    "norm": "model.embedding_norm",
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "output": "self_attn.out_proj",
    "conv_in": "conv.in_proj",
    "conv": "conv.conv",
    "conv_out": "conv.out_proj",
    "gate_up": "feed_forward.w1 feed_forward.w3",
    "down": "feed_forward.w2",
    "router": "feed_forward.gate",
    "router_correction": "feed_forward.expert_bias",
    "experts.gate_up": "feed_forward.experts.{index}.w1 feed_forward.experts.{index}.w3",
    "experts.down": "feed_forward.experts.{index}.w2",
}


def _family(model_type: str, architecture: str, read: Any, sizes: dict[str, Any], **defaults: Any) -> Family:
    common = {"tie_word_embeddings": True, "norm_eps": 1e-5, "num_key_value_heads": 8, "conv_L_cache": 3, "rope_theta": 1e6}
    return Family(
        model_type,
        architecture,
        read,
        defaults={"max_position_embeddings": 128_000, "eos_token_id": 2, **common, **defaults},
        names=_NAMES,
        transform=_transform,
        part_defaults=sizes,
        keys={"rms_norm_eps": "norm_eps", "first_k_dense_replace": "num_dense_layers"},
    )


FAMILIES = (
    _family(
        "lfm2",
        "Lfm2ForCausalLM",
        _lfm2,
        part_sizes(65_536, 2560, 12_288, 32, 32),
        block_multiple_of=256,
    ),
    _family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _lfm2_moe,
        part_sizes(65_536, 2048, 7168, 32, 32),
        num_experts=32,
        moe_intermediate_size=1792,
        num_experts_per_tok=4,
        num_dense_layers=2,
        norm_topk_prob=True,
        use_expert_bias=True,
    ),
)
