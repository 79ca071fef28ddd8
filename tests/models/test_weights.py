"""The strict loader: every parameter exactly once, and a sentence for everything else."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aengine.api.errors import ModelLoadError
from aengine.kernels.arrays import BFLOAT16, FLOAT32
from aengine.models.config.model_config import read_spec
from aengine.models.loading.checkpoint import checkpoint_dtype
from aengine.models.loading.weights import stored_weights
from aengine.models.named_weights import named_weights
from aengine.models.sharding import random_weights
from aengine.models.spec import ModelSpec
from aengine.models.torch.decoder import Decoder
from aengine.runner.torch.loading import fused

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "attention_bias": True,
}
Tensors = dict[str, torch.Tensor]


def spec_of(**changes) -> ModelSpec:
    return read_spec({**CONFIG, **changes})


def tensors_of(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Tensors:
    torch.manual_seed(0)
    return {part.source: torch.randn(part.shape).to(dtype) for weight in named_weights(spec).values() for part in weight.parts}


def load(spec: ModelSpec, path: pathlib.Path, dtype: torch.dtype = torch.float32) -> Tensors:
    return fused(spec, stored_weights(spec, path), dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_parameters_hold_their_parts(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    spec = spec_of()
    tensors = tensors_of(spec)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load(spec, tmp_path, dtype)
    attention = "model.layers.1.self_attn"
    for kind in ("weight", "bias"):
        fused = torch.cat([tensors[f"{attention}.{name}_proj.{kind}"] for name in "qkv"])
        assert torch.equal(loaded[f"layers.1.qkv.{kind}"], fused.to(dtype))
    mlp = torch.cat([tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(loaded["layers.0.gate_up.weight"], mlp.to(dtype))
    Decoder(spec, loaded, 4)  # strict: the decoder's parameters are exactly the named weights


def test_weights_survive_the_file(tmp_path: pathlib.Path) -> None:
    spec = spec_of()
    tensors = tensors_of(spec)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load(spec, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(loaded["head.weight"], tensors["lm_head.weight"])


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


REFUSED = {
    "missing": (drop("model.layers.1.mlp.up_proj.weight"), r"lacks model\.layers\.1\.mlp\.up_proj\.weight$"),
    "missing bias": (drop("model.layers.0.self_attn.k_proj.bias"), r"lacks model\.layers\.0\.self_attn\.k_proj\.bias$"),
    "missing head": (drop("lm_head.weight"), r"lacks lm_head\.weight$"),
    "unexpected": (put("model.layers.2.mlp.up_proj.weight", torch.zeros(2)), r"has unexpected model\.layers\.2\.mlp\.up_proj\.weight$"),
    "shape": (put("model.norm.weight", torch.zeros(9)), r"model\.norm\.weight \[9\] instead of \[8\]$"),
    "transposed": (
        put("model.layers.0.mlp.down_proj.weight", torch.zeros(12, 8)),
        r"down_proj\.weight \[12, 8\] instead of \[8, 12\]$",
    ),
    "quantized": (
        put("lm_head.weight", torch.zeros(11, 8, dtype=torch.int8)),
        r"dtypes other than .*: lm_head\.weight int8$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_tensor(tmp_path: pathlib.Path, case: str) -> None:
    spec = spec_of()
    tensors = tensors_of(spec)
    change, message = REFUSED[case]
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load(spec, tmp_path)


def test_both_kinds_of_mismatch_in_one_sentence(tmp_path: pathlib.Path) -> None:
    save_file({f"stray.{i}": torch.zeros(1) for i in range(12)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"it lacks lm_head.* and \d+ more; it has unexpected stray\.0, .* and 4 more$"):
        load(spec_of(), tmp_path)


def test_tied_head(tmp_path: pathlib.Path) -> None:
    spec = spec_of(tie_word_embeddings=True)
    tensors = tensors_of(spec)
    assert "lm_head.weight" not in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    assert "head.weight" not in load(spec, tmp_path)
    stored_as_well = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(stored_as_well, tmp_path / "model.safetensors")
    assert "head.weight" not in load(spec, tmp_path)
    stored_as_well["lm_head.weight"][3, 3] += 1
    save_file(stored_as_well, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"ties the output head .* lm_head\.weight differs"):
        load(spec, tmp_path)


def test_rotary_frequencies_of_old_checkpoints_are_not_needed(tmp_path: pathlib.Path) -> None:
    spec = spec_of()
    save_file({**tensors_of(spec), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}, tmp_path / "model.safetensors")
    load(spec, tmp_path)


def save_shards(path: pathlib.Path, shards: list[Tensors]) -> None:
    names = [f"model-{i}.safetensors" for i in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, path / name)
    weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards(tmp_path: pathlib.Path) -> None:
    spec = spec_of()
    tensors = tensors_of(spec)
    items = list(tensors.items())
    save_shards(tmp_path, [dict(items[::2]), dict(items[1::2])])
    loaded = load(spec, tmp_path)
    assert torch.equal(loaded["norm.weight"], tensors["model.norm.weight"])
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lists model-1\.safetensors, which is missing"):
        load(spec, tmp_path)


def test_a_tensor_stored_twice(tmp_path: pathlib.Path) -> None:
    spec = spec_of()
    tensors = tensors_of(spec)
    save_shards(tmp_path, [tensors, {"model.norm.weight": torch.ones(8)}])
    with pytest.raises(ModelLoadError, match=r"it has more than one model\.norm\.weight$"):
        load(spec, tmp_path)


def test_broken_and_absent_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="there are no weights in"):
        load(spec_of(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelLoadError, match="not a safetensors file, or corrupt or truncated"):
        load(spec_of(), tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="holds no tensors"):
        load(spec_of(), tmp_path)


def test_checkpoint_dtype(tmp_path: pathlib.Path) -> None:
    save_file(tensors_of(spec_of(), torch.bfloat16), tmp_path / "model.safetensors")
    assert checkpoint_dtype(tmp_path) == BFLOAT16


def test_random_weights_follow_the_seed() -> None:
    spec = spec_of()
    first, again, other = (dict(random_weights(spec, FLOAT32, seed)) for seed in (1, 1, 2**64 - 1))
    assert first.keys() == named_weights(spec).keys()
    assert all(np.array_equal(first[name][0], again[name][0]) for name in first)
    assert not np.array_equal(first["head.weight"][0], other["head.weight"][0])
    assert np.array_equal(first["norm.weight"][0], np.ones(8))
    assert 0.01 < first["layers.0.gate_up.weight"][0].std() < 0.03


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bar_only_on_a_terminal(
    tmp_path: pathlib.Path, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(tensors_of(spec_of()), tmp_path / "model.safetensors")
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    load(spec_of(), tmp_path)
    assert ("Loading weights" in capsys.readouterr().err) is terminal


def test_a_decoder_refuses_other_weights_than_its_own() -> None:
    spec = spec_of()
    weights = {name: torch.zeros(weight.shape) for name, weight in named_weights(spec).items()}
    weights["layers.2.down.weight"] = weights.pop("layers.1.down.weight")
    with pytest.raises(ValueError, match=r"missing or unknown: layers\.1\.down\.weight, layers\.2\.down\.weight$"):
        Decoder(spec, weights, 4)
