"""Models in the code of transformers, on our KV pages: the tokens and logits of transformers itself."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from driver import GREEDY, Driver
from eager_capture import EagerCapture
from fallback_models import DISTINCT, TYPES, WINDOW, save_model, tiny_config
from replays import count_replays
from slow_cases import slow_but
from torch import Tensor
from workloads import random_steps

from aengine.api.config import EngineConfig
from aengine.models.choice import find_spec, implementation_of
from aengine.runner.runner import ModelRunner

LENGTHS = (1, 30, 3, 9, 17, 2, 24, 13)  # up to more than three windows
COUNT = 24


def make_runner(path: pathlib.Path, **options) -> ModelRunner:
    settings = {
        "model_impl": "transformers",
        "dtype": "float32",
        "device": "cpu",
        "page_size": 4,
        "max_num_seqs": 8,
        "kv_cache_memory": 16 << 20,
        **options,
    }
    return ModelRunner(EngineConfig(model=str(path), **settings), path)


def generate(runner: ModelRunner, prompts: list[list[int]], chunk: int | None) -> tuple[list[list[int]], list[Tensor]]:
    """`COUNT` greedy tokens for each prompt, all prompts together, and the logits that they were taken from."""
    logits: list[list[Tensor]] = [[] for _ in prompts]

    def keeping(index: int):
        return lambda row_logits, tokens: logits[index].append(row_logits.clone())

    params = [replace(GREEDY, processors=(keeping(index),)) for index in range(len(prompts))]
    tokens = Driver(runner, chunk=chunk).generate(prompts, COUNT, params)
    return tokens, [torch.stack(each) for each in logits]


@torch.no_grad()
def check(model: transformers.PreTrainedModel, prompts: list[list[int]], outputs: list[list[int]], logits: list[Tensor]) -> None:
    """Every token is the greedy one of transformers after those before it, which are then the same; logits are within 1e-4."""
    for prompt, output, found in zip(prompts, outputs, logits, strict=True):
        expected = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
        assert expected.argmax(-1).tolist() == output
        error = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert float(error.max()) < 1e-4


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model_type", slow_but(DISTINCT, TYPES))
def test_a_type_generates_what_transformers_does(model_type: str, tmp_path: pathlib.Path) -> None:
    model = save_model(tiny_config(model_type), tmp_path)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in LENGTHS]
    for chunk, backend in ((None, "auto"), (5, "torch_native")):
        outputs, logits = generate(make_runner(tmp_path, attention_backend=backend), prompts, chunk)
        check(model, prompts, outputs, logits)
    assert len({token for tokens in outputs for token in tokens}) > 24, "the reference is degenerate"
    assert max(map(len, outputs)) + max(LENGTHS) > 3 * WINDOW


@pytest.mark.slow
def test_graphs_give_the_same_tokens(tmp_path: pathlib.Path) -> None:
    """Decodes and steps with prompt tokens are recorded and replayed as those of a native model."""
    save_model(tiny_config("cwm"), tmp_path)
    options: dict[str, Any] = {
        "max_num_seqs": 24,
        "kv_cache_memory": 64 << 20,
        "graph_sizes": (1, 5, 20),
        "attention_backend": "torch_native",
    }
    config = EngineConfig(model=str(tmp_path), model_impl="transformers", dtype="float32", device="cpu", graph_tokens=64, **options)
    recorded = ModelRunner(config, tmp_path, EagerCapture)
    replays = count_replays(recorded)
    expected = random_steps(make_runner(tmp_path, max_num_seqs=24, kv_cache_memory=64 << 20), 3)
    assert random_steps(recorded, 3) == expected
    assert {kind for (kind, _), count in replays.items() if count} == {"decode", "pieces"}


def test_a_context_whose_rope_does_not_depend_on_the_batch(tmp_path: pathlib.Path) -> None:
    """transformers chooses the frequencies of a longrope by the longest sequence of a batch."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 6,
        "long_factor": [2.0] * 6,
        "short_mscale": 1.0,
        "long_mscale": 1.2,
    }
    changes = {"rope_parameters": {**rope, "original_max_position_embeddings": 32}, "max_position_embeddings": 128}
    tiny_config("arcee", **changes).save_pretrained(tmp_path)
    runner = make_runner(tmp_path, load_format="dummy")
    assert runner.max_model_len == 32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["triton", "torch_native"])
@pytest.mark.parametrize("model_type", ["cwm", "gpt_oss", "arcee", "granitemoe"])
def test_on_cuda(model_type: str, backend: str, tmp_path: pathlib.Path) -> None:
    """With graphs where the backend has them."""
    model = save_model(tiny_config(model_type, head_dim=16), tmp_path)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in LENGTHS]
    outputs, logits = generate(make_runner(tmp_path, attention_backend=backend, device="cuda"), prompts, 5)
    check(model, prompts, outputs, [one.cpu() for one in logits])


def test_auto_takes_the_fallback_where_there_is_no_native_model(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    for model_type, expected in (("llama", "native"), ("apertus", "transformers")):
        path = tmp_path / model_type
        tiny_config(model_type).save_pretrained(path)
        caplog.clear()
        runner = make_runner(path, model_impl="auto", load_format="dummy")
        assert implementation_of(runner.spec) == expected
        said = [message for message in caplog.messages if "runs in the code of transformers" in message]
        assert len(said) == (expected == "transformers")
        assert all("'apertus' has no native implementation" in message for message in said)
        runner.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_is_that_of_the_checkpoint(dtype: str, tmp_path: pathlib.Path) -> None:
    config = tiny_config("arcee")
    config.dtype = dtype
    config.save_pretrained(tmp_path)
    assert find_spec(tmp_path, "auto").dtype == dtype
