"""The shapes are those of the published models: parameters, KV bytes and rope, as their makers state them."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from slow_cases import slow_but

from aengine import AsyncEngine, Completion, SamplingParams
from aengine.api.config import EngineConfig
from aengine.bench.floor import Machine, generation_seconds, step_work
from aengine.bench.load_run import nano_vllm
from aengine.bench.shapes import SHAPES, describe, shape_folder
from aengine.layers.rotary import RopeSpec, llama3, unscaled
from aengine.models.config.model_config import load_spec, read_spec
from aengine.models.named_weights import num_parameters
from aengine.models.spec import ModelSpec, Norm
from aengine.tokenizer.tokenizer import Tokenizer

RNG = np.random.default_rng(0)
DEEPSEEK = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}

_GPT_OSS_20B = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 201_088,
}
PUBLISHED: dict[str, tuple[dict[str, int], int, int]] = {
    # What the published model has instead; its parameters; bytes per token of its KV in bfloat16.
    "qwen3-60m": ({}, 58_729_984, 8_192),
    "qwen3-0.6b": ({}, 596_049_920, 114_688),
    "qwen3-8b": ({}, 8_190_735_360, 147_456),
    "llama-3.1-8b": ({}, 8_030_261_248, 131_072),
    "qwen3-30b-a3b": ({}, 30_532_122_624, 98_304),
    "llama-3.1-70b-20l": ({"num_hidden_layers": 80}, 70_553_706_496, 327_680),
    "deepseek-v3-4l": ({"num_hidden_layers": 61}, 671_026_419_200, 70_272),
    "lfm2-1.2b": ({}, 1_170_340_608, 12_288),
    "qwen3.5-0.8b": ({}, 752_393_024, 12_288),
    "qwen3.5-9b": ({}, 8_953_803_264, 32_768),
    "llama-3.2-1b": ({}, 1_235_814_400, 32_768),
    "gemma-3-1b": ({}, 999_885_952, 26_624),
    "phi-4-mini-8l": ({"num_hidden_layers": 32}, 3_836_021_760, 131_072),
    "olmoe-6l": ({"num_hidden_layers": 16}, 6_919_161_856, 131_072),
    "gpt-oss-1.4b": (_GPT_OSS_20B, 20_914_757_184, 49_152),
}


def spec_of(name: str, **changes: int) -> ModelSpec:
    return read_spec({**SHAPES[name], **changes})


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_the_published_one(name: str) -> None:
    changes, parameters, kv_bytes = PUBLISHED[name]
    with shape_folder(name) as folder:
        spec = load_spec(folder)
        assert folder.name == name
    assert not folder.exists()
    assert spec == spec_of(name)
    assert spec.dtype == "bfloat16"
    assert f"{spec.num_layers} layers" in describe(name)
    published = spec_of(name, **changes)
    assert num_parameters(published) == parameters
    work = step_work(published, [1], [10_000], 1, 2).kv_bytes - step_work(published, [1], [9_999], 1, 2).kv_bytes
    windowed = sum(2 * 2 * attention.num_kv_heads * attention.key_dim for attention in published.attentions if attention.window)
    assert work + windowed == kv_bytes


def test_ropes_contexts_and_windows() -> None:
    for name, theta, factor in (("llama-3.1-8b", 500_000.0, 8.0), ("llama-3.2-1b", 500_000.0, 32.0)):
        llama = spec_of(name)
        rope = RopeSpec.of(llama3(unscaled(llama.layers[0].attention.key_dim, theta), factor, 1.0, 4.0, 8192))
        assert (llama.ropes, llama.max_position_embeddings, llama.norm) == ((rope,), 131_072, Norm(eps=1e-5))
    for name in ("qwen3-60m", "qwen3-0.6b", "qwen3-8b"):
        qwen = spec_of(name)
        assert qwen.ropes == (RopeSpec.of(unscaled(qwen.layers[0].attention.key_dim, 1e6)),)
        assert qwen.max_position_embeddings == 40_960
    gemma = spec_of("gemma-3-1b")
    assert gemma.windows == ((512,) * 5 + (None,)) * 4 + (512, 512)
    assert gemma.ropes == (RopeSpec.of(unscaled(256, 10_000.0)), RopeSpec.of(unscaled(256, 1e6)))
    assert len(spec_of("phi-4-mini-8l").ropes[0].frequencies) == 48
    assert spec_of("gpt-oss-1.4b").windows == (128, None) * 3
    assert spec_of("gpt-oss-1.4b").ropes[0].attention_factor == pytest.approx(0.1 * math.log(32) + 1)


def test_the_floor_of_experts_is_of_those_that_tokens_choose() -> None:
    """Of 64 experts one token reads 8; 8 tokens are expected to read 64 * (1 - (7 / 8) ** 8) = 42.0."""
    spec = spec_of("olmoe-6l")
    expert = 3 * 2048 * 1024
    others = num_parameters(spec) - 6 * 64 * expert - 2048 * 50_304
    for rows, read in ((1, 8), (8, 64 * (1 - (7 / 8) ** 8)), (4096, 64)):
        work = step_work(spec, [1] * rows, [0] * rows, rows, 2)
        assert work.weight_bytes == pytest.approx(2 * (others + 6 * read * expert), rel=1e-9)
        attention = rows * 6 * 2 * 16 * (128 + 128)
        assert work.flops == 2 * rows * (others + 6 * 8 * expert) + attention
    distinct = [len({expert for token in range(8) for expert in RNG.permutation(64)[:8]}) for _ in range(400)]
    assert sum(distinct) / len(distinct) == pytest.approx(64 * (1 - (7 / 8) ** 8), rel=0.02)


def test_the_floor_of_windows_and_latents() -> None:
    spec = spec_of("gpt-oss-1.4b")
    work = step_work(spec, [1, 1], [999, 49], 2, 2)
    assert work.kv_bytes == 2 * 4 * 128 * 3 * ((1000 + 50) + (128 + 50))
    latent = read_spec({**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"]})
    assert step_work(latent, [1], [99], 1, 2).kv_bytes == 2 * 3 * 100 * (512 + 64)
    assert step_work(latent, [1], [99], 1, 2, "int8").kv_bytes == 3 * 100 * (512 + 64 + 4)
    recurrent = step_work(spec_of("qwen3.5-0.8b"), [1, 5], [0, 99], 2, 2)
    states = 2 * 18 * (4 * 16 * 128 * 128 + 2 * 3 * (6144 + 32))  # of each row read and written
    assert recurrent.kv_bytes == 2 * states + 6 * 2 * 2 * 2 * 256 * (1 + 104)


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


@pytest.mark.parametrize("name", ["qwen3-60m", "olmoe-6l"])
def test_the_floor_of_a_generation_is_that_of_its_steps(name: str) -> None:
    spec = spec_of(name)
    layers = (
        replace(layer, attention=replace(layer.attention, window=window))
        for layer, window in zip(spec.layers, itertools.cycle((None, 5)), strict=False)
    )
    spec = replace(spec, layers=tuple(layers))
    for machine in (Machine(1e6, 1e30), Machine(1e30, 1e6)):
        steps = [
            step_work(spec, [3, 4], [0, 0], 2, 2, "fp8"),
            step_work(spec, [1, 1], [3, 4], 2, 2, "fp8"),
            step_work(spec, [1], [5], 1, 2, "fp8"),
        ]
        expected = sum(work.seconds(machine) for work in steps)
        assert generation_seconds(spec, [3, 4], [2, 3], machine, 2, "fp8") == pytest.approx(expected)


@pytest.mark.parametrize(
    "name", slow_but({"gemma-3-1b", "gpt-oss-1.4b"}, ["llama-3.2-1b", "gemma-3-1b", "phi-4-mini-8l", "olmoe-6l", "gpt-oss-1.4b"])
)
def test_random_weights_keep_numbers_in_range(tmp_path: Path, name: str) -> None:
    """Of the shape's width, with fewer layers and experts and half its feed-forward."""
    shape = SHAPES[name]
    changes = {"num_hidden_layers": 2, "vocab_size": 512, "intermediate_size": shape["intermediate_size"] // 2, "eos_token_id": None}
    counts = {key: 8 for key in ("num_experts", "num_local_experts") if key in shape}
    (tmp_path / "config.json").write_text(json.dumps({**shape, **changes, **counts}))

    async def run() -> Completion:
        config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", kv_cache_memory=16 << 20, max_model_len=256)
        async with AsyncEngine(config) as engine:
            params = SamplingParams(temperature=0, max_tokens=8, detokenize=False, prompt_logprobs=0)
            return await engine.generate(list(range(40)), params)

    logprobs = [each.logprob for each in asyncio.run(run()).prompt_logprobs or () if each is not None]
    assert len(logprobs) == 39
    assert -30 < min(logprobs) < -6.3
    assert statistics.stdev(logprobs) > 0.3
