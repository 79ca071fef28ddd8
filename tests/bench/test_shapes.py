"""The shapes are those of the published models: parameters, KV bytes and rope, as their makers state them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from aengine.bench.floor import Machine, generation_seconds, step_work
from aengine.bench.shapes import SHAPES, describe, shape_folder
from aengine.bench.workload import nano_vllm
from aengine.engine.tokenizer import Tokenizer
from aengine.layers.rotary import RopeSpec, llama3, unscaled
from aengine.models.model_config import load_spec
from aengine.models.named_weights import named_weights, num_parameters
from aengine.models.spec import Norm

PARAMETERS = {"qwen3-60m": 58_729_984, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360, "llama-3.1-8b": 8_030_261_248}
KV_BYTES = {"qwen3-60m": 8_192, "qwen3-0.6b": 114_688, "qwen3-8b": 147_456, "llama-3.1-8b": 131_072}  # per token, in bfloat16


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_the_published_one(name: str) -> None:
    with shape_folder(name) as folder:
        spec = load_spec(folder)
        assert folder.name == name
    assert not folder.exists()
    assert num_parameters(spec) == PARAMETERS[name]
    assert (
        2 * sum(layer.attention.num_kv_heads * (layer.attention.key_dim + layer.attention.value_dim) for layer in spec.layers)
        == KV_BYTES[name]
    )
    assert spec.dtype == "bfloat16"
    assert set(spec.windows) == {None}
    assert not any(".bias" in weight for weight in named_weights(spec))
    assert f"{spec.num_layers} layers" in describe(name)


def test_ropes_and_contexts() -> None:
    specs = {}
    for name in SHAPES:
        with shape_folder(name) as folder:
            specs[name] = load_spec(folder)
    llama = specs.pop("llama-3.1-8b")
    assert llama.ropes[0] == RopeSpec.of(llama3(unscaled(128, 500_000.0), 8.0, 1.0, 4.0, 8192))
    assert (llama.max_position_embeddings, llama.norm, llama.tied_head) == (131_072, Norm(eps=1e-5), False)
    assert all(spec.ropes == (RopeSpec.of(unscaled(spec.layers[0].attention.key_dim, 1e6)),) for spec in specs.values())
    assert {spec.max_position_embeddings for spec in specs.values()} == {40_960}


def test_the_tokenizer_takes_ids_that_it_lacks() -> None:
    with shape_folder("qwen3-0.6b") as folder:
        tokenizer = Tokenizer.load(folder)
        ids = tokenizer.encode("some words")
        assert tokenizer.decode([*ids, 151_000, 4_096]) == "some words"


def test_an_unknown_shape_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no shape 'gpt'; there are qwen3-60m, qwen3-0\.6b"), shape_folder("gpt"):
        pass


def test_floors_are_those_of_arithmetic_by_hand() -> None:
    """Decode at 1k context on 4.3 TB/s and 788 TFLOP/s: (weights + rows * 1024 * KV) / bandwidth."""
    machine = Machine(4.3e12, 788e12)
    with shape_folder("qwen3-8b") as folder:
        spec = load_spec(folder)
    for rows, milliseconds in ((1, 3.56), (32, 4.64), (256, 12.5)):
        work = step_work(spec, [1] * rows, [1023] * rows, rows, 2)
        assert 1e3 * work.seconds(machine) == pytest.approx(milliseconds, rel=0.01)
    prefill = step_work(spec, [1024], [0], 1, 2).seconds(machine)
    assert 1024 / prefill == pytest.approx(55_500, rel=0.01)
    assert math.isclose(step_work(spec, [1], [0], 1, 2).weight_bytes, 15.1e9, rel_tol=0.01)


@pytest.mark.parametrize(("name", "seconds"), [("qwen3-0.6b", 3.68), ("qwen3-8b", 10.3)])
def test_the_floor_of_the_nano_workload(name: str, seconds: float) -> None:
    """Weights 1024 times, KV of every token, flops of the prompts; of Qwen3-0.6B: 0.28 + 3.23 + 0.17 seconds."""
    items = nano_vllm(256, 151_936)
    with shape_folder(name) as folder:
        spec = load_spec(folder)
    prompts, outputs = [len(item.prompt) for item in items], [item.output_tokens for item in items]
    assert generation_seconds(spec, prompts, outputs, Machine(4.3e12, 788e12), 2) == pytest.approx(seconds, rel=0.02)


def test_the_floor_of_a_generation_is_that_of_its_steps() -> None:
    with shape_folder("qwen3-60m") as folder:
        spec = load_spec(folder)
    windows = (None, 5) * 4
    layers = (replace(layer, attention=replace(layer.attention, window=window)) for layer, window in zip(spec.layers, windows, strict=True))
    spec = replace(spec, layers=tuple(layers))
    for machine in (Machine(1e6, 1e30), Machine(1e30, 1e6)):
        steps = [step_work(spec, [3, 4], [0, 0], 2, 2, 1), step_work(spec, [1, 1], [3, 4], 2, 2, 1), step_work(spec, [1], [5], 1, 2, 1)]
        expected = sum(work.seconds(machine) for work in steps)
        assert generation_seconds(spec, [3, 4], [2, 3], machine, 2, 1) == pytest.approx(expected)
