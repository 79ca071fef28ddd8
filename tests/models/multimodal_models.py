"""Small random models of the types that take images or audio beside text, whose text part is a decoder."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

_TEXT: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Keys that the config of a text part has take these values."""
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_OTHER: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers"), 1),
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "intermediate_size", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "encoder_attention_heads"), 2),
    "out_hidden_size": 64,
}
"""Keys of the other parts, which text never enters."""
TEXT_CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
    }
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    "qwen3_omni_moe_text": {"sliding_window": None},
    "paddleocr_vl_text": {"rope_parameters": _MROPE},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], "rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]}},
    "gemma4_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 211,
        "global_head_dim": 16,
        "num_global_key_value_heads": None,
    },
    "gemma3n_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 211, "num_kv_shared_layers": 2},
    "glm4v_moe_text": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
}
"""Model types of text parts -> further values."""
CHANGES: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "perception_lm": {"vision_config": {"model_type": "clip_vision_model"}},
    "fast_vlm": {"vision_config": {"model_type": "clip_vision_model"}},
}
"""Model types -> values of the whole config."""
OTHER_CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0]}},
}
"""Model types -> parts that text never enters -> their values."""

_NATIVE = (
    *(
        "blip-2",
        "deepseek_vl",
        "deepseek_vl_hybrid",
        "exaone4_5",
        "fast_vlm",
        "fun_asr_nano",
        "gemma3",
        "glm46v",
        "glm4v",
        "glmasr",
        "glmga",
        "got_ocr2",
        "lfm2_vl",
    ),
    *(
        "hyperclovax_vision_v2",
        "granite_speech",
        "granite_speech_plus",
        "idefics2",
        "idefics3",
        "instructblip",
        "instructblipvideo",
        "internvl",
        "janus",
    ),
    *(
        "lighton_ocr",
        "llama4",
        "llava",
        "llava_next",
        "llava_next_video",
        "llava_onevision",
        "mistral3",
        "moss_transcribe_diarize",
        "ovis2",
    ),
    *("pp_chart2table", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_asr", "qwen3_omni_moe_thinker"),
    *("qwen3_vl", "shieldgemma2", "smolvlm", "video_llama_3", "video_llava", "vipllava", "voxtral"),
)
_IN_TRANSFORMERS = (
    *("aria", "aya_vision", "chameleon", "cohere2_vision", "cosmos3_edge", "cosmos3_omni", "ernie4_5_vl_moe", "fuyu"),
    *("glm4v_moe", "glm_ocr", "granite_docling", "hunyuan_vl", "kimi_k25", "minimax_m3_vl", "mllama"),
    *("molmo2", "muse_glimmer", "paddleocr_vl", "paligemma", "phi4_multimodal", "qianfan_ocr", "qwen3_vl_moe", "step3p7"),
)
LOADED = dict.fromkeys(_NATIVE, "native") | dict.fromkeys(_IN_TRANSFORMERS, "transformers")
"""Types whose text part runs -> its implementation. Transformers saves kimi_k25, qianfan_ocr and qwen3_vl_moe otherwise than they are
published; as published they are native."""
_INDEXED = "has layers of the type 'indexed_attention'; supported are full_attention and sliding_attention"
_LINEAR = "has layers of the type 'linear_attention'; supported are full_attention and sliding_attention"
_CONV = "has layers of the type 'conv'; supported are full_attention and sliding_attention"
_ENCODER_DECODER = "is an encoder-decoder; supported are decoder-only models"
_NO_BASE = "has no base model apart from its head, which the transformers implementation needs"
_OTHER_INPUTS = "cannot be probed with tokens and position_ids alone"
REFUSED = {
    **dict.fromkeys(("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder"), _ENCODER_DECODER),
    **dict.fromkeys(("dots3_note", "glm5_next", "mistral_large4", "qwen4_exp"), _INDEXED),
    "nemotron_h_omni": _LINEAR,
    "lfm3_vl": _CONV,
    "inkling2": "has layers of the type 'hybrid'",
    "inkling_mm_model": "has layers of the type 'hybrid_sliding'",
    "unlimited_ocr": "has layers of the type 'reference_sliding_attention'",
    **dict.fromkeys(("blip", "kosmos-2", "kosmos-2.5"), _NO_BASE),
    **dict.fromkeys(("diffusion_gemma", "idefics", "mistral4", "pi0", "voxtral_realtime"), _OTHER_INPUTS),
    **dict.fromkeys(("deepseek_ocr2", "git"), "never calls the attention function of transformers"),
    "evolla": "is not a model that generates text",
}
"""Types that are refused -> what their sentence says."""
DESCRIBED = {
    **dict.fromkeys(("perception_lm", "qwen2_5_omni", "vibevoice_asr"), "native"),
    **dict.fromkeys(
        ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemo_speechlm", "qwen3_5", "qwen3_5_moe", "gemma3n", "gemma4", "gemma4_unified"),
        "native",
    ),
    "muse_spark": "transformers",
}
"""Types of which no small model can be made here, with their implementation by their config alone."""
NOT_MADE = frozenset({"cohere_compass", "emu3", "granite4_vision", "kyutai_speech_to_text", "qwen3_omni_moe"})
"""Types whose config class in Transformers makes no config that its own model class takes."""


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """`changes` are values of the text part."""
    config = CONFIG_MAPPING[model_type](**copy.deepcopy(CHANGES.get(model_type, {})))
    return _shrunk(config, changes)


def _shrunk(config: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    text = config.get_text_config(decoder=True)
    given: dict[str, Any] = {}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if not isinstance(part, PreTrainedConfig):
            continue
        if part is text:
            given[key] = _text_values(part, changes)
        elif text in [getattr(part, inner, None) for inner in part.sub_configs]:
            given[key] = _shrunk(part, changes).to_dict()
        else:
            given[key] = {**part.to_dict(), **{name: value for name, value in _OTHER.items() if isinstance(_get(part, name), int)}}
            given[key] |= OTHER_CHANGES.get(config.model_type, {}).get(key, {})
            if given[key].get("layer_types"):
                given[key]["layer_types"] = given[key]["layer_types"][:1]
    whole = {**config.to_dict(), **given}
    if text is config:
        whole |= _text_values(config, changes)
    return type(config)(**{name: value for name, value in whole.items() if name not in ("model_type", "transformers_version")})


def _text_values(text: PreTrainedConfig, changes: dict[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in _TEXT.items() if _get(text, key, key) != key}
    ropes = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in getattr(type(text), "ignore_keys_at_rope_validation", ()) and "rope_type" in ropes:
        values["rope_parameters"] = _MROPE
    # A copy, because configs write into what they are given.
    return copy.deepcopy({"model_type": text.model_type, **values, **TEXT_CHANGES.get(text.model_type, {}), **changes})


def _get(config: PreTrainedConfig, key: str, absent: Any = None) -> Any:
    try:
        return getattr(config, key, absent)
    except Exception:  # of a key that differs by layer
        return absent


def any_config(model_type: str) -> PreTrainedConfig:
    """A small one, or where there is none, that of the type's defaults."""
    try:
        return tiny_config(model_type)
    except Exception:  # of many types: the sizes of its parts have to fit one another
        return CONFIG_MAPPING[model_type]()


def make(config: PreTrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """All parameters random, float32; eager attention."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "norm" not in name:
            parameter.data.normal_(0.0, 0.2)
        elif "norm" in name or "ln_" in name:
            parameter.data.uniform_(0.5, 1.5) if name.endswith("weight") else parameter.data.normal_(0.0, 0.1)
        else:
            parameter.data.normal_(0.0, 0.3)
    return model
