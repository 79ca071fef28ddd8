"""Adapters of random numbers for any native model, in the files that PEFT writes. How fast steps are does not depend on the numbers."""

from __future__ import annotations

import json
import pathlib

import torch
from safetensors.torch import save_file

from aengine.models.named_weights import named_weights
from aengine.models.spec import ModelSpec

_MODULES = ("qkv", "output", "gate_up", "up", "down", "q", "q_down", "q_up", "kv_down")  # all linear ones of a layer that is no mixture


def write_adapter(folder: pathlib.Path, spec: ModelSpec, low_rank: int, dtype: torch.dtype, seed: int) -> pathlib.Path:
    """Writes one of all linear modules of the layers into a new `folder`, which it returns."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in named_weights(spec).items():
        stem, _, kind = name.rpartition(".")
        if not stem.startswith("layers.") or kind != "weight" or stem.split(".", 2)[2] not in _MODULES:
            continue
        for part in weight.parts:
            module, (rows, columns) = part.source.removesuffix(".weight"), part.matrix_shape
            for letter, shape in (("A", (low_rank, columns)), ("B", (rows, low_rank))):
                tensor = torch.randn(shape, generator=generator).mul_(0.02).to(dtype)
                tensors[f"base_model.model.{module}.lora_{letter}.weight"] = tensor
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": low_rank, "lora_alpha": low_rank, "bias": "none", "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
