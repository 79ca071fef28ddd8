"""Cases of the families with LayerNorms: StarCoder 2, StableLM, GPT-2, GPT-NeoX, GPT-J, CodeGen, GPT-Neo, OPT, Bloom, MPT, Falcon."""

from __future__ import annotations

import dataclasses

import torch
import transformers
from family_cases import COUNT, VOCAB, Case

LONGEST = max(Case("", "").lengths) + COUNT  # so that all learned positions are reached
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": LONGEST, "eos_token_id": None, "bos_token_id": None}
_ENDLESS = {"eos_token_id": None, "bos_token_id": None}
_GPTJ = {**_GPT2, "n_positions": 128, "rotary_dim": 6}
_GPT_NEO = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "max_position_embeddings": LONGEST, "window_size": 12},
    **{"attention_types": [[["global", "local"], 1], [["local"], 1]], **_ENDLESS},
}
_BLOOM = {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 3, "n_head": 4, **_ENDLESS}
_MPT = {"vocab_size": VOCAB, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 128, **_ENDLESS}
_FALCON = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, **_ENDLESS}
_ALIBI_FALCON = {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
_NEW_FALCON = {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
_HALF_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}


@torch.no_grad()
def _adjust(model: transformers.PreTrainedModel) -> None:
    """Attention looks at fewer tokens: without it the outputs of such models soon repeat. GPT-Neo's does, as it does not scale scores."""
    if model.config.model_type == "gpt_neo":
        return
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "c_attn.weight", "query_key_value.weight", "qkv_proj.weight", "Wqkv.weight")):
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
    Case("gptj", "GPTJ", _GPTJ, whole=True),
    Case("codegen", "CodeGen", {**_GPTJ, "n_head": 8, "n_inner": 96}, whole=True),
    Case("gpt-neo", "GPTNeo", _GPT_NEO, whole=True),
    Case("bloom", "Bloom", _BLOOM, whole=True),
    Case("bloom-twelve-heads", "Bloom", {**_BLOOM, "n_head": 12, "hidden_size": 72, "tie_word_embeddings": False}, whole=True),
    Case("mpt", "Mpt", {**_MPT, "attn_config": {"softmax_scale": 0.3}}, whole=True),
    Case("falcon", "Falcon", {**_FALCON, "ffn_hidden_size": 96}, whole=True),
    Case("falcon-alibi", "Falcon", _ALIBI_FALCON, whole=True, attention="sdpa"),  # eager attention adds the biases twice
    Case("falcon-new", "Falcon", {**_NEW_FALCON, "ffn_hidden_size": 96}, whole=True),
    Case("falcon-one-norm", "Falcon", {**_NEW_FALCON, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}, whole=True),
    Case("opt", "OPT", {"ffn_dim": 96, "max_position_embeddings": LONGEST}),
    Case("opt-untied", "OPT", {"ffn_dim": 96, "enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"}),
]
CASES = [dataclasses.replace(case, adjust=_adjust) for case in _CASES]
