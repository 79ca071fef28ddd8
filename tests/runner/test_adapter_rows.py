"""The scheduler drives a model whose rows have adapters, with random plans. Each request gets what it gets alone of a model whose weights
PEFT has merged with its adapter."""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from eager_capture import EagerCapture
from every_draft import EveryDraft
from reference import save_tiny
from runner_ranks import runner_on_ranks
from slow_cases import slow_but
from test_drafts import OfAModel
from test_ranks_fuzz import KnowingDrafter, config_of, kinds_of, requests_of
from tiny_adapters import write_adapter

from aengine.api.config import EngineConfig
from aengine.api.errors import InsufficientMemoryError
from aengine.api.outputs import FinishReason
from aengine.runner import weight_changes
from aengine.runner.contract import InFlightStep, LoadAdapter
from aengine.runner.runner import ModelRunner
from aengine.scheduler.drafters import Drafter
from aengine.scheduler.plan import RowParams, StepPlan
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request, SchedulerConfig

ADAPTERS = {1: {"rank": 4, "targets": ("q_proj", "v_proj")}, 2: {"rank": 16, "head": True}, 5: {"rank": 7, "embedding": True}}
"""By key."""


@dataclasses.dataclass
class Models:
    base: pathlib.Path
    adapters: dict[int, pathlib.Path]  # by key
    merged: dict[int, pathlib.Path]  # the same; the model itself under 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("adapters")
    save_tiny("qwen3-partly-windowed", base := folder / "base")
    adapters, merged = {}, {0: base}
    for key, fields in ADAPTERS.items():
        adapters[key] = write_adapter(folder / f"adapter{key}", base, seed=key, size=0.4, **fields)
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        merged[key] = folder / f"merged{key}"
        peft.PeftModel.from_pretrained(model, adapters[key]).merge_and_unload().save_pretrained(merged[key])
    return Models(base, adapters, merged)


@dataclasses.dataclass
class Output:
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)  # where they are asked for
    prompt_logprobs: dict[int, float] = dataclasses.field(default_factory=dict)  # by position


class Run:
    """A scheduler over a runner, with a step ahead where the runner can have one."""

    def __init__(self, runner: ModelRunner, requests: list[Request], truths: dict[int, Output] | None = None) -> None:
        """With `truths` there are drafts, of the runner's draft model or of what comes."""
        sizes = runner.max_num_seqs, runner.max_num_batched_tokens, runner.max_model_len, runner.num_pages, runner.page_size
        rng = random.Random(0)
        drafter: Drafter | None = None
        has_model = runner.draft_source is not None
        if has_model:
            drafter = OfAModel()
        elif truths is not None:
            wholes = {one.key: one.prompt.tolist() + truths[one.key].tokens for one in requests}
            drafter = KnowingDrafter(lambda row: wholes[self.key(row)], rng)
        config = SchedulerConfig(*sizes, runner.windows, max_drafts=0 if drafter is None else 5, has_draft_model=has_model, max_adapters=2)
        self.scheduler = Scheduler(config, lambda: 0.0, drafter)
        if self.scheduler._drafts is not None:
            self.scheduler._drafts._lengths = EveryDraft(config.max_num_seqs, rng)
        self.runner = runner
        self.outputs = {request.key: Output() for request in requests}
        self.params = {request.key: request.params for request in requests}
        self.reasons: dict[int, FinishReason] = {}
        self.kinds: set[str] = set()
        self._flights = deque[tuple[StepPlan, InFlightStep]]()

    def key(self, row: int) -> int:
        sequence = self.scheduler._rows.sequences[row]
        assert sequence is not None
        return sequence.request.key

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.kinds |= kinds_of(plan)
            self._flights.append((plan, self.runner.launch(plan)))
        if not self._flights:
            return False
        if len(self._flights) > 1:
            self.kinds.add("ahead")
        if plan is None or len(self._flights) > 1 or not self._flights[-1][1].overlaps:
            returned, step = self._flights.popleft()
            self.scheduler.commit(returned, step.result())
        updates = self.scheduler.take_updates()
        for i, (key, token) in enumerate(zip(updates.keys, updates.token_ids, strict=True)):
            self.outputs[key].tokens.append(token)
            if updates.logprobs is not None and self.params[key].logprobs is not None:
                self.outputs[key].logprobs.append(float(updates.logprobs.token_logprobs[i]))
        for key, piece in updates.prompt_logprobs:
            self.outputs[key].prompt_logprobs |= dict(enumerate(piece.logprobs.token_logprobs.tolist(), piece.start))
        self.reasons.update((finished.key, finished.reason) for finished in updates.finished)
        return True


def with_adapters(requests: list[Request], rng: random.Random, *, plain: bool) -> list[Request]:
    """`plain`: the kernels sample all tokens."""
    made: list[Request] = []
    for request in requests:
        key = rng.choice([0, *ADAPTERS]) if request.fork_of is None else made[request.fork_of].adapter
        params = request.params
        if plain:
            params = RowParams(params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
        made.append(dataclasses.replace(request, adapter=key, params=params))
    return made


def alone(models: Models, requests: list[Request]) -> tuple[dict[int, Output], int]:
    """What each request gets of a model with its adapter in the weights, and the bytes of a token's KV."""
    truths: dict[int, Output] = {}
    bytes_per_token = 0
    for key, path in models.merged.items():
        config = EngineConfig(model=str(path), dtype="float32", device="cpu", max_model_len=90, kv_cache_memory=32 << 20, threads=1)
        runner = ModelRunner(config, path)
        bytes_per_token = runner.kv_bytes_per_token
        run = Run(runner, mine := [dataclasses.replace(one, adapter=0) for one in requests if one.adapter == key])
        for request in mine:
            run.scheduler.submit(request)
        while run.step():
            pass
        truths |= run.outputs
        runner.close()
    return truths, bytes_per_token


@contextmanager
def running(models: Models, config: EngineConfig) -> Iterator[ModelRunner]:
    """A runner, on ranks that are threads if there are several, with all adapters."""
    with ExitStack() as stack:
        if config.num_ranks > 1:
            runner = stack.enter_context(runner_on_ranks(config, models.base)).runner
        else:
            runner = ModelRunner(config, models.base, None if config.eager else EagerCapture)
            stack.callback(runner.close)
        for key, path in models.adapters.items():
            runner.apply(runner.prepare(LoadAdapter(key, str(key), str(path))))
        yield runner


def run_workload(models: Models, seed: int, size: int = 1, **options: Any) -> set[str]:
    rng = random.Random(seed)
    requests = with_adapters(requests_of(rng), rng, plain=seed % 2 == 0)
    truths, bytes_per_token = alone(models, requests)
    config = dataclasses.replace(config_of(rng, models.base, bytes_per_token, size), threads=size * (1 + seed % 4 // 2), **options)
    with running(models, config) as runner:
        run = Run(runner, requests, truths if rng.random() < 0.5 else None)
        drive(run, requests, rng)
    check(run, requests, truths)
    return run.kinds


def drive(run: Run, requests: list[Request], rng: random.Random) -> None:
    """Submits and parks them at random, until all have ended."""
    waiting, parked = list(requests), set[int]()
    for _ in range(3000):
        while waiting and (waiting[0].fork_of is not None or rng.random() < 0.4):
            run.scheduler.submit(waiting.pop(0))
        submitted = len(requests) - len(waiting)
        if submitted and rng.random() < 0.1:
            run.scheduler.set_parked(key := rng.randrange(submitted), True)
            parked.add(key)
        if parked and (rng.random() < 0.3 or not waiting):
            run.scheduler.set_parked(parked.pop(), False)
        if not run.step() and not waiting and not parked:
            break
    if run.scheduler.stats().preemptions:
        run.kinds.add("preemptions")


def check(run: Run, requests: list[Request], truths: dict[int, Output]) -> None:
    assert len(run.reasons) == len(requests)
    for request in requests:
        found, expected = run.outputs[request.key], truths[request.key]
        asked = f"adapter {request.adapter} {ADAPTERS.get(request.adapter)}, {request.params}, prompt {request.prompt.tolist()}"
        about = f"{asked}: {found.tokens} instead of {expected.tokens}"
        assert found.tokens == expected.tokens, about
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-4, err_msg=about)
        assert found.prompt_logprobs.keys() == expected.prompt_logprobs.keys(), about
        for position, logprob in expected.prompt_logprobs.items():
            assert abs(found.prompt_logprobs[position] - logprob) < 1e-4, about


OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"attention_backend": "cpu"},
    "torch_native": {"attention_backend": "torch_native", "eager": True},
    "graphs": {"attention_backend": "torch_native", "graph_tokens": 60, "graph_sizes": (1, 2), "speculative": "ngram", "max_drafts": 5},
}
QUICK = [(1, range(4), "cpu"), (2, range(1, 3), "cpu")]
CASES = [
    *((1, range(first, first + 4), "cpu") for first in range(4, 28, 4)),
    (2, range(3, 9), "cpu"),
    (1, range(4), "torch_native"),
    (1, range(2, 3), "graphs"),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("size", "seeds", "backend"), slow_but(QUICK, [*QUICK, *CASES]))
def test_random_plans(models: Models, size: int, seeds: range, backend: str) -> None:
    kinds: set[str] = set()
    for seed in seeds:
        print(f"workload {seed}")
        kinds |= run_workload(models, seed, size, max_adapters=2, **OPTIONS[backend])
    assert kinds >= {"decodes and chunks", "nothing sampled", "pages of several groups", "pages behind a window"}
    if (backend, seeds) == ("cpu", range(4)):
        assert kinds >= {"ahead", "copies", "drafts", "scored prompts", "preemptions"}


@pytest.mark.slow
def test_a_draft_model_without_adapters(models: Models) -> None:
    assert "drafts" in run_workload(models, 2, speculative="draft", speculative_model=str(models.base), kv_cache_memory=1 << 20)


def test_a_wrong_adapter_is_seen(models: Models) -> None:
    swapped = dataclasses.replace(models, adapters=dict(zip(models.adapters, [*models.adapters.values()][::-1], strict=True)))
    with pytest.raises(AssertionError):
        run_workload(swapped, 0)


def test_an_adapter_that_does_not_fit_in_memory(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(models, EngineConfig(model=str(models.base), dtype="float32", device="cpu", kv_cache_memory=1 << 20)) as runner:
        monkeypatch.setattr(weight_changes, "free_host_memory", lambda: 1 << 10)
        with pytest.raises(InsufficientMemoryError, match=r"^adapter 'a' needs .* of host memory .* but 1\.00 KiB are available$"):
            runner.prepare(LoadAdapter(9, "a", str(models.adapters[1])))
