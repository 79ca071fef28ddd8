"""Where a model's end-of-sequence ids and sampling defaults come from."""

from __future__ import annotations

import json
import pathlib

import pytest

from aengine.api.errors import ModelLoadError
from aengine.api.params import SamplingParams
from aengine.models.config.model_config import load_generation, load_spec, read_spec
from aengine.models.loading.hub import resolve_model

SPEC = read_spec(
    {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "eos_token_id": 2,
    }
)


def save(path: pathlib.Path, **config) -> pathlib.Path:
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


def test_the_bundled_model() -> None:
    path = resolve_model("demo")
    eos_token_ids, sampling = load_generation(path, load_spec(path).eos_token_ids)
    assert eos_token_ids == (4093, 4095)
    assert sampling == {"temperature": 0.8, "top_p": 0.95}
    filled = SamplingParams(top_p=1.0).with_defaults_of(SamplingParams(**sampling))
    assert (filled.temperature, filled.top_p, filled.top_k) == (0.8, 1.0, 0)


def test_end_of_sequence_ids(tmp_path: pathlib.Path) -> None:
    assert load_generation(tmp_path, SPEC.eos_token_ids)[0] == (2,)
    assert load_generation(save(tmp_path, temperature=None), SPEC.eos_token_ids)[0] == (2,)
    assert load_generation(save(tmp_path, eos_token_id=5), SPEC.eos_token_ids)[0] == (5,)
    assert load_generation(save(tmp_path, eos_token_id=[5, 6]), SPEC.eos_token_ids)[0] == (5, 6)


def test_values_out_of_range(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json has a value out of range: top_p: 2\.0"):
        load_generation(save(tmp_path, top_p=2.0), SPEC.eos_token_ids)
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        load_generation(save(tmp_path, eos_token_id="x"), SPEC.eos_token_ids)
