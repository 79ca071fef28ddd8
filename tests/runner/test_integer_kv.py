"""A KV cache in int8 or int4: how near logits are to those of an exact cache, and that they depend on the sequence alone."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import transformers
from driver import Driver, record_logits
from fallback_models import save_model, tiny_config
from reference import LATENT, TINY, save_random, save_tiny
from slow_cases import slow_but
from test_greedy import make_runner
from tokenizers import Tokenizer
from torch import Tensor

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError
from aengine.kernels.arrays import BFLOAT16
from aengine.models.config.model_config import load_spec
from aengine.models.loading.hub import resolve_model
from aengine.runner.contract import Device
from aengine.runner.runner import build_executor
from aengine.runner.setup import ExecutorSetup

INT8, INT4 = {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}
LEVEL_IS_TORCH = os.environ.get("AENGINE_CPU_LEVEL") == "torch"


def logits_after(path: pathlib.Path, prompts: Sequence[Sequence[int]], chunk: int | None = None, **options) -> Tensor:
    """[len(prompts), vocab_size], in the order of the prompts."""
    runner = make_runner(path, **options)
    seen = record_logits(runner)
    driver = Driver(runner, chunk=chunk)
    sequences = [driver.add(prompt) for prompt in prompts]
    ended: list[int] = []
    while late := [s for s in sequences if not s.output]:
        driver.run_step(late)
        ended += [i for i, s in enumerate(sequences) if s.output and i not in ended]
    return torch.cat(seen)[np.argsort(ended)]


def error(found: Tensor, exact: Tensor) -> float:
    """The largest of a token, relative to the spread of its logits."""
    return float(((found - exact).norm(dim=-1) / (exact - exact.mean(-1, keepdim=True)).norm(dim=-1)).max())


@pytest.fixture(scope="module")
def demo() -> tuple[pathlib.Path, list[list[int]]]:
    """The bundled model with some beginnings of a text."""
    path = resolve_model("demo")
    text = (
        "It was a dark and stormy night when the carriage stopped before the inn, and the landlady, who had been waiting at the "
        "door with a candle in her hand, ran out to see what sort of travellers the road had brought her."
    )
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids
    return path, [ids[:length] for length in range(3, 40, 3)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["auto", "torch_native"])
def test_the_demo_models_logits(demo: tuple[pathlib.Path, list[list[int]]], backend: str, dtype: str) -> None:
    """Within 1.2 % of their spread, about as near as bfloat16 is to float32 (0.5 %); and the greedy token is the same."""
    exact = logits_after(*demo, dtype="float32")
    found = logits_after(*demo, **INT8, dtype=dtype, attention_backend=backend)
    assert 1e-4 < error(found, exact) < 0.012
    assert torch.equal(found.argmax(-1), exact.argmax(-1))


def test_the_demo_models_greedy_tokens(demo: tuple[pathlib.Path, list[list[int]]]) -> None:
    """Most outputs are those of an exact cache; others leave it where two tokens are nearly equal."""
    path, prompts = demo
    outputs = [Driver(make_runner(path, kv_cache_dtype=kind)).generate(prompts, 48) for kind in ("auto", "int8")]
    assert sum(one == other for one, other in zip(*outputs, strict=True)) >= len(prompts) * 3 // 4


@pytest.mark.skipif(LEVEL_IS_TORCH, reason="the kernels alone have pages of 4 bits")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_bits(demo: tuple[pathlib.Path, list[list[int]]], dtype: str) -> None:
    """Within a fifth of the spread of the logits; the same bits whole, in chunks, over other pages, and alone; half of the memory."""
    path, prompts = demo
    exact = logits_after(path, prompts, dtype="float32")
    whole = logits_after(path, prompts, **INT4, dtype=dtype)
    assert 0.01 < error(whole, exact) < 0.2
    for page_size in (4, 32):
        assert torch.equal(logits_after(path, prompts, 7, page_size=page_size, **INT4, dtype=dtype), whole)
    assert torch.equal(torch.cat([logits_after(path, [prompt], **INT4, dtype=dtype) for prompt in prompts[1:3]]), whole[1:3])
    assert make_runner(path, **INT4).kv_bytes_per_token == 5 * 2 * (64 + 8)  # of int8: 5 * 2 * (128 + 8)


@pytest.mark.parametrize("options", [{"attention_backend": "torch_native"}, {"model_impl": "transformers"}], ids=str)
def test_four_bits_need_the_kernels(demo: tuple[pathlib.Path, list[list[int]]], options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: 'int4' needs the CPU kernels and a native model"):
        make_runner(demo[0], **INT4, **options)


def save(family: str, path: pathlib.Path) -> transformers.PreTrainedModel:
    if family == "latent":
        config = {**TINY, **LATENT, "kv_lora_rank": 48, "first_k_dense_replace": 3}
        return save_random("DeepseekV3", config, path, 5, dtype=torch.float32)
    if family == "soft-cap":
        config = {**TINY, "head_dim": 32, "sliding_window": 12, "attn_logit_softcapping": 2.0}
        return save_random("Gemma2", config, path, 6, dtype=torch.float32)
    return save_tiny(family, path)


@pytest.mark.parametrize(
    "family", slow_but(["latent", "gpt-oss"], ["latent", "gpt-oss", "soft-cap", "qwen3-partly-windowed", "llama-tied-biases"])
)
def test_both_executors(family: str, tmp_path: pathlib.Path) -> None:
    """They round alike. In the kernels logits have the same bits whole, in chunks, and alone."""
    save(family, tmp_path)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, TINY["vocab_size"], length).tolist() for length in (3, 17, 40, 70)]
    whole = logits_after(tmp_path, prompts, **INT8)
    reference = logits_after(tmp_path, prompts, **INT8, attention_backend="torch_native")
    assert error(whole, reference) < 0.004
    assert 0.004 < error(reference, logits_after(tmp_path, prompts)) < 0.25  # random weights make more of it than trained ones
    if not LEVEL_IS_TORCH:
        assert torch.equal(logits_after(tmp_path, prompts, 7, page_size=4, **INT8), whole)
        assert torch.equal(torch.cat([logits_after(tmp_path, [prompt], **INT8) for prompt in prompts[1:3]]), whole[1:3])
        few_bits = logits_after(tmp_path, prompts, **INT4)
        assert 0.1 < error(few_bits, whole) < 1.5
        assert torch.equal(logits_after(tmp_path, prompts, 7, page_size=4, **INT4), few_bits)


@pytest.mark.parametrize("backend", ["auto", "torch_native"])
def test_what_the_log_says(demo: tuple[pathlib.Path, list[list[int]]], backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """5 layers, 2 KV heads, 16 tokens, K and V with 64 bytes and a scale of 4 each: 21,760 bytes a page."""
    caplog.set_level(logging.INFO, logger="aengine")
    runner = make_runner(demo[0], **INT8, attention_backend=backend, kv_cache_memory=10 * 21_760 + 5)
    assert (runner.num_pages, runner.kv_bytes_per_token) == (10, 1360)
    assert caplog.messages[-1].endswith("10 KV pages of 16 tokens in int8 (212.50 KiB)")


def test_other_devices_refuse_it(demo: tuple[pathlib.Path, list[list[int]]]) -> None:
    config = EngineConfig(model="demo", **INT8)
    setup = ExecutorSetup(config, load_spec(demo[0]), demo[0], BFLOAT16, Device("cuda", 0), 1, 1, 64, 64)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: 'int8' needs device cpu"):
        build_executor(setup, None, lambda: None)


def test_a_model_of_transformers(tmp_path: pathlib.Path) -> None:
    """It passes its self-check."""
    save_model(tiny_config("arcee"), tmp_path)
    options = {"model_impl": "transformers"}
    prompts = [[1, 2, 3], list(range(4, 40))]
    exact, found = (logits_after(tmp_path, prompts, **options, **kind) for kind in ({}, INT8))
    assert 1e-4 < error(found, exact) < 0.1
