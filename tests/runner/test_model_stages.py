"""A model in stages: every step's logits are those of one process, bit by bit, with as many steps in flight as there are stages, and with
adapters of some rows."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections import deque

import numpy as np
import pytest
import torch
from driver import GREEDY, record_logits
from reference import FAMILIES, save_tiny
from slow_cases import slow_but
from tiny_adapters import write_adapter

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError
from aengine.cache import PageNeeds
from aengine.runner.contract import InFlightStep, LoadAdapter
from aengine.runner.runner import ModelRunner
from aengine.scheduler.plan import StepPlan
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request, SchedulerConfig

OPTIONS = {"dtype": "float32", "device": "cpu", "page_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 60}
QUICK = [("gpt-oss", 1, 2)]  # windows in some layers, experts, sinks
SUPPORTED = [name for name in FAMILIES if not name.startswith("deepseek")]  # by the CPU kernels: its latent vectors are too narrow
SLOW = [(name, *ranks) for name, ranks in zip(SUPPORTED[::9], itertools.cycle(((1, 3), (2, 2))), strict=False)]


def logits_of(path: pathlib.Path, num_stages: int, **options: object) -> tuple[list[torch.Tensor], list[list[int]], int]:
    """Of each step, then the tokens of each request, and how many preemptions there were."""
    runner_config = EngineConfig(model=str(path), **{**OPTIONS, **options})  # type: ignore[arg-type]
    runner = ModelRunner(runner_config, path)
    runner.apply(runner.prepare(LoadAdapter(1, "one", str(path / "adapter"))))
    seen = record_logits(runner)
    limits = {name: getattr(runner, name) for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "page_size", "windows")}
    num_pages = 1 + PageNeeds(runner.windows, runner.page_size, runner.max_num_batched_tokens).pages(40) * 5 // 4  # of 160 tokens
    scheduler = Scheduler(SchedulerConfig(num_pages=num_pages, max_in_flight=num_stages, **limits))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 199, length).astype(np.int32) for length in (90, 3, 40, 17, 60, 8)]
    waiting = deque(Request(key, prompt, dataclasses.replace(GREEDY, seed=key), 30, adapter=key % 2) for key, prompt in enumerate(prompts))
    waiting.append(Request(6, np.append(prompts[0][:70], np.int32(1)), dataclasses.replace(GREEDY, temperature=1.0, seed=7), 30))
    tokens: dict[int, list[int]] = {request.key: [] for request in waiting}
    flights: deque[tuple[StepPlan, InFlightStep]] = deque()
    try:
        assert num_pages <= runner.num_pages
        assert runner.max_in_flight == runner_config.pipeline_parallel_size
        while True:
            if waiting:
                scheduler.submit(waiting.popleft())
            plan = scheduler.schedule()
            if plan is not None:
                flights.append((plan, runner.launch(plan)))
            if flights and (plan is None or len(flights) == num_stages):
                returned, step = flights.popleft()
                scheduler.commit(returned, step.result())
            elif plan is None:
                break
            updates = scheduler.take_updates()
            for key, token in zip(updates.keys, updates.token_ids, strict=True):
                tokens[key].append(token)
    finally:
        runner.close()
    return seen, list(tokens.values()), scheduler.stats().preemptions


@pytest.mark.slow
@pytest.mark.parametrize(("family", "size", "num_stages"), slow_but(QUICK, [*QUICK, *SLOW]))
def test_logits_of_stages(family: str, size: int, num_stages: int, tmp_path: pathlib.Path) -> None:
    save_tiny(family, tmp_path)
    write_adapter(tmp_path / "adapter", tmp_path, embedding=True, head=True)
    ranks = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages, "threads": 1}
    expected, tokens, preemptions = logits_of(tmp_path, num_stages)
    found, found_tokens, _ = logits_of(tmp_path, num_stages, **ranks)
    assert preemptions > 0 or "windowed" in family
    assert found_tokens == tokens
    assert [logits.shape for logits in found] == [logits.shape for logits in expected]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.slow
def test_stages_of_the_torch_decoder(tmp_path: pathlib.Path) -> None:
    """Where adapters have fixed memory, which another step may have written before the logits of a step are computed."""
    save_tiny("qwen2-tied-windowed", tmp_path)
    write_adapter(tmp_path / "adapter", tmp_path, embedding=True, head=True, size=0.5)
    options = {"attention_backend": "torch_native", "max_adapters": 2}
    expected, tokens, _ = logits_of(tmp_path, 2, **options)
    found, found_tokens, _ = logits_of(tmp_path, 2, tensor_parallel_size=2, pipeline_parallel_size=2, threads=1, **options)
    assert found_tokens == tokens
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_more_stages_than_layers(tmp_path: pathlib.Path) -> None:
    save_tiny("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="pipeline_parallel_size: 4 is more than the model's num_layers 3"):
        ModelRunner(EngineConfig(model=str(tmp_path), pipeline_parallel_size=4, **OPTIONS), tmp_path)  # type: ignore[arg-type]
