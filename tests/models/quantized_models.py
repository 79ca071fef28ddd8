"""Tiny models whose checkpoints are rewritten in a quantised layout, and what they are compared with."""

from __future__ import annotations

import json
import pathlib

import torch
import transformers
from driver import Driver, record_logits
from family_cases import TINY, randomize
from quantized_layouts import Layout, Tensors
from safetensors.torch import load_file, save_file

from aengine.api.config import EngineConfig
from aengine.kernels.arrays import as_array
from aengine.models.quantization.quantization_config import read_quantization
from aengine.runner.runner import ModelRunner

_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "n_shared_experts": 1, "num_hidden_layers": 2},
}
MODELS: dict[str, tuple[str, dict]] = {
    "gpt_neox": ("GPTNeoX", {"num_hidden_layers": 1}),  # rows of q, k and v change places
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 1}),
    "deepseek_v3": ("DeepseekV3", _LATENT),  # a matrix is cut in two, one of which is transposed
    "gpt2": ("GPT2", {"n_layer": 1, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 64}),  # stores matrices transposed
    "cohere2": ("Cohere2", {"num_hidden_layers": 1}),  # halves of rotated rows change places
}
LEFT_ALONE = ("wte", "wpe", "embed", "lm_head", "norm", "mlp.gate.", "bias", "sinks", "router")


def random_model(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes a tiny random model of `MODELS` to a folder."""
    prefix, changes = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**(changes if name == "gpt2" else {**TINY, **changes}))
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, 1)
    model.save_pretrained(folder)
    return folder


def rewrite(source: pathlib.Path, folder: pathlib.Path, layout: Layout, left_alone: tuple[str, ...] = LEFT_ALONE) -> Tensors:
    """Writes the checkpoint of `source` to `folder` in a layout; returns the weights that it stands for, float32."""
    tensors = load_file(source / "model.safetensors")
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        meant[name] = tensor.float()
        if tensor.dim() != 2 or any(word in name for word in left_alone):
            stored[name] = tensor
            continue
        transposed = ".c_" in name  # of GPT-2; a layout has [out_features, in_features] of it, too
        parts, matrix = layout.write(tensor.float().t() if transposed else tensor.float())
        meant[name] = matrix.t().contiguous() if transposed else matrix
        stored |= {name.removesuffix(".weight") + ending: part.contiguous() for ending, part in parts.items()}
    assert len(stored) > len(tensors)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": layout.config}))
    save_file(stored, folder / "model.safetensors")
    return meant


def rows_of(config: dict, tensors: Tensors, shape: tuple[int, ...]):
    quantization = read_quantization({"quantization_config": config})
    assert quantization is not None
    scheme = quantization.scheme("model.layers.0.mlp.experts.0.up_proj")
    assert scheme is not None
    expected = scheme.tensors(shape)
    assert {ending for ending, tensor in expected.items() if not tensor.optional} <= tensors.keys() | {".weight_scale_inv"}
    named = {next((e for e, t in expected.items() if t.other_name == ending), ending): tensor for ending, tensor in tensors.items()}
    return scheme.rows(
        shape, {ending: as_array(named[ending].contiguous()) for ending, tensor in expected.items() if tensor.dtypes and ending in named}
    )


def plain(source: pathlib.Path, folder: pathlib.Path, meant: Tensors) -> transformers.PreTrainedModel:
    """The model of `source` with the weights `meant`, in a folder below `folder`."""
    (inner := folder / "plain").mkdir()
    (inner / "config.json").write_text((source / "config.json").read_text())
    save_file(meant, inner / "model.safetensors", {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(inner, attn_implementation="eager", dtype=torch.float32)


def check_logits(reference: transformers.PreTrainedModel, folder: pathlib.Path, backend: str) -> None:
    """Of the last token of a prompt, to 1e-4 of the largest."""
    prompt = list(range(5, 24))
    options = {"dtype": "float32", "device": "cpu", "kv_cache_memory": 4 << 20, "max_num_seqs": 2, "attention_backend": backend}
    runner = ModelRunner(EngineConfig(model=str(folder), **options), folder)
    seen = record_logits(runner)
    Driver(runner).generate([prompt], 1)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    assert (seen[0][0] - expected).abs().max() < 1e-4 * expected.abs().max()
