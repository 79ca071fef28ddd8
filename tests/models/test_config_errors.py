"""What is wrong in a config.json is named: the key, in one sentence, whichever family reads it."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import transformers
from test_config_forms import NAMES, SIZES, WRITTEN_AS, architectures

from aengine.api.errors import ModelLoadError
from aengine.models.config.model_config import read_spec
from aengine.models.families import FAMILIES

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.1,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "truncate": True,
    },
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.1,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
}


class Read(dict):
    """A config that remembers which of its keys were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.keys_read: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


def of_wrong_type(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [5, ["x"], {"x": 1}]
    return ["x", ["x"], {"x": 1}, *([2] if isinstance(value, bool) else [])]


def out_of_range(value: Any) -> list[Any]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    return [0, -1, 1.5, float("nan"), float("inf"), 0.0, -0.5]


def whole_config(model_type: str) -> dict[str, Any]:
    given = {"architectures": architectures(model_type), **NAMES.get(model_type, SIZES)}
    config = transformers.CONFIG_MAPPING[WRITTEN_AS.get(model_type, model_type)](**copy.deepcopy(given)).to_dict()
    return {**config, "architectures": given["architectures"]}


def places(model_type: str) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """A config, an object in it, and a key of the object that the family reads; for every such key."""
    config = whole_config(model_type)
    read = Read(config)
    read_spec(read)
    for key in sorted(read.keys_read & config.keys() - {"architectures", "model_type", "dtype"}):
        changed = copy.deepcopy(config)
        yield changed, changed, key
    for key in config.get("rope_parameters") or {}:
        changed = copy.deepcopy(config)
        yield changed, changed["rope_parameters"], key


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_key_that_is_read(model_type: str) -> None:
    spec = read_spec(whole_config(model_type))
    complaints, count = [], 0
    for config, part, key in places(model_type):
        value = part[key]
        for wrong in of_wrong_type(value):
            complaints += complain(config, part, key, wrong, spec)
        for wrong in out_of_range(value):
            complaints += complain(config, part, key, wrong)
        del part[key]
        complaints += complain(config, part, key)
        count += 1
    assert not complaints, "\n".join(complaints)
    assert count >= 10


@pytest.mark.parametrize("value", [2**31, 10**400])
def test_numbers_that_nothing_can_have(value: int) -> None:
    for key in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "eos_token_id"):
        with pytest.raises(ModelLoadError, match=f"^{key} [0-9]+ "):
            read_spec({**whole_config("llama"), key: value})
    assert read_spec({**whole_config("mistral"), "sliding_window": 2**63 - 1}).layers[0].attention.window is None


def test_frequencies_that_are_no_numbers() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1e18}
    with pytest.raises(ModelLoadError, match=r"^the rope parameters in config\.json are out of range: "):
        read_spec({**whole_config("llama"), "rope_parameters": rope})


@pytest.mark.parametrize("rope_type", ROPES)
def test_every_key_of_a_rope(rope_type: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **SIZES, "max_position_embeddings": 128}
    whole = {"rope_type": rope_type, "rope_theta": 1e4, **ROPES[rope_type]}
    spec = read_spec({**config, "rope_scaling": whole})
    complaints = []
    for key, value in whole.items():
        part = dict(whole)
        for wrong in of_wrong_type(value):
            complaints += complain({**config, "rope_scaling": part}, part, key, wrong, spec)
        for wrong in out_of_range(value):
            complaints += complain({**config, "rope_scaling": part}, part, key, wrong)
    assert not complaints, "\n".join(complaints)


def complain(config: dict[str, Any], part: dict[str, Any], key: str, wrong: Any = None, unchanged: object = None) -> list[str]:
    """What is wrong with the answer to a value: it is to be refused by the name of its key, in one line. Without `unchanged` it may be
    accepted as well; with it, only if it makes no difference."""
    if wrong is not None:
        part[key] = wrong
    try:
        spec = read_spec(config)
    except ModelLoadError as error:
        named = {key, key.replace("rope_type", "rope type"), *(wrong if isinstance(wrong, dict) else ())}
        return [] if any(name in str(error) for name in named) and "\n" not in str(error) else [f"{key} {wrong!r}: {error}"]
    except Exception as error:
        return [f"{key} {wrong!r}: {type(error).__name__} {error}"]
    return [] if unchanged is None or spec == unchanged else [f"{key} {wrong!r} is accepted"]


NOT_OF_A_FORWARD_PASS = frozenset(
    [
        "activation_dropout",
        "attention_dropout",
        "attn_pdrop",
        "classifier_dropout",
        "dropout",
        "embd_pdrop",
        "embed_dropout",
        "embedding_dropout",
        "hidden_dropout",
        "initializer_range",
        "layerdrop",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "resid_dropout",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "use_cache",
        "_attn_implementation",
    ]
)
"""Keys that transformers reads to train, to classify, to initialise weights, or to say how it computes."""
UNREAD = {
    # By our names for them, or only where another key asks for them.
    "gpt2": "hidden_size max_position_embeddings num_attention_heads num_hidden_layers reorder_and_upcast_attn",
    "gptj": "hidden_size max_position_embeddings num_attention_heads",
    "codegen": "hidden_size max_position_embeddings n_ctx num_attention_heads",
    "gpt_neo": "attention_layers",  # made of attention_types
    "mpt": "hidden_size num_hidden_layers",
    "bloom": "num_hidden_layers pretraining_tp",  # only with slow_but_exact
    **dict.fromkeys(("qwen2", "qwen3", "mimo", "smollm3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), "sliding_window"),
    "qwen2_moe": "intermediate_size sliding_window",
    "qwen3_moe": "intermediate_size sliding_window",
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_omni_moe_text", "qwen3_5_moe_text"), "intermediate_size"),
    "deepseek_v2": "head_dim intermediate_size n_group num_key_value_heads topk_group",
    "deepseek_v3": "head_dim num_key_value_heads",
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "head_dim num_key_value_heads"),
    "glm4_moe_lite": "head_dim num_key_value_heads",
    "cohere2_moe": "norm_topk_prob prefix_dense_intermediate_size shared_expert_combination_strategy",
    "ernie4_5_moe": "num_experts_per_tok",
    "dots1": "intermediate_size",
    "solar_open": "intermediate_size",
    # Of recurrent layers: how Transformers computes prompts, and limits of its steps there.
    "granitemoehybrid": "layers_block_type mamba_chunk_size",
    "bamba": "layer_types layers_block_type mamba_chunk_size num_logits_to_keep z_loss_coefficient",
    "falcon_h1": "get_text_config layer_types mamba_chunk_size mamba_expand mamba_norm_before_gate num_logits_to_keep",
    "nemotron_h": "chunk_size get_text_config layer_types num_local_experts num_logits_to_keep rescale_prenorm_residual residual_in_fp32 "
    "time_step_floor time_step_max time_step_min use_mamba_kernels",
    **dict.fromkeys(
        ("mamba", "falcon_mamba", "mamba2"),
        "chunk_size intermediate_size layer_types rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_init_scheme "
        "time_step_limit time_step_max time_step_min time_step_rank time_step_scale use_associative_scan use_mamba_kernels use_mambapy",
    ),
    "jamba": "layer_types layers_block_type layers_num_experts use_associative_scan use_mamba_kernels use_mambapy",
    "minimax": "block_size",
    "kimi_linear": "n_group n_shared_experts norm_topk_prob num_experts_per_tok num_key_value_heads",  # by the names of its files
    # Without meaning for the model: another precision, images, a mask.
    "gpt_neox": "is_decoder",
    "gemma3n_text": "altup_coef_clip",  # of training
    "gemma4_text": "moe_intermediate_size num_experts top_k_experts",  # where it has experts
    "gemma3_text": "get_text_config image_token_id mm_tokens_per_image text_config vision_config",
    "olmoe": "num_local_experts sliding_window",
}


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_what_transformers_reads_is_read(model_type: str) -> None:
    """An option that is ignored would give wrong text in silence."""
    config = Read(whole_config(model_type))
    read_spec(config)
    if model_type in ("internlm3", "iquestcoder"):  # which have the code of Llama
        return
    module = transformers.CONFIG_MAPPING[WRITTEN_AS.get(model_type, model_type)].__module__.replace(".configuration_", ".modeling_")
    source = inspect.getsource(importlib.import_module(module))
    used = set(re.findall(r"\bconfig\.(\w+)|getattr\((?:self\.)?config, \"(\w+)\"", source))
    keys = {key for pair in used for key in pair if key} - NOT_OF_A_FORWARD_PASS
    if not FAMILIES[model_type].architecture or model_type.startswith(
        ("qwen3_5", "gemma3n", "gemma4", "llama4")
    ):  # the module has the other parts of the model, too
        keys &= config.keys()
    assert len(keys) > 6
    unread = keys - config.keys_read - {"rope_parameters"} - set(UNREAD.get(model_type, "").split())
    assert not {key for key in unread if not key.startswith("summary_")}  # of another head than that of a language model
