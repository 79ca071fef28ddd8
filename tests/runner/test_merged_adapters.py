"""Batches whose rows have different adapters, against PEFT's own merged models in transformers: tokens, and the logits they came from."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dense_cases
import mixture_cases
import numpy as np
import peft
import plain_cases
import pytest
import torch
import transformers
from driver import Driver, record_logits, sampled
from every_draft import use_every_draft
from quantized_layouts import LAYOUTS
from quantized_models import plain, random_model, rewrite
from runner_ranks import runner_on_ranks
from slow_cases import slow_but
from tiny_adapters import write_adapter
from torch import Tensor

from aengine import AsyncEngine, Completion, EngineStats, SamplingParams
from aengine.api.config import EngineConfig
from aengine.models.config.model_config import load_spec
from aengine.models.spec import Experts
from aengine.runner.contract import LoadAdapter
from aengine.runner.runner import ModelRunner

LEFT_OUT = ("gemma3-with-images", "phi3-long")  # has other names in transformers, has another rope for short prompts there
CASES = {case.name: case for case in (*dense_cases.CASES, *mixture_cases.CASES, *plain_cases.CASES) if case.name not in LEFT_OUT}
RANKED = list(itertools.product(("qwen3", "gpt-neox", "phi3", "cohere2", "deepseek-v3"), ("exact", "fast"), ("auto", "torch_native")))
BFLOAT16 = {"dtype": "bfloat16"}
QUANTIZED = [("auto", {"quantization": "int8"}), ("auto", {"quantization": "int4"})]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
QUICK = (("qwen3", "auto"), ("phi3", "torch_native"))
RANKS = (4, 64, 16, 8, 32, 5, 24, 48)
COUNT = 6
NUM_ROWS = 32


@dataclass(frozen=True)
class Made:
    """A model with adapters of the keys 1 and up."""

    path: pathlib.Path
    adapters: Sequence[pathlib.Path]
    models: Sequence[torch.nn.Module]  # of transformers, by key; 0: without an adapter

    def check(self, key: int, prompt: list[int], output: list[int], logits: Tensor | None = None) -> None:
        """Each token is the argmax of the model's logits, and these are near `logits`: to 1e-4 of the largest."""
        ids = torch.tensor([prompt + output[:-1]])
        with torch.no_grad():
            expected = self.models[key](ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        if logits is not None:
            worst = ((logits - expected).abs().amax(-1) / expected.abs().amax(-1)).max().item()
            assert worst < 1e-4, (key, worst)
        assert output == expected.argmax(-1).tolist(), key

    def load(self, runner: ModelRunner) -> None:
        for key, path in enumerate(self.adapters, 1):
            runner.apply(runner.prepare(LoadAdapter(key, path.name, str(path))))


def make(model: transformers.PreTrainedModel, path: pathlib.Path, folder: pathlib.Path, ranks: Sequence[int] = RANKS) -> Made:
    """Adapters for the model at `path`, which is `model` in transformers. Those with even keys change its head and embedding, too."""
    spec = load_spec(path)
    tied = spec.tied_head
    # For names of an MLP of a mixture PEFT makes adapters of experts.
    targets = ATTENTION if any(isinstance(layer.mlp, Experts) for layer in spec.layers) else ()
    adapters, models = [], [model]
    for key, rank in enumerate(ranks, 1):
        both = key % 2 == 0 and not tied
        options = {"rank": rank, "alpha": 2.0 * rank, "seed": key, "size": 0.5, "use_rslora": key % 3 == 0, "targets": targets}
        adapters.append(write_adapter(folder / f"adapter-{key}", path, embedding=both, head=both, **options))
        models.append(peft.PeftModel.from_pretrained(copy.deepcopy(model), adapters[-1]).merge_and_unload().eval())
    return Made(path, adapters, models)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    def of(name: str) -> Made:
        model, folder = CASES[name].make(), tmp_path_factory.mktemp(name)
        model.save_pretrained(folder / "model")
        return make(model, folder / "model", folder)

    return functools.cache(of)


def config_of(path: pathlib.Path, backend: str = "auto", **options: Any) -> EngineConfig:
    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory": 16 << 20, "max_num_seqs": NUM_ROWS, "max_adapters": 8, **options}
    return EngineConfig(model=str(path), attention_backend=backend, **settings)


def prompts_of(vocab_size: int, count: int = NUM_ROWS) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab_size, rng.integers(1, 16)).tolist() for _ in range(count)]


def check_rows(runner: ModelRunner, made: Made, chunk: int | None = None) -> list[list[int]]:
    """Rows of all adapters and of none, greedy. Returns their tokens."""
    made.load(runner)
    seen = record_logits(runner)
    prompts = prompts_of(load_spec(made.path).vocab_size)
    keys = [row % len(made.models) for row in range(len(prompts))]
    outputs = Driver(runner).generate(prompts, COUNT, adapters=keys)
    for row, (key, prompt, output) in enumerate(zip(keys, prompts, outputs, strict=True)):
        made.check(key, prompt, output, torch.stack([logits[row] for logits in seen]))
    assert len({tuple(output) for output in outputs}) > 20, "degenerate"
    return outputs


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "backend"), slow_but(QUICK, [(name, backend) for name in CASES for backend in ("auto", "torch_native")]))
def test_rows_are_those_of_merged_models(made, name: str, backend: str) -> None:
    """In chunks, too, and where the kernels sample; and tokens that are drawn are those that merged weights draw."""
    model = made(name)
    config = config_of(model.path, backend, max_model_len=CASES[name].max_model_len)
    greedy = check_rows(ModelRunner(config, model.path), model)
    runner = ModelRunner(config, model.path)
    model.load(runner)
    prompts = prompts_of(load_spec(model.path).vocab_size)
    keys = [row % len(model.models) for row in range(len(prompts))]
    assert Driver(runner, chunk=5, seed=3).generate(prompts, COUNT, adapters=keys) == greedy


@pytest.mark.slow
def test_drawn_tokens(made, tmp_path: pathlib.Path) -> None:
    """Are those of an executor that has the merged weights."""
    model = made("qwen3")
    params = [sampled(seed, 0.7 + seed / 50, top_p=0.9 if seed % 2 else 1.0) for seed in range(NUM_ROWS)]
    prompts, keys = prompts_of(199), [1, 2, 0, 8] * (NUM_ROWS // 4)
    expected = {}
    for key in (0, 1, 2, 8):
        model.models[key].save_pretrained(tmp_path / str(key))
        drawn = Driver(ModelRunner(config_of(tmp_path / str(key)), tmp_path / str(key))).generate(prompts, COUNT, params)
        expected |= {row: drawn[row] for row in range(NUM_ROWS) if keys[row] == key}
    for backend in ("auto", "torch_native"):
        runner = ModelRunner(config_of(model.path, backend), model.path)
        model.load(runner)
        found = Driver(runner, chunk=7).generate(prompts, COUNT, params, keys)
        assert found == [expected[row] for row in range(NUM_ROWS)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", ["auto", "torch_native"])
def test_a_tied_head(tmp_path: pathlib.Path, backend: str) -> None:
    """An adapter of the embedding leaves the head alone, and the other way round, as in PEFT before it merges them."""
    model = CASES["cohere2"].make()
    model.save_pretrained(tmp_path / "model")
    changes = ({"embedding": True}, {"head": True}, {"embedding": True, "head": True})
    adapters = [write_adapter(tmp_path / str(key), tmp_path / "model", seed=key, size=0.5, **each) for key, each in enumerate(changes, 1)]
    models = [peft.PeftModel.from_pretrained(copy.deepcopy(model), adapter).eval() for adapter in adapters]
    check_rows(
        ModelRunner(config_of(tmp_path / "model", backend), tmp_path / "model"), Made(tmp_path / "model", adapters, [model, *models])
    )


@pytest.mark.parametrize(
    "layout", slow_but(["gptq 4 bits, act-order"], ["gptq 4 bits, act-order", "awq", "nf4, double", "float-quantized, blocks"])
)
@pytest.mark.parametrize("backend", slow_but(["auto"], ["auto", "torch_native"]))
def test_quantised_weights(tmp_path: pathlib.Path, layout: str, backend: str) -> None:
    """Against the model with the weights that the codes stand for. Rows of q, k and v change places in it. The least rank and the most."""
    random_model("gpt_neox", tmp_path / "random")
    (tmp_path / "model").mkdir()
    meant = rewrite(tmp_path / "random", tmp_path / "model", LAYOUTS[layout])
    model = plain(tmp_path / "random", tmp_path, meant)
    path = tmp_path / "model"
    runner = ModelRunner(config_of(path, backend, max_adapter_rank=256), path)
    check_rows(runner, make(model, path, tmp_path, (1, 16, 256)))


@pytest.mark.parametrize(
    ("backend", "options"), slow_but([("auto", BFLOAT16)], [("auto", BFLOAT16), ("torch_native", BFLOAT16), *QUANTIZED])
)
@pytest.mark.skipif(os.environ.get("AENGINE_CPU_LEVEL") == "torch", reason="AENGINE_CPU_LEVEL turns the CPU kernels off")
def test_other_numbers(made, backend: str, options: dict[str, str]) -> None:
    """Logits are near those of the row's own merged model, and nearer to them than to those of any other."""
    model = made("qwen3")
    runner = ModelRunner(config_of(model.path, backend, **options), model.path)
    model.load(runner)
    seen = record_logits(runner)
    prompts = prompts_of(199, len(model.models))
    Driver(runner).generate(prompts, 1, adapters=range(len(prompts)))
    for key, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = torch.stack([each(torch.tensor([prompt])).logits[0, -1] for each in model.models])
        errors = (expected - seen[0][key]).norm(dim=1) / expected.norm(dim=1)
        assert int(errors.argmin()) == key
        assert 1e-4 < errors[key] < 0.4, errors[key]


@pytest.mark.parametrize(("name", "mode", "backend"), slow_but([("qwen3", "exact", "auto")], RANKED))
def test_ranks(made, name: str, mode: str, backend: str) -> None:
    """Each rank has its part of the low-rank matrices."""
    model = made(name)
    config = config_of(model.path, backend, tensor_parallel_size=2, tensor_parallel_mode=mode)
    with runner_on_ranks(config, model.path) as ranks:
        check_rows(ranks.runner, model)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", slow_but(["draft"], ["ngram", "draft"]))
def test_an_engine_that_speculates(made, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts for all adapters, twice: pages of one are never read by another, and drafts are checked with the row's own. The
    draft model has none."""
    model = made("qwen3")
    use_every_draft(monkeypatch)
    options = {"speculative": drafter, "page_size": 4, "max_num_batched_tokens": 48, "max_num_seqs": 12}
    if drafter == "draft":
        options["speculative_model"] = str(model.path)
    names = [None, *(path.name for path in model.adapters)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [prompt * 3 for prompt in prompts_of(199, 2)]
    asked = [(key, prompt) for _ in range(2) for key in range(len(names)) for prompt in prompts]

    async def run() -> tuple[list[Completion], EngineStats]:
        adapters = {path.name: str(path) for path in model.adapters}
        async with AsyncEngine(config_of(model.path, adapters=adapters, max_adapters=3, **options)) as engine:
            found = await asyncio.gather(*(engine.generate(prompt, params, adapter=names[key]) for key, prompt in asked))
            return found, engine.stats()

    completions, stats = asyncio.run(run())
    for (key, prompt), completion in zip(asked, completions, strict=True):
        model.check(key, prompt, list(completion.token_ids))
    assert stats.draft_tokens > stats.accepted_draft_tokens > 0
    assert stats.cached_prompt_tokens > 0
