"""Every family of models against Transformers, in torch and in the CPU kernels: greedy tokens and logits of a mixed batch, whole and in
chunks."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
from typing import Any

import dense_cases
import hybrid_cases
import mixture_cases
import plain_cases
import pytest
import torch
from driver import Driver, record_logits, sampled
from eager_capture import EagerCapture
from family_cases import COUNT, Case, Reference, reference
from slow_cases import slow_but
from torch import Tensor

from aengine import AsyncEngine, Completion, SamplingParams
from aengine.api.config import EngineConfig
from aengine.kernels.cpu.compiler import supported_levels
from aengine.layers.ops import TorchOps
from aengine.runner.runner import ModelRunner
from aengine.runner.torch import loading

CASES = {case.name: case for case in (*dense_cases.CASES, *mixture_cases.CASES, *plain_cases.CASES, *hybrid_cases.CASES)}
BACKENDS = ("auto", "torch_native")  # auto: the CPU kernels


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Reference]:
    case = request.param
    expected = reference(case, tmp_path_factory.mktemp(case.name))
    distinct = len({token for tokens in expected.tokens for token in tokens})
    assert distinct > 30, f"the reference is degenerate: {distinct} different tokens"
    return case, expected


def config_of(case: Case, path: pathlib.Path, backend: str, **options) -> EngineConfig:
    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory": 16 << 20, "max_model_len": case.max_model_len, **options}
    return EngineConfig(model=str(path), attention_backend=backend, **settings)


class InPlaceOps(TorchOps):
    """Overwrites what it may, as the kernels of GPUs do, and takes the layouts that they take."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert x.data_ptr() != residual.data_ptr()
        normed, total = super().add_rms_norm(x, residual, weight, eps)
        return x.copy_(normed), residual.copy_(total)

    def rotate(self, query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        for heads, rotated in zip((query, key), super().rotate(query, key, *given), strict=True):
            heads.view(len(heads), heads.shape[1] * heads.shape[2]).copy_(rotated.flatten(1))
        return query, key


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "select_ops", lambda *given: InPlaceOps())


@pytest.mark.quick_cases(12)
@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_at_once(made: tuple[Case, Reference], backend: str) -> None:
    """Tokens, and the logits that they were chosen from: within 1e-4 of the largest."""
    case, expected = made
    runner = ModelRunner(config_of(case, expected.path, backend), expected.path)
    in_kernels = case.in_kernels and backend == "auto" and os.environ.get("AENGINE_CPU_LEVEL") != "torch"
    assert runner.executor_name == ("cpu" if in_kernels else "torch")
    seen = record_logits(runner)
    assert Driver(runner).generate(expected.prompts, COUNT) == expected.tokens
    for step, logits in enumerate(seen):
        assert_near(logits, torch.stack([of_prompt[step] for of_prompt in expected.logits]))
    assert len(seen) == COUNT


@pytest.mark.quick_cases(4)
@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("turn", slow_but([0], [0, 1]))
def test_in_chunks(made: tuple[Case, Reference], turn: int) -> None:
    """By an engine whose steps hold few tokens; logprobs of prompts as well. Each family in one of the backends, and then in the other."""
    case, expected = made
    backend = BACKENDS[(list(CASES).index(case.name) + turn) % len(BACKENDS)]
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False, prompt_logprobs=0)

    async def run() -> list[Completion]:
        config = config_of(case, expected.path, backend, max_num_batched_tokens=20, max_num_seqs=8, page_size=4)
        async with AsyncEngine(config) as engine:
            return await asyncio.gather(
                *(
                    engine.generate(prompt, params if number % 2 else dataclasses.replace(params, prompt_logprobs=None))
                    for number, prompt in enumerate(expected.prompts)
                )
            )

    completions = asyncio.run(run())
    assert [list(completion.token_ids) for completion in completions] == expected.tokens
    for completion, logprobs in zip(completions, expected.prompt_logprobs, strict=True):
        if completion.prompt_logprobs is not None:
            found = torch.tensor([each.logprob for each in completion.prompt_logprobs if each is not None])
            torch.testing.assert_close(found, logprobs, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    slow_but(
        ["gemma2", "olmo3", "gpt-oss", "deepseek-v3", "lfm2"],
        ["gemma2", "olmo3", "cohere2", "granite", "phi4-partial", "gpt-oss", "deepseek-v3", "bloom", "lfm2", "lfm2-wide"],
    ),
)
def test_recorded_steps(name: str, tmp_path: pathlib.Path) -> None:
    """As CUDA graphs replay them: decodes whole, other steps in pieces between attention."""
    case = CASES[name]
    expected = reference(case, tmp_path)
    config = config_of(case, tmp_path, "torch_native", max_num_seqs=8, graph_sizes=(1, 2, 4, 8), graph_tokens=64)
    runner = ModelRunner(config, tmp_path, EagerCapture)
    assert runner._executor._model.graphs.pieces is not None
    seen = record_logits(runner)
    assert Driver(runner, chunk=7).generate(expected.prompts, COUNT) == expected.tokens
    assert_near(seen[-1], torch.stack([logits[-1] for logits in expected.logits])[-len(seen[-1]) :])
    assert Driver(ModelRunner(config, tmp_path, EagerCapture), chunk=7).generate(expected.prompts, COUNT) == expected.tokens


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"quantization": "int4", "kv_cache_dtype": "int8"}], ids=["float32", "bfloat16", "int4"]
)
@pytest.mark.parametrize("name", slow_but(["qwen3", "gpt-oss"], [name for name in CASES if name != "gemma3n"]))
def test_levels_agree(name: str, options: dict[str, str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With canonical numerics every level of the kernels gives the same bits."""
    case = CASES[name]
    if name.startswith("lfm2"):
        options = {key: value for key, value in options.items() if key != "kv_cache_dtype"}  # its convolutions have no int8 pages
    prompts = reference(case, tmp_path).prompts
    params = [sampled(seed, 0.5 + seed / 8, top_p=0.9 if seed % 2 else 1.0) for seed in range(len(prompts))]
    found = {}
    for level in supported_levels():
        monkeypatch.setenv("AENGINE_CPU_LEVEL", level.value)
        runner = ModelRunner(config_of(case, tmp_path, "cpu", numerics="canonical", **options), tmp_path)
        seen = record_logits(runner)
        tokens = Driver(runner).generate(prompts, COUNT, params)
        found[level.value] = tokens, [logits.numpy().tobytes() for logits in seen]
        runner.close()
    assert [level for level, bits in found.items() if bits != found["fused"]] == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["gemma2", "cohere2", "granite"])
def test_drawn_tokens(name: str, tmp_path: pathlib.Path) -> None:
    """Scaled and capped logits are what tokens are drawn from, in the kernels as in torch."""
    case = CASES[name]
    prompts = reference(case, tmp_path).prompts
    params = [sampled(seed, 0.5 + seed / 8, top_p=0.9 if seed % 2 else 1.0) for seed in range(len(prompts))]
    drawn = []
    for backend in BACKENDS:
        runner = ModelRunner(config_of(case, tmp_path, backend), tmp_path)
        drawn.append(Driver(runner).generate(prompts, COUNT, params))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, pytest.param({"quantization": "int8"}, marks=pytest.mark.slow)],
    ids=["bfloat16", "int8"],
)
@pytest.mark.skipif(os.environ.get("AENGINE_CPU_LEVEL") == "torch", reason="AENGINE_CPU_LEVEL turns the CPU kernels off")
def test_other_numbers(made: tuple[Case, Reference], options: dict[str, str]) -> None:
    """Logits of the longest prompt are near those of float32: rounding of every product, and now and then another expert, which alone is
    0.3 of a row. Logits of another model are 1.4 away."""
    case, expected = made
    if "quantization" in options and not case.in_kernels:
        pytest.skip("weights become int8 for the CPU kernels alone")
    runner = ModelRunner(config_of(case, expected.path, "auto", **options), expected.path)
    seen = record_logits(runner)
    Driver(runner, chunk=20).generate(expected.prompts[-1:], 1)
    error = (seen[0][0] - expected.logits[-1][0]).norm() / expected.logits[-1][0].norm()
    assert 1e-4 < error < 0.4, error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda(made: tuple[Case, Reference]) -> None:
    case, expected = made
    runner = ModelRunner(config_of(case, expected.path, "auto", device="cuda"), expected.path)
    assert Driver(runner, chunk=16).generate(expected.prompts, COUNT) == expected.tokens


def assert_near(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """To 1e-4 of a row's largest."""
    worst = ((logits - expected).abs().amax(-1) / expected.abs().amax(-1)).max().item()
    assert worst < 1e-4, worst
