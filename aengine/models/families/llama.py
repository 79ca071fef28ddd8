"""Llama 2 to 4, Mistral, Qwen2, Qwen3, MiMo: pre-norm blocks of grouped-query attention and a gated MLP, or experts (Llama 4).

Also EAGLE-3 heads, of one block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aengine.api.errors import ModelLoadError
from aengine.kernels.params import RouterScoring
from aengine.layers.rotary import QueryScale
from aengine.models.config.reader import ConfigReader, NotNativeError
from aengine.models.families.family import (
    LLAMA_NAMES,
    Family,
    Transform,
    attention,
    decoder_spec,
    experts,
    gated_mlp,
    halves,
    head_sizes,
    layer_kinds,
    part_sizes,
    rms_norm,
    rope_and_context,
    routing,
    transposed_experts,
    window_of,
    with_keys,
)
from aengine.models.spec import DraftHead, HeadKind, Layer, ModelSpec, Norm, QkNorm


def _spec(
    reader: ConfigReader,
    windows: list[int | None],
    *,
    qkv_bias: bool,
    output_bias: bool,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    query_scale: QueryScale | None = None,
) -> ModelSpec:
    """Layers that differ in their windows alone."""
    rope, context = rope_and_context(reader, head_sizes(reader)[2])
    norm = rms_norm(reader)
    layers = [
        Layer(
            attention=attention(
                reader,
                rope,
                window=window,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                qk_norm=QkNorm(norm) if qk_norm else None,
                query_scale=query_scale,
            ),
            mlp=gated_mlp(reader, bias=mlp_bias),
            attention_norm=norm,
            mlp_norm=norm,
        )
        for window in windows
    ]
    return decoder_spec(reader, layers, max_position_embeddings=context)


def _llama(reader: ConfigReader) -> ModelSpec:
    bias = reader.flag("attention_bias")
    return _spec(reader, uniform_windows(reader, None), qkv_bias=bias, output_bias=bias, mlp_bias=reader.flag("mlp_bias"))


def _mistral(reader: ConfigReader, query_scale: QueryScale | None = None) -> ModelSpec:
    window = reader.positive_or_none("sliding_window")
    return _spec(reader, uniform_windows(reader, window), qkv_bias=False, output_bias=False, query_scale=query_scale)


def _ministral3(reader: ConfigReader) -> ModelSpec:
    """Queries grow with their positions, beyond the context that the rope was made for."""
    key = "rope_scaling" if reader.get("rope_scaling") else "rope_parameters"
    given = reader.get(key)
    if not isinstance(given, dict):
        return _mistral(reader)
    others = {name: value for name, value in given.items() if name not in ("llama_4_scaling_beta", "max_position_embeddings")}
    scale = None
    if given.get("llama_4_scaling_beta") is not None:
        rope = replace(reader, config=given, defaults={})
        scale = QueryScale(rope.number("llama_4_scaling_beta"), rope.positive("original_max_position_embeddings"))
    return _mistral(with_keys(reader, {key: others}), scale)


def _cwm(reader: ConfigReader) -> ModelSpec:
    if reader.get("rope_scaling") is None:
        reader = with_keys(reader, {"rope_parameters": reader.get("rope_parameters")})  # with the family's
    windows = [window_of(reader, kind) for kind in layer_kinds(reader, 4, first=True)]
    return _spec(reader, windows, qkv_bias=False, output_bias=False, mlp_bias=reader.flag("mlp_bias"))


def _llama4(reader: ConfigReader) -> ModelSpec:
    """Layers with a rope attend within chunks of positions. Those without attend to all, and their queries grow with their positions."""
    num_layers, head_dim = reader.positive("num_hidden_layers"), head_sizes(reader)[2]
    rope, context = rope_and_context(reader, head_dim)
    rotated = no_rope_layers(reader)
    default = ["chunked_attention" if one else "full_attention" for one in rotated]
    kinds = reader.layer_types(num_layers, ("full_attention", "chunked_attention")) or default
    chunk, bias, norm = reader.positive_or_none("attention_chunk_size"), reader.flag("attention_bias"), rms_norm(reader)
    # transformers norms what was rotated: the same, for a rotation keeps the length of a head.
    qk_norm = QkNorm(Norm(eps=norm.eps, weighted=False)) if reader.flag("use_qk_norm") else None
    scale = None
    if reader.get("attn_temperature_tuning"):  # true, or 4 in the first checkpoints
        scale = QueryScale(reader.number("attn_scale"), reader.positive("floor_scale"), ahead=1)
    attentions = {
        (bool(one), kind): attention(
            reader,
            rope if one else None,
            window=chunk if kind == "chunked_attention" else None,
            chunked=kind == "chunked_attention" and chunk is not None,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=qk_norm if one else None,
            query_scale=None if one else scale,
        )
        for one, kind in zip(rotated, kinds, strict=True)
    }
    step = reader.positive("interleave_moe_layer_step")
    sparse = reader.integers("moe_layers", list(range(step - 1, num_layers, step)))
    how = routing(reader, scoring=RouterScoring.SIGMOID, normalize=False)
    block = experts(reader, how, size="intermediate_size", shared=gated_mlp(reader), scaled_inputs=True)
    dense = gated_mlp(reader, size="intermediate_size_mlp")
    layers = [
        Layer(attentions[bool(one), kind], block if layer in sparse else dense, norm, norm)
        for layer, (one, kind) in enumerate(zip(rotated, kinds, strict=True))
    ]
    return decoder_spec(reader, layers, max_position_embeddings=context)


def no_rope_layers(reader: ConfigReader) -> list[Any]:
    """Return for each layer whether it has a rope: by `no_rope_layers`, or all but each `no_rope_layer_interval`-th."""
    num_layers, interval = reader.positive("num_hidden_layers"), reader.positive("no_rope_layer_interval")
    rotated = reader.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) != num_layers:
        raise ModelLoadError(f"no_rope_layers {rotated!r} in {reader.source.file} does not have an entry for each of {num_layers} layers")
    return rotated


def _llama4_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    found = transposed_experts(spec, layer, name, part, shape, alternating=False)
    return halves(spec, layer, name, part, shape) if found is None else found


def uniform_windows(reader: ConfigReader, window: int | None) -> list[int | None]:
    """Return one window for all layers. Raises ModelLoadError for other `layer_types`, which transformers would ignore."""
    num_layers = reader.positive("num_hidden_layers")
    expected = "full_attention" if window is None else "sliding_attention"
    kinds = reader.layer_types(num_layers)
    if kinds is not None and set(kinds) != {expected}:
        raise NotNativeError(f"layer_types other than {expected} in every layer is not supported for this family")
    return [window] * num_layers


def late_windows(reader: ConfigReader, window: int | None) -> list[str]:
    """Return the kind of each layer: by layer_types, or with a window from max_window_layers on, if there is one."""
    num_layers = reader.positive("num_hidden_layers")
    first = reader.count("max_window_layers", num_layers)
    default = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(num_layers)]
    return reader.layer_types(num_layers) or default


def qwen_windows(reader: ConfigReader) -> list[int | None]:
    """Return the window of each layer, by use_sliding_window, max_window_layers and layer_types."""
    window = reader.positive_or_none("sliding_window") if reader.flag("use_sliding_window") else None
    return [window if kind == "sliding_attention" else None for kind in late_windows(reader, window)]


def _qwen2(reader: ConfigReader) -> ModelSpec:
    return _spec(reader, qwen_windows(reader), qkv_bias=True, output_bias=False)


def _qwen3(reader: ConfigReader) -> ModelSpec:
    bias = reader.flag("attention_bias")
    return _spec(reader, qwen_windows(reader), qkv_bias=bias, output_bias=bias, qk_norm=True)


def _mimo_transform(spec: ModelSpec, layer: Layer | None, name: str, part: int, shape: tuple[int, ...]) -> Transform | None:
    """The columns of the hidden state come before those of the embedding."""
    if name != "combine.weight":
        return None
    return Transform(shape, lambda tensor: np.concatenate(np.split(tensor, 2, axis=1)[::-1], axis=1), by_rows=False)


def _eagle3(reader: ConfigReader) -> ModelSpec:
    """A head without its target: that of `choice.py` is whole."""
    reader.refuse(num_hidden_layers=1, fc_norm=None, use_aux_norm=False, norm_output=False, bias=False)
    given, eagle = reader.get("eagle_aux_hidden_state_layer_ids"), reader.part("eagle_config")
    if given is not None:  # as vLLM counts them: layers whose inputs are read
        taps = tuple(reader.integers("eagle_aux_hidden_state_layer_ids", ()))
    else:  # layers whose outputs are read
        taps = tuple(layer + 1 for layer in eagle.integers("eagle_aux_hidden_state_layer_ids", ()))
    spec = _llama(reader)
    head = DraftHead(
        HeadKind.EAGLE3,
        rms_norm(reader),
        target_size=reader.positive("target_hidden_size", spec.hidden_size),
        target_layers=0,
        taps=taps,
        normed_residual=reader.flag("norm_before_residual"),
        num_draft_ids=reader.positive("draft_vocab_size", spec.vocab_size),
    )
    return replace(spec, layers=(replace(spec.layers[0], attention_norm=None),), tied_head=False, draft_head=head)


_EAGLE3_NAMES = {
    **LLAMA_NAMES,
    "embedding": "embed_tokens",
    "norm": "norm",
    "layer": "midlayer",
    "fuse": "fc",
    "embedding_norm": "midlayer.input_layernorm",
    "hidden_norm": "midlayer.hidden_norm",
}
_MIMO_MTP_NAMES = {
    "layer": "model.mtp_layers.0",
    "embedding_norm": "model.mtp_layers.0.token_layernorm",
    "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
    "combine": "model.mtp_layers.0.input_proj",
    "norm": "model.mtp_layers.0.final_layernorm",
}
_LLAMA4_NAMES = {
    **LLAMA_NAMES,
    "gate_up": "feed_forward.gate_proj feed_forward.up_proj",
    "down": "feed_forward.down_proj",
    "router": "feed_forward.router",
    "experts.gate_up.weight": "feed_forward.experts.gate_up_proj",
    "experts.down.weight": "feed_forward.experts.down_proj",
    "shared.gate_up": "feed_forward.shared_expert.gate_proj feed_forward.shared_expert.up_proj",
    "shared.down": "feed_forward.shared_expert.down_proj",
}
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32}
_QWEN_VL = {**_QWEN, "num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
_OMNI = {**_QWEN, "num_key_value_heads": 4, "sliding_window": 32768, "rope_theta": 1e6, "tie_word_embeddings": True}
_QWEN_SIZES, _QWEN_VL_SIZES = part_sizes(151_936, 4096, 22_016, 32, 32), part_sizes(152_064, 8192, 29_568, 80, 64)
FAMILIES = (
    Family("qwen3", "Qwen3ForCausalLM", _qwen3, {**_QWEN, "head_dim": 128}, part_defaults=_QWEN_SIZES),
    Family("qwen2", "Qwen2ForCausalLM", _qwen2, _QWEN, part_defaults=_QWEN_SIZES),
    Family("llama", "LlamaForCausalLM", _llama, {"max_position_embeddings": 2048}, part_defaults=part_sizes(32_000, 4096, 11_008, 32, 32)),
    Family(
        "llama4_text",
        "Llama4ForCausalLM",
        _llama4,
        {
            **{"max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
            **{"num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 16_384, "interleave_moe_layer_step": 1},
            **{"use_qk_norm": True, "no_rope_layer_interval": 4, "attention_chunk_size": 8192},
            **{"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
        },
        _LLAMA4_NAMES,
        _llama4_transform,
        part_defaults=part_sizes(202_048, 5120, 8192, 48, 40),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        _mistral,
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        part_defaults=part_sizes(32_000, 4096, 14_336, 32, 32),
    ),
    Family(
        "ministral3",
        "Ministral3ForCausalLM",
        _ministral3,
        {
            **{"max_position_embeddings": 262_144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
            "rope_parameters": {
                **{"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384, "beta_fast": 32.0},
                **{"beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1},
            },
        },
        part_defaults=part_sizes(131_072, 4096, 14_336, 34, 32),
    ),
    Family(
        "cwm",
        "CwmForCausalLM",
        _cwm,
        {
            **{"max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 8192},
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    Family(
        "internlm3",
        "InternLM3ForCausalLM",
        _llama,
        {"max_position_embeddings": 32_768, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
        keys={"attention_bias": "qkv_bias attention_bias", "mlp_bias": "bias mlp_bias"},
    ),
    Family(
        "iquestcoder",
        "IQuestCoderForCausalLM",
        _llama,
        {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    ),
    Family(
        "helium",
        "HeliumForCausalLM",
        _llama,
        {"max_position_embeddings": 4096, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
        transform=halves,
    ),
    # The text parts of Qwen2-VL, 2.5-VL, 2.5-Omni and 3-VL.
    Family("qwen2_vl_text", "", _qwen2, _QWEN_VL, part_defaults=_QWEN_VL_SIZES),
    Family("qwen2_5_vl_text", "", _qwen2, _QWEN_VL, part_defaults=_QWEN_VL_SIZES),
    Family("qwen2_5_omni_text", "", _qwen2, _OMNI, part_defaults=part_sizes(152_064, 3584, 18_944, 28, 28)),
    Family(
        "qwen3_vl_text",
        "",
        _qwen3,
        {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 128_000, "rope_theta": 5e5},
        part_defaults=_QWEN_SIZES,
    ),
    Family("mimo", "MiMoForCausalLM", _qwen2, _QWEN, transform=_mimo_transform, mtp_names=_MIMO_MTP_NAMES),
    Family(
        "llama_eagle3",
        "LlamaForCausalLMEagle3",
        _eagle3,
        {"max_position_embeddings": 2048},
        _EAGLE3_NAMES,
        ignored="t2d|d2t",  # which tokens the output head has: see `choice.py`
        other_names={"model.layers.0.": "midlayer.", "layers.0.": "midlayer.", "model.": ""},
    ),
)
