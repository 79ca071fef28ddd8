"""Models that cannot be loaded as they are: one sentence that says what they are and what to take instead."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aengine.api.errors import ModelLoadError
from aengine.models.choice import find_spec
from aengine.models.loading.checkpoint import open_checkpoint
from aengine.models.loading.hub import resolve_model

SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
META = r"in the original format of Meta: take the checkpoint of the same model with config.json .* convert_llama_weights_to_hf.py"
MISTRAL = r"in the format of Mistral's own library: take the checkpoint .* convert_mistral_weights_to_hf.py"
MLX = r"an old format of MLX: take the checkpoint that it was converted from"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["params.json", "consolidated.00.pth", "tokenizer.model"], rf"params.json and consolidated.*.pth are {META}"),
        (["params.json", "consolidated.safetensors", "tekken.json"], rf"params.json and consolidated.*.safetensors are {MISTRAL}"),
        (["params.json", "tekken.json"], MISTRAL),  # what is downloaded of a Hugging Face id before its weights
        (["params.json"], "its params.json is of the format of Meta or Mistral: take the checkpoint"),
        (["weights.npz"], rf"its \*.npz files are in {MLX}"),
        (["model.gguf"], "a GGUF model is given by the path of its file"),
    ],
)
def test_a_directory_without_config(files: list[str], reason: str, tmp_path: pathlib.Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=f"has no config.json; .*{reason}") as caught:
        resolve_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_weights_of_mlx(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    np.savez(tmp_path / "weights.00.npz", a=np.zeros(1))
    with pytest.raises(ModelLoadError, match=f"there are no weights in .*; its .*npz files are in {MLX}"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["tok_embeddings.weight", "layers.0.attention.wq.weight", "rope.freqs"], META),
        (["tok_embeddings.weight", "layers.0.attention.wq.weight"], "in the format of Meta or Mistral: take the checkpoint"),
    ],
)
def test_tensors(names: list[str], reason: str, tmp_path: pathlib.Path) -> None:
    """Of files whose names say nothing."""
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"the weights in .* are {reason}|the weights in .* are in {reason}"):
        open_checkpoint(tmp_path)


NO_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForTokenClassification"], "model_type": "llama"}, "gives labels of tokens and generates none"),
    ({"architectures": ["BertForQuestionAnswering"], "model_type": "bert"}, "finds answers in a given text and generates none"),
]


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize(("config", "reason"), NO_TEXT)
def test_a_config(config: dict[str, Any], reason: str, model_impl: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **config}))
    with pytest.raises(ModelLoadError, match=reason) as caught:
        find_spec(tmp_path, model_impl)
    assert "\n" not in str(caught.value)
