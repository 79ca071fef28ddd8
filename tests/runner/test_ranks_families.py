"""Tiny models of every family on several ranks, from their checkpoints: the tokens and logits of one rank."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dense_cases
import hybrid_cases
import mixture_cases
import numpy as np
import plain_cases
import pytest
import torch
from driver import GREEDY, Driver, record_logits
from family_cases import VOCAB, Case
from quantized_layouts import LAYOUTS
from quantized_models import random_model, rewrite
from runner_ranks import runner_on_ranks
from slow_cases import slow_but
from test_gguf_families import CASES as GGUF_CASES
from test_gguf_families import converted

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError
from aengine.runner.runner import ModelRunner

CASES = {case.name: case for case in (*dense_cases.CASES, *mixture_cases.CASES, *plain_cases.CASES, *hybrid_cases.CASES) if case.in_kernels}
DRAWN = replace(GREEDY, temperature=0.8, top_k=50, seed=5)
LENGTHS = (2, 11, 30)
COUNT = 16
Generated = tuple[list[list[int]], list[torch.Tensor]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    made: dict[str, pathlib.Path] = {}

    def path_of(name: str) -> pathlib.Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            CASES[name].make().save_pretrained(made[name])
        return made[name]

    return path_of


def config_of(path: pathlib.Path, **options: Any) -> EngineConfig:
    settings = {"dtype": "float32", "device": "cpu", "page_size": 4, "max_num_seqs": 4, "kv_cache_memory": 4 << 20, **options}
    return EngineConfig(model=str(path), max_model_len=64, **settings)


def generated(runner: ModelRunner) -> Generated:
    """In chunks: greedy and drawn tokens, and the logits that they came from."""
    logits = record_logits(runner)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    driver = Driver(runner, chunk=7)
    return [tokens for params in (GREEDY, DRAWN) for tokens in driver.generate(prompts, COUNT, params)], logits


def on_one(path: pathlib.Path, **options: Any) -> Generated:
    runner = ModelRunner(config_of(path, **options), path)
    assert runner.exchange_seconds == 0
    return generated(runner)


def on_ranks(path: pathlib.Path, size: int, **options: Any) -> Generated:
    with runner_on_ranks(config_of(path, tensor_parallel_size=size, **options), path) as ranked:
        found = generated(ranked.runner)
        assert ranked.runner.exchange_seconds > 0
        return found


def check_equal(found: Generated, expected: Generated) -> None:
    assert found[0] == expected[0]
    assert len({token for tokens in expected[0] for token in tokens}) > 10, "the model says too little"
    assert len(found[1]) == len(expected[1])
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


QUICK = [
    ("cohere2", 4),
    ("deepseek-v3", 2),
    ("lfm2", 2),
    ("qwen3-next", 2),
    ("granite-hybrid", 2),
    ("falcon-h1", 2),
    ("nemotron-h", 2),
    ("kimi-linear", 2),
    ("jamba", 2),
    ("minimax", 2),
    ("mamba", 2),
    ("mamba2", 2),
]
"""Fewer KV heads than ranks; latent attention and experts; convolutions; recurrent states and experts; these normed over all ranks; beside
attention; layers of one block; and decays by channel."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "size"), slow_but(QUICK, [*QUICK, *((name, 2) for name in list(CASES)[::3] if (name, 2) not in QUICK)]))
def test_exact_mode(checkpoint: Callable[[str], pathlib.Path], name: str, size: int) -> None:
    path = checkpoint(name)
    check_equal(on_ranks(path, size), on_one(path))


@pytest.mark.parametrize("name", slow_but([], [*list(CASES)[::6], "lfm2-moe", "jamba"]))
def test_fast_mode(checkpoint: Callable[[str], pathlib.Path], name: str) -> None:
    """The same greedy tokens, and the same of everything again."""
    path = checkpoint(name)
    expected, first, again = on_one(path), *(on_ranks(path, 2, tensor_parallel_mode="fast") for _ in range(2))
    check_equal(again, first)
    assert first[0][: len(LENGTHS)] == expected[0][: len(LENGTHS)]


@pytest.mark.parametrize("name", ["lfm2-moe", "qwen3.5", "falcon-h1", "mamba", "gemma4-experts"])
def test_hybrids_on_two_stages(checkpoint: Callable[[str], pathlib.Path], name: str) -> None:
    """Which have other places in pages than those of the whole model."""
    path = checkpoint(name)
    with runner_on_ranks(config_of(path, pipeline_parallel_size=2), path) as ranked:
        check_equal(generated(ranked.runner), on_one(path))
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size: 2 leaves some ranks no layer of attention; choose fewer$"):
        on_ranks(checkpoint("lfm2"), 1, pipeline_parallel_size=2)


QUANTISED = [
    {"quantization": "int8", "dtype": "bfloat16"},
    {"quantization": "int4"},
    {"kv_cache_dtype": "int8"},
    {"quantization": "int8", "kv_cache_dtype": "int8", "dtype": "bfloat16"},
]


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("options", slow_but([], QUANTISED), ids=lambda options: "-".join(options.values()))
def test_quantised(checkpoint: Callable[[str], pathlib.Path], name: str, options: dict[str, str]) -> None:
    path = checkpoint(name)
    check_equal(on_ranks(path, 2, **options), on_one(path, **options))


FORMATS = [
    "gptq 4 bits",
    "gptq 4 bits, act-order",
    "awq",
    "pack-quantized 4 bits, asymmetric",
    "int-quantized, channels",
    "fp8, blocks",
    "nf4",
]


@pytest.mark.parametrize("name", ["cohere2", "qwen3_moe"])
@pytest.mark.parametrize("layout", slow_but([], FORMATS))
def test_quantised_checkpoints(tmp_path: pathlib.Path, name: str, layout: str) -> None:
    source, path = tmp_path / "plain", tmp_path / "quantised"
    path.mkdir()
    rewrite(random_model(name, source), path, LAYOUTS[layout])
    check_equal(on_ranks(path, 2), on_one(path))


@pytest.mark.parametrize("name", slow_but([], ["llama", "deepseek2", "gpt-oss"]))
def test_gguf(tmp_path: pathlib.Path, name: str) -> None:
    written = GGUF_CASES[name]
    Case(name, written.config, written.changes).make().save_pretrained(tmp_path / "model")
    file = tmp_path / "model.gguf"
    file.write_bytes(converted(tmp_path / "model", written, "Q8_0"))
    check_equal(on_ranks(file, 2), on_one(file))


@pytest.mark.parametrize("size", slow_but([3], [3, 8]))
def test_heads_that_do_not_divide_are_refused(checkpoint: Callable[[str], pathlib.Path], size: int) -> None:
    with pytest.raises(ConfigError, match=rf"^tensor_parallel_size: {size} does not divide num_heads 4 of layer 0; possible are 1, 2, 4$"):
        on_ranks(checkpoint("cohere2"), size)


def test_several_streams_are_refused(tmp_path: pathlib.Path) -> None:
    next(case for case in hybrid_cases.CASES if case.name == "gemma3n").make().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: 2 is not possible with several residual streams; possible are 1$"):
        on_ranks(tmp_path, 2)


def test_convolutions_that_do_not_divide_are_refused(checkpoint: Callable[[str], pathlib.Path]) -> None:
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: 4 does not divide num_kv_heads 2 of layer 2, beside convolutions;"):
        on_ranks(checkpoint("lfm2"), 4)
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: 3 does not divide the channels 64 of layer 0 into multiples of 16; "):
        on_ranks(checkpoint("lfm2-moe"), 3)
