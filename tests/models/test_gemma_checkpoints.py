"""Checkpoints of Gemma 3 with images: the text part is loaded from each of the forms that they have; the rest of the model is ignored."""

from __future__ import annotations

import pathlib
import re
from dataclasses import replace

import pytest
import torch
from family_cases import TINY
from safetensors.torch import load_file, save_file
from test_families import CASES
from test_weights import load

from aengine.api.errors import ModelLoadError
from aengine.models.config.model_config import load_spec

PREFIXES = {  # of the text part, its head and the rest, in the order of transformers' versions
    "language_model.model.": ("language_model.model.", "language_model.lm_head.", ""),
    "model.language_model.": ("model.language_model.", "lm_head.", "model."),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", PREFIXES)
def test_names(form: str, tied: bool, tmp_path: pathlib.Path) -> None:
    case = CASES["gemma3-with-images"]
    model = replace(case, changes={**case.changes, "tie_word_embeddings": tied}).make()
    model.save_pretrained(tmp_path)
    text, head, rest = PREFIXES[form]
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    renamed = {}
    for name, tensor in tensors.items():
        is_text = name.startswith("language_model.model.")
        new = re.sub(r"^language_model\.model\.", text, name)
        new = re.sub(r"^(language_model\.)?lm_head\.", head, new)
        renamed[new if is_text or "lm_head" in name else rest + name] = tensor
    assert ({f"{head}weight"} <= renamed.keys()) == (not tied)
    save_file(renamed, file)
    spec = load_spec(tmp_path)
    loaded = load(spec, tmp_path)
    assert spec.tied_head == tied
    assert torch.equal(loaded["embedding.weight"], model.get_input_embeddings().weight)
    layer = model.model.language_model.layers[1]
    assert torch.equal(loaded["layers.1.mlp_norm.weight"], layer.pre_feedforward_layernorm.weight)
    assert torch.equal(loaded["layers.1.down.weight"], layer.mlp.down_proj.weight)
    if not tied:
        assert torch.equal(loaded["head.weight"], model.lm_head.weight)
    assert spec.vocab_size == TINY["vocab_size"]
    save_file({**renamed, f"{text}more.weight": torch.zeros(1), "audio_tower.weight": torch.zeros(1)}, file)
    with pytest.raises(ModelLoadError, match=r"it has unexpected model\.more\.weight$"):
        load(spec, tmp_path)
