"""Cases of dense decoders: Llama and what grew from it, Gemma, GLM, OLMo, Phi, Granite, Cohere."""

from __future__ import annotations

from family_cases import TINY, Case
from reference import LLAMA3

SLIDING = "sliding_attention"
FULL = "full_attention"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 9.0, 14.0],
}
GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "sliding_window": 12,
    "final_logit_softcapping": 3.0,
    "hidden_activation": "gelu_pytorch_tanh",
}

CASES = [
    Case("llama", "Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    Case("llama-dynamic", "Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    Case("mistral", "Mistral", {"sliding_window": 12, "head_dim": 32}),
    Case(
        "ministral",
        "Ministral",
        {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 12, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
    ),
    Case("qwen2", "Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    Case("qwen3", "Qwen3", {"head_dim": 32, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    Case("gemma2", "Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}),
    Case("vaultgemma", "VaultGemma", {**GEMMA, "attn_logit_softcapping": 2.0}),
    Case(
        "ministral3",
        "Ministral3",
        {
            **{"head_dim": 24, "max_position_embeddings": 128},
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0},
                **{"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
            },
        },
    ),
    Case("cwm", "Cwm", {"head_dim": 32, "bos_token_id": 1, "num_hidden_layers": 5, "sliding_window": 12, "rope_parameters": LLAMA3}),
    Case("internlm3", "InternLM3", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    Case("helium", "Helium", {"head_dim": 16, "bos_token_id": 1}),
    Case("iquestcoder", "IQuestCoder", {"head_dim": 32}),
    Case(
        "granite-swa",
        "GraniteSWA",
        {
            **{"num_hidden_layers": 4, "sliding_window": 12, "layer_rope_theta": [1e4, 0, 300.0, 1e4], "attention_multiplier": 0.3},
            **{"embedding_multiplier": 2.0, "head_dim": 16},
        },
    ),
    Case(
        "granitemoe-swa",
        "GraniteMoeSWA",
        {
            **{"num_hidden_layers": 3, "sliding_window": 12, "layer_types": [SLIDING, FULL, SLIDING], "num_local_experts": 4},
            **{"shared_intermediate_size": 48, "intermediate_size": 32, "attention_multiplier": 0.25},
        },
    ),
    Case(
        "hyperclovax",
        "HyperCLOVAX",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.6, "embedding_multiplier": 3.0, "logits_scaling": 0.5, "head_dim": 16},
    ),
    Case("gemma2-biased", "Gemma2", {**GEMMA, "attention_bias": True, "final_logit_softcapping": None, "layer_types": [FULL, SLIDING] * 2}),
    Case(
        "gemma3",
        "Gemma3Text",
        {
            **GEMMA,
            "final_logit_softcapping": None,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING],
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                FULL: {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            },
        },
    ),
    Case(
        "gemma3-with-images",
        "Gemma3",
        {
            "text_config": {**TINY, **GEMMA, "final_logit_softcapping": None, "sliding_window_pattern": 2},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
        whole=True,
    ),
    Case("phi3", "Phi3", {"sliding_window": 12}),
    Case("phi4-partial", "Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    Case("phi3-short", "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 96}, max_model_len=96),
    Case(
        "phi3-long", "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}, lengths=(17, 18, 19, 23, 30, 33, 41, 48)
    ),
    Case("glm", "Glm", {"head_dim": 16}),
    Case("glm4", "Glm4", {"head_dim": 32, "attention_bias": False}),
    Case("olmo2", "Olmo2", {"attention_bias": True}),
    Case(
        "olmo3",
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 12,
            "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: YARN},
        },
    ),
    Case("smollm3", "SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    Case("smollm3-windowed", "SmolLM3", {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 12}),
    Case(
        "granite",
        "Granite",
        {
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "embedding_multiplier": 5.0,
            "logits_scaling": 3.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Case("cohere2", "Cohere2", {"num_hidden_layers": 5, "sliding_window": 12, "logit_scale": 0.3}),
    Case("seed-oss", "SeedOss", {"head_dim": 32, "mlp_bias": True}),
    Case("arcee", "Arcee", {"attention_bias": True, "mlp_bias": True}),
    Case("ernie4-5", "Ernie4_5", {"head_dim": 32, "use_bias": True}),
    Case("exaone4", "Exaone4", {"num_hidden_layers": 5, "sliding_window": 12, "tie_word_embeddings": True}),
    Case("exaone4-full", "Exaone4", {"sliding_window": None, "layer_types": [FULL] * 3}),
    Case("gemma", "Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    Case("phi", "Phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    Case("nemotron", "Nemotron", {"mlp_bias": True, "head_dim": 32, "intermediate_size": 24, "num_hidden_layers": 2}),
    Case("cohere", "Cohere", {"logit_scale": 0.3, "attention_bias": True}),
]
