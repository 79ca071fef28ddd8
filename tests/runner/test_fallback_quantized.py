"""Quantised checkpoints of models in the code of transformers: the logits of the weights that they stand for."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import transformers
from driver import Driver, record_logits
from fallback_models import save_model, tiny_config
from quantized_layouts import LAYOUTS
from quantized_models import plain, rewrite
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from test_fallback import make_runner

from aengine.api.errors import ModelLoadError

QUICK = ("gptq 4 bits, act-order", "awq", "pack-quantized 4 bits, asymmetric", "fp8, blocks")


@pytest.fixture(scope="module")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("arcee")
    save_model(tiny_config("arcee", hidden_size=64, num_hidden_layers=2, head_dim=16), folder)
    return folder


def check(reference: transformers.PreTrainedModel, folder: pathlib.Path) -> None:
    """Of the last token of a prompt, to 1e-4 of the largest."""
    runner, prompt = make_runner(folder), list(range(5, 24))
    assert runner.quantization
    seen = record_logits(runner)
    Driver(runner).generate([prompt], 1)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    assert (seen[0][0] - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS))
def test_every_format(layout: str, arcee: pathlib.Path, tmp_path: pathlib.Path) -> None:
    meant = rewrite(arcee, tmp_path, LAYOUTS[layout])
    check(plain(arcee, tmp_path, meant), tmp_path)


def test_matrices_that_are_stored_transposed_and_names_without_their_first_word(tmp_path: pathlib.Path) -> None:
    (source := tmp_path / "source").mkdir()
    save_model(transformers.GPT2Config(n_layer=1, n_embd=64, n_head=4, n_positions=64, vocab_size=64), source)
    meant = rewrite(source, tmp_path, LAYOUTS["gptq 4 bits"])
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}, file)
    check(plain(source, tmp_path, meant), tmp_path)


def test_what_does_not_fit_is_named(arcee: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rewrite(arcee, tmp_path, LAYOUTS["awq"])
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj"
    save_file({key: tensor for key, tensor in tensors.items() if key != f"{name}.scales"}, file)
    with pytest.raises(ModelLoadError, match=f"it lacks {name}.scales$"):
        make_runner(tmp_path)
    save_file({**tensors, f"{name}.scales": tensors[f"{name}.scales"][:1].contiguous()}, file)
    with pytest.raises(ModelLoadError, match=rf"other shapes or dtypes than its quantization_config implies: {name}.scales \[1, 64\]"):
        make_runner(tmp_path)
    save_file({**tensors, "model.layers.1.mlp.experts.qweight": tensors[f"{name}.qweight"].clone()}, file)
    with pytest.raises(
        ModelLoadError, match=r"of quant_method 'awq', of which transformers runs the weights of linear modules alone: .*exp"
    ):
        make_runner(tmp_path)
    whole = json.loads(config.read_text())
    config.write_text(json.dumps({**whole, "quantization_config": {"quant_method": "quark"}}))
    with pytest.raises(ModelLoadError, match=r"quantization_config is not supported .quant_method 'quark'."):
        make_runner(tmp_path)
