"""Random adapters for any model that our code describes, in the files that PEFT writes, without PEFT."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor

from aengine.models.config.model_config import load_spec
from aengine.models.families import FAMILIES
from aengine.models.named_weights import named_weights

_MATRICES = ("qkv", "output", "gate_up", "up", "down", "q", "q_down", "q_up", "kv_down", "shared.gate_up", "shared.down")


def write_adapter(
    folder: pathlib.Path,
    model: pathlib.Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    seed: int = 0,
    targets: Sequence[str] = (),
    embedding: bool = False,
    head: bool = False,
    size: float = 0.1,
    dtype: torch.dtype = torch.float32,
    **fields: object,
) -> pathlib.Path:
    """Writes an adapter of a model, given by its directory or GGUF file, into `folder`, which it returns.

    `targets`: last words of the names of modules ("q_proj"); none: all matrices of all layers that can have an adapter, where a layer's
    product changes by about `size` times the length of its input. `fields`: others of adapter_config.json.
    """
    spec = load_spec(model)
    modules = {}
    for name, weight in named_weights(spec).items():
        stem = name.removesuffix(".weight")
        inner = stem.split(".", 2)[2] if stem.startswith("layers.") else stem
        if name.endswith(".weight") and (inner in _MATRICES or (inner == "head" and head)):
            modules |= {part.source.removesuffix(".weight"): part.matrix_shape for part in weight.parts}
    names = FAMILIES[spec.family].names
    if targets:
        modules = {module: shape for module, shape in modules.items() if module.rpartition(".")[2] in targets}
    if head:
        modules[names["head"]] = (spec.vocab_size, spec.hidden_size)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(scale).to(dtype)

    # The product of the two has elements of about size / sqrt(in_features) after its scale.
    factor = size * rank / alpha * rank**-0.5
    tensors = {}
    for module, (out_features, in_features) in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = random(rank, in_features, scale=in_features**-0.5)
        tensors[f"base_model.model.{module}.lora_B.weight"] = random(out_features, rank, scale=factor)
    if embedding:
        module = names["embedding"]
        tensors[f"base_model.model.{module}.lora_embedding_A"] = random(rank, spec.vocab_size, scale=1.0)
        tensors[f"base_model.model.{module}.lora_embedding_B"] = random(spec.hidden_size, rank, scale=factor)
    kinds = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    save_adapter(folder, tensors, r=rank, lora_alpha=alpha, target_modules=kinds, **fields)
    return folder


def save_adapter(folder: pathlib.Path, tensors: dict[str, Tensor], **fields: object) -> None:
    """Writes tensors with their whole names, and a configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "bias": "none", **fields}))
