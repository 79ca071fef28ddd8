"""Greedy tokens equal `transformers`, whatever the chunks, the page size and the neighbours."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

import numpy as np
import pytest
import torch
import transformers
from driver import GREEDY, Driver, record_logits
from reference import FAMILIES, greedy, save_tiny
from slow_cases import slow_but
from tokenizers import Tokenizer

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError
from aengine.kernels.arrays import torch_dtype
from aengine.models.loading.hub import resolve_model
from aengine.runner.runner import ModelRunner

PAGE_SIZES = (1, 16, 64)
BACKENDS = ("auto", "torch_native")  # auto: the CPU kernels where they support the model


def make_runner(model_dir: pathlib.Path, **options) -> ModelRunner:
    settings = {"dtype": "float32", "device": "cpu", "max_num_seqs": 24, "kv_cache_memory": 64 << 20, **options}
    return ModelRunner(EngineConfig(model=str(model_dir), **settings), model_dir)


@pytest.fixture(scope="module")
def demo() -> tuple[pathlib.Path, list[list[int]], list[list[int]]]:
    path = resolve_model("demo")
    text = (
        "It was a dark and stormy night when the carriage stopped before the inn, and the landlady, who had been waiting at the "
        "door with a candle in her hand, ran out to see what sort of travellers the road had brought her. The gentleman who got "
        "down first said nothing, but looked about him as though he expected to be attacked; and his sister, following, laughed."
    )
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids
    prompts = [ids[at : at + 1 + 3 * at] for at in range(20)]
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return path, prompts, greedy(model, prompts, 64)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", slow_but([16], PAGE_SIZES))
def test_demo_all_at_once_in_chunks(demo, page_size: int, backend: str) -> None:
    path, prompts, expected = demo
    runner = make_runner(path, page_size=page_size, attention_backend=backend)
    assert Driver(runner, chunk=16, budget=100).generate(prompts, 64) == expected


def test_demo_alone(demo) -> None:
    path, prompts, expected = demo
    driver = Driver(make_runner(path))
    assert [driver.generate([prompt], 64)[0] for prompt in prompts[::4]] == expected[::4]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp(request.param)
    model = save_tiny(request.param, path)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in (1, 5, 16, 17, 40, 90)]
    return path, model, prompts, greedy(model, prompts, 24)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("page_size", "chunk"), slow_but([(16, 16), (4, 3)], [(1, None), (16, 16), (64, None), (4, 3)]))
def test_family(family, page_size: int, chunk: int | None, backend: str) -> None:
    path, _, prompts, expected = family
    assert len({token for tokens in expected for token in tokens}) > 30, "the reference is degenerate"
    driver = Driver(make_runner(path, page_size=page_size, attention_backend=backend), chunk=chunk)
    assert driver.generate(prompts, 24) == expected


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_family_logits(family, backend: str) -> None:
    path, model, prompts, _ = family
    runner = make_runner(path, attention_backend=backend)
    prompt = prompts[-1]
    seen = record_logits(runner)
    driver = Driver(runner, chunk=1)
    sequence = driver.add(prompt)
    for _ in prompt:
        driver.run_step([sequence])
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(seen[-1][0], expected, rtol=1e-4, atol=1e-4)
    assert len(seen) == 1, "the head ran for tokens that nobody samples from"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_alone_and_in_a_crowd(demo, backend: str, dtype: str) -> None:
    """Our kernels' depend on the sequence alone. Torch's do up to rounding: they are as near each other as to those of float32."""
    path, prompts, _ = demo
    exact = backend == "auto" and os.environ.get("AENGINE_CPU_LEVEL") != "torch"

    def last_logits(some: list[list[int]], dtype: str, chunk: int | None) -> torch.Tensor:
        """[len(some), vocab_size], of the third token of each, which are the same in every run."""
        runner = make_runner(path, dtype=dtype, attention_backend=backend)
        seen = record_logits(runner)
        driver = Driver(runner, chunk=chunk)
        sequences = [driver.add(prompt, dataclasses.replace(GREEDY, logit_bias=((9, 100.0),))) for prompt in some]
        while late := [s for s in sequences if len(s.output) < 2]:
            driver.run_step(late)
        driver.run_step(sequences)
        return seen[-1].clone()

    some = prompts[::4]
    alone = torch.cat([last_logits([prompt], dtype, None) for prompt in some])
    crowd = last_logits(some, dtype, 7)
    if exact:
        assert torch.equal(alone, crowd)
    rounding = alone - last_logits(some, "float32", None) if dtype == "bfloat16" else alone * 1e-5
    assert (crowd - alone).norm() <= rounding.norm()


def test_old_form_of_rope_config(tmp_path: pathlib.Path) -> None:
    model = save_tiny("llama-llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = list(range(100, 180))
    assert Driver(make_runner(tmp_path)).generate([prompt], 16) == greedy(model, [prompt], 16)


def test_sharded_checkpoint(tmp_path: pathlib.Path) -> None:
    model = save_tiny("qwen3", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = list(range(30))
    assert Driver(make_runner(tmp_path)).generate([prompt], 16) == greedy(model, [prompt], 16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_to_float32(tmp_path: pathlib.Path, dtype: str) -> None:
    model = save_tiny("qwen3", tmp_path, dtype=getattr(torch, dtype))
    runner = make_runner(tmp_path, dtype=dtype)
    assert runner.dtype.name == dtype
    prompt = list(range(60))
    seen = record_logits(runner)
    Driver(runner).generate([prompt], 1)
    with torch.no_grad():
        expected = model.float()(torch.tensor([prompt])).logits[0, -1]
        yardstick = (model.to(torch_dtype(runner.dtype))(torch.tensor([prompt])).logits[0, -1].float() - expected).norm()
    assert (seen[0][0] - expected).norm() < 1.5 * yardstick


def test_rows_and_pages_are_reused(tmp_path: pathlib.Path) -> None:
    """A row that is assigned to a new sequence keeps nothing: not its last token, its pages or its sampling."""
    model = save_tiny("mistral", tmp_path)
    prompts = [list(range(at, at + 20)) for at in range(0, 80, 10)]
    driver = Driver(make_runner(tmp_path, max_num_seqs=1, page_size=16))
    assert [driver.generate([prompt], 12)[0] for prompt in prompts] == greedy(model, prompts, 12)


@pytest.mark.quick_cases(1)
@pytest.mark.skipif(os.environ.get("AENGINE_CPU_LEVEL") == "torch", reason="AENGINE_CPU_LEVEL turns the CPU kernels off")
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.03), ("int4", 0.2), ("fp8", 0.05)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_weights_are_near_float32(demo, quantization: str, most: float, dtype: str) -> None:
    """Logits of a long prompt through the whole model; products alone are tested in tests/kernels."""
    path, prompts, _ = demo
    seen = []
    for options in ({}, {"quantization": quantization, "dtype": dtype}):
        runner = make_runner(path, **options)
        logits = record_logits(runner)
        Driver(runner).generate([prompts[-1]], 1)
        seen.append(logits[0][0].float())
    error = (seen[1] - seen[0]).norm() / seen[0].norm()
    assert 0 < error < most, error


def test_int8_needs_the_kernels(demo) -> None:
    with pytest.raises(ConfigError, match="quantization: 'int8' needs the CPU kernels"):
        make_runner(demo[0], quantization="int8", attention_backend="torch_native")
