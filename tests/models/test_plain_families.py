"""Checkpoints of the families with LayerNorms: how they name and store what the parameters are made of."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from test_weights import Tensors, load

from aengine.api.errors import ModelLoadError
from aengine.models.choice import find_spec, implementation_of
from aengine.models.config.model_config import load_spec, read_spec
from aengine.models.spec import Norm, NormKind, QkNorm

_SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
_GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
CONFIGS: dict[str, dict] = {
    "gpt2": _GPT2,
    "gpt_neox": {**_SIZES, "intermediate_size": 48},
    "opt": {**_SIZES, "ffn_dim": 48},
    **{family: {**_GPT2, "rotary_dim": 4} for family in ("gptj", "codegen")},
    "gpt_neo": {
        **{"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64},
        **{"attention_types": [[["global", "local"], 1]]},
    },
    "bloom": {"vocab_size": 97, "n_embed": 32, "n_layer": 2, "num_attention_heads": 4},
    "mpt": {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "falcon": {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "starcoder2": {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2},
    "stablelm": {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2},
}


def saved(family: str, folder: pathlib.Path, **changes) -> transformers.PreTrainedModel:
    """A random model, in `folder` as transformers saves it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**CONFIGS[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return model


def test_gpt2(tmp_path: pathlib.Path) -> None:
    block = saved("gpt2", tmp_path).transformer.h[1]
    loaded = load(load_spec(tmp_path), tmp_path)
    assert torch.equal(loaded["layers.1.qkv.weight"], block.attn.c_attn.weight.t())
    assert torch.equal(loaded["layers.1.down.weight"], block.mlp.c_proj.weight.t())
    assert torch.equal(loaded["layers.1.down.bias"], block.mlp.c_proj.bias)


def test_gpt_neox_has_queries_keys_and_values_by_head(tmp_path: pathlib.Path) -> None:
    attention = saved("gpt_neox", tmp_path).gpt_neox.layers[0].attention
    loaded = load(load_spec(tmp_path), tmp_path)
    x = torch.randn(3, 32)
    expected = attention.query_key_value(x).view(3, 4, 3, 8).unbind(2)
    found = F.linear(x, loaded["layers.0.qkv.weight"], loaded["layers.0.qkv.bias"]).view(3, 3, 4, 8).unbind(1)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_stablelm_has_a_norm_for_each_head(tmp_path: pathlib.Path) -> None:
    attention = saved("stablelm", tmp_path, qk_layernorm=True).model.layers[0].self_attn
    spec = load_spec(tmp_path)
    assert spec.layers[0].attention.qk_norm == QkNorm(Norm(NormKind.LAYER, 1e-5), head_weights=True)
    loaded = load(spec, tmp_path)
    assert torch.equal(loaded["layers.0.q_norm.weight"], torch.cat([norm.weight for norm in attention.q_layernorm.norms]))
    assert torch.equal(loaded["layers.0.k_norm.weight"], torch.cat([norm.weight for norm in attention.k_layernorm.norms]))


def without_first_word(tensors: Tensors) -> Tensors:
    return {name if name.startswith("lm_head.") else name.partition(".")[2]: tensor for name, tensor in tensors.items()}


def with_masks(name: str) -> Callable[[Tensors], Tensors]:
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    return lambda tensors: {**tensors, f"{name}.bias": mask, f"{name}.masked_bias": torch.tensor(-1e9)}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


STORED = {
    "gpt2 of the hub": ("gpt2", lambda tensors: with_masks("h.0.attn")(without_first_word(tensors))),
    "gpt2 with masks": ("gpt2", with_masks("transformer.h.0.attn")),
    "gpt_neox with lm_head": ("gpt_neox", renamed("embed_out", "lm_head")),
    "gpt_neox with masks": ("gpt_neox", with_masks("gpt_neox.layers.1.attention")),
    "gptj with masks": ("gptj", with_masks("transformer.h.0.attn")),
    "codegen with masks": ("codegen", lambda tensors: {**tensors, "transformer.h.1.attn.causal_mask": torch.ones(1, 1, 64, 64)}),
    "gpt_neo with masks": ("gpt_neo", with_masks("transformer.h.1.attn.attention")),
    "bloom of the hub": ("bloom", without_first_word),
    "opt without model": ("opt", without_first_word),
    "starcoder2 without model": ("starcoder2", without_first_word),
    "stablelm without model": ("stablelm", without_first_word),
}


@pytest.mark.parametrize("case", STORED)
def test_other_names_of_the_same_tensors(tmp_path: pathlib.Path, case: str) -> None:
    family, change = STORED[case]
    saved(family, tmp_path)
    spec, path = load_spec(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    expected = load(spec, tmp_path)
    changed = change(tensors)
    assert changed.keys() != tensors.keys()
    save_file(changed, path)
    found = load(spec, tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_tensor_under_both_of_its_names(tmp_path: pathlib.Path) -> None:
    saved("gpt_neox", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(97, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"it has more than one lm_head\.weight$"):
        load(load_spec(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 700}),
        ("gpt_neox", {"rotary_pct": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("stablelm", {"partial_rotary_factor": 0.5, "rope_theta": 700.0}),
        ("starcoder2", {"rope_theta": 999999.4, "sliding_window": 9}),
        ("gpt2", {"n_inner": None, "n_ctx": 64, "scale_attn_by_inverse_layer_idx": True}),
        ("gptj", {"n_inner": None, "rotary": True, "rotary_dim": 8, "scale_attn_weights": True}),
        ("codegen", {"n_inner": None, "rotary_dim": 6, "n_ctx": 64}),
        ("gpt_neo", {"attention_layers": ["global", "local"], "window_size": 9}),
        ("bloom", {"n_inner": None, "seq_length": 2048, "offset_alibi": 100, "pretraining_tp": 2, "layer_norm_epsilon": 1e-6}),
        ("mpt", {"attn_config": {"alibi": True, "attn_impl": "torch", "clip_qkv": None, "softmax_scale": 0.5}, "norm_type": "layernorm"}),
        ("falcon", {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False, "num_kv_heads": 4}),
        ("opt", {"word_embed_proj_dim": 32, "_remove_final_layer_norm": False, "init_std": 0.01}),
    ],
)
def test_config_files_as_they_are_published(family: str, changes) -> None:
    """Mean what Transformers makes of them."""
    given = {**CONFIGS[family], **changes, "model_type": family}
    whole = transformers.CONFIG_MAPPING[family](**copy.deepcopy(given)).to_dict()
    spec = read_spec({**given, "eos_token_id": whole["eos_token_id"], "dtype": whole["dtype"]})
    assert spec == read_spec({**whole, "model_type": family})
    assert spec != read_spec({**CONFIGS[family], "model_type": family})


@pytest.mark.parametrize(
    "changes", [{"do_layer_norm_before": False}, {"word_embed_proj_dim": 16}, {"layer_norm_elementwise_affine": False}]
)
def test_opt_of_another_form_is_left_to_transformers(tmp_path: pathlib.Path, changes) -> None:
    (key,) = changes
    saved("opt", tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=f"^{key} .* in config.json is not supported"):
        find_spec(tmp_path, "native")
    assert implementation_of(find_spec(tmp_path, "auto")) == "transformers"


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm True"),
        ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "clip_qkv 6.0"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln True"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi False"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type 'multiquery_attention'"),
        ("mpt", {"expansion_ratio": 3}, "expansion_ratio 3"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn False"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2"),
        ("gptj", {"rotary_dim": 10}, "rotary_dim 10"),
        ("codegen", {"n_head": 2}, "n_head 2"),
        ("gpt_neo", {"attention_types": [[["global"], 1]]}, "attention_types "),
    ],
)
def test_variants_that_are_refused(family: str, changes, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^{reason}.* in config.json is not"):
        read_spec({**CONFIGS[family], **changes, "model_type": family})


def test_mpt_as_its_own_code_calls_it() -> None:
    given = {**CONFIGS["mpt"], "architectures": ["MPTForCausalLM"], "model_type": "mpt"}
    assert read_spec(given) == read_spec({**given, "architectures": ["MptForCausalLM"]})
