"""Cases of the families with LayerNorms: StarCoder 2, StableLM, GPT-2, GPT-NeoX, OPT."""

from __future__ import annotations

import dataclasses

import torch
import transformers
from family_cases import COUNT, VOCAB, Case

LONGEST = max(Case("", "").lengths) + COUNT  # so that all learned positions are reached
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": LONGEST, "eos_token_id": None, "bos_token_id": None}
_HALF_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}


@torch.no_grad()
def _adjust(model: transformers.PreTrainedModel) -> None:
    """Attention looks at fewer tokens: without it the outputs of such models soon repeat."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "c_attn.weight", "query_key_value.weight")):
            parameter.mul_(3.0)


_CASES = [
    Case("starcoder2", "Starcoder2"),
    Case("starcoder2-windowed", "Starcoder2", {"sliding_window": 12, "use_bias": False, "hidden_act": "gelu"}),
    Case("stablelm", "StableLm", {"use_qkv_bias": True}),
    Case("stablelm-parallel", "StableLm", {"use_parallel_residual": True, "qk_layernorm": True, **_HALF_ROPE}),
    Case("gpt2", "GPT2", _GPT2, whole=True),
    Case(
        "gpt2-scaled",
        "GPT2",
        {**_GPT2, "n_inner": 96, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "activation_function": "gelu"},
        whole=True,
    ),
    Case("gpt-neox", "GPTNeoX", _HALF_ROPE),
    Case("gpt-neox-sequential", "GPTNeoX", {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}),
    Case("opt", "OPT", {"ffn_dim": 96, "max_position_embeddings": LONGEST}),
    Case("opt-untied", "OPT", {"ffn_dim": 96, "enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"}),
]
CASES = [dataclasses.replace(case, adjust=_adjust) for case in _CASES]
