"""Drafts change nothing of what a model's sequences get: neither tokens nor logprobs, whatever the drafts are."""

from __future__ import annotations

import functools
import pathlib
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from every_draft import use_every_draft
from reference import save_tiny
from slow_cases import slow_but
from test_graphs import graph_runner
from test_greedy import make_runner

from aengine.api.outputs import DraftSource
from aengine.runner.contract import InFlightStep, Step
from aengine.runner.runner import ModelRunner
from aengine.runner.torch.graphs import DecodeGraphs, Forward
from aengine.scheduler.drafters import Draft, ModelDrafter
from aengine.scheduler.plan import RowParams, StepPlan
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request, SchedulerConfig

NUM_REQUESTS = 60
Tokens = list[tuple[int, float | None]]  # with their logprobs


@pytest.fixture(scope="module", params=slow_but(["cpu", "graphs"], ["cpu", "torch_native", "graphs"]))
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("qwen3-partly-windowed", path)
    if request.param == "graphs":
        made = graph_runner(path, graph_sizes=None, speculative="ngram", max_drafts=3)
    else:
        made = make_runner(path, page_size=4, attention_backend=request.param)
    yield made
    made.close()


def not_twice(logits: torch.Tensor, token_ids: list[int]) -> None:
    logits[token_ids[-1]] = -torch.inf


def random_requests(rng: random.Random, vocab_size: int) -> list[Request]:
    requests = []
    for key in range(NUM_REQUESTS):
        params = RowParams(temperature=rng.choice([0.0, 0.3, 1.0]), top_k=rng.choice([0, 0, 1, 20]), top_p=1.0, min_p=0.0, seed=key)
        if rng.random() < 0.6:
            changes = {
                "top_p": 0.8,
                "min_p": 0.05,
                "logprobs": rng.choice([0, 2]),
                "presence_penalty": 0.7,
                "frequency_penalty": 0.4,
                "repetition_penalty": 1.3,
                "logit_bias": ((rng.randrange(vocab_size), 4.0),),
                "bad_words": ((rng.randrange(vocab_size), rng.randrange(vocab_size)), (rng.randrange(vocab_size),)),
                "processors": (not_twice,),
            }
            names = rng.sample(sorted(changes), rng.randint(1, 3))
            params = replace(params, **{name: changes[name] for name in names})
        stop_ids = tuple(rng.randrange(vocab_size) for _ in range(rng.choice([0, 3, 60])))
        if stop_ids and rng.random() < 0.5:
            params = replace(params, min_tokens=rng.randint(1, 8), stop_ids=stop_ids)
        prompt = np.array([rng.randrange(vocab_size) for _ in range(rng.randint(1, 40))], np.int32)
        max_tokens = rng.randint(1, 30)
        requests.append(Request(key, prompt, params, max_tokens, stop_token_ids=frozenset(stop_ids), max_drafts=rng.choice([0, 1, 3, 8])))
    return requests


class Drafts:
    """Of the outputs that are known to come: right, wrong and half right."""

    def __init__(self, outputs: dict[int, Tokens], requests: list[Request], rng: random.Random) -> None:
        self.sequences = [request.prompt.tolist() + [token for token, _ in outputs[request.key]] for request in requests]
        self.rng = rng
        self.num_proposed = self.num_accepted = 0

    def assign(self, row: int, group: object = None, context: object = None) -> None:
        pass

    def release(self, row: int, tokens: object) -> None:
        pass

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        self.num_accepted += num_accepted

    def propose(self, row: int, tokens: np.ndarray, most: int, *, by_model: bool = True) -> Draft:
        known = tokens.tolist()
        following = next((one[len(known) :] for one in self.sequences if one[: len(known)] == known), [])
        right = following[: self.rng.choice([0, self.rng.randint(0, most), most])]
        self.num_proposed += most
        return Draft(
            np.array((right + [self.rng.randrange(100) for _ in range(most)])[: self.rng.randint(0, most)], np.int32), DraftSource.NGRAM
        )


class OfAModel(ModelDrafter):
    """Now and then random drafts are in their place, so that the model has accepted less than the draft model has computed."""

    rng = np.random.default_rng(0)
    num_proposed = num_accepted = 0

    def propose(self, row: int, tokens: np.ndarray, most: int, *, by_model: bool = True) -> Draft:
        draft = super().propose(row, tokens, most, by_model=by_model)
        return draft if self.rng.random() < 0.8 else Draft(self.rng.integers(100, size=most, dtype=np.int32), DraftSource.NGRAM)

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        if draft.by_model:
            self.num_proposed += len(draft.token_ids)
            self.num_accepted += num_accepted


def run(
    runner: ModelRunner, requests: list[Request], first_step: int, drafter: Drafts | OfAModel | None, num_pages: int
) -> tuple[dict[int, Tokens], int]:
    """All of them at once. Returns what they got, by key, and the number of the next step."""
    sizes = runner.max_num_seqs, runner.max_num_batched_tokens, runner.max_model_len, num_pages, runner.page_size
    drafting = {"has_draft_model": isinstance(drafter, OfAModel), "has_draft_head": runner.draft_source is DraftSource.MTP}
    config = SchedulerConfig(*sizes, windows=runner.windows, max_drafts=8, **drafting)
    scheduler = Scheduler(config, drafter=drafter)
    scheduler._num_steps = first_step
    outputs: dict[int, Tokens] = {request.key: [] for request in requests}
    with_logprobs = {request.key for request in requests if request.params.logprobs is not None}
    flights: deque[tuple[StepPlan, InFlightStep]] = deque()
    for request in requests:
        scheduler.submit(request)
    while True:
        plan = scheduler.schedule()
        if plan is not None:
            flights.append((plan, runner.launch(plan)))
        elif not flights:
            return outputs, scheduler._num_steps
        if plan is None or len(flights) > 1 or not flights[-1][1].overlaps:
            returned, step = flights.popleft()
            scheduler.commit(returned, step.result())
        updates = scheduler.take_updates()
        for i, (key, token) in enumerate(zip(updates.keys, updates.token_ids, strict=True)):
            wanted = key in with_logprobs and updates.logprobs is not None
            outputs[key].append((token, float(updates.logprobs.token_logprobs[i]) if wanted else None))
        assert not any(finished.error for finished in updates.finished)


def verified_by_graph(runner: ModelRunner) -> list[Step] | None:
    """Steps with drafts from here on that are replayed. None: the runner has no graphs."""
    graphs = runner._executor._model.graphs if runner.executor_name == "torch" else None
    if graphs is None:
        return None
    found, run = [], DecodeGraphs.run

    def noting(step: Step, *given: torch.Tensor | None) -> Forward | None:
        done = run(graphs.decodes, step, *given)
        if done is not None and step.drafts is not None:
            found.append(step)
        return done

    graphs.decodes.run = noting
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("num_pages", [400, 40])
def test_drafts_change_nothing(runner: ModelRunner, num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs also in steps with more drafts than any graph is for."""
    use_every_draft(monkeypatch)
    rng = random.Random(num_pages)
    requests = random_requests(rng, 100)
    expected, steps = run(runner, requests, 0, None, num_pages)
    drafter = Drafts(expected, requests, rng)
    by_graph = verified_by_graph(runner)
    found, end = run(runner, requests, steps, drafter, num_pages)
    assert by_graph is None or len(by_graph) > 5
    assert_same(runner, found, expected)
    assert drafter.num_proposed > 500
    assert end - steps < steps


def assert_same(runner: ModelRunner, found: dict[int, Tokens], expected: dict[int, Tokens]) -> None:
    for key, tokens in expected.items():
        assert [token for token, _ in found[key]] == [token for token, _ in tokens]
        logprobs, before = ([logprob for _, logprob in each if logprob is not None] for each in (found[key], tokens))
        np.testing.assert_allclose(logprobs, before, rtol=0, atol=0 if runner.executor_name == "cpu" else 1e-4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", slow_but(["cpu", "graphs"], ["cpu", "torch_native", "graphs"]))
def test_a_model_that_is_its_own_draft_model(backend: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nothing but the draw changes is accepted, all of it."""
    use_every_draft(monkeypatch)
    save_tiny("qwen3-partly-windowed", tmp_path)
    options = {"speculative": "draft", "speculative_model": str(tmp_path), "max_drafts": 8, "max_num_seqs": 6, "page_size": 4}
    if backend == "graphs":
        runner = graph_runner(tmp_path, graph_sizes=None, **options)
    else:
        runner = make_runner(tmp_path, attention_backend=backend, **options)
    attention, layers = runner.spec.layers[0].attention, runner.spec.num_layers
    per_layer = 4 * 2 * attention.num_kv_heads * attention.head_dim * 4  # page_size, keys and values, float32
    in_pages = layers // len(runner.windows)  # layers of the model, whose windows have pages of their own
    assert runner._executor.bytes_per_page() == (in_pages + layers) * per_layer
    requests = random_requests(random.Random(0), 100)[:30]
    expected, steps = run(runner, requests, 0, None, 80)
    drafter = OfAModel()
    found, end = run(runner, requests, steps, drafter, 80)
    assert_same(runner, found, expected)
    assert drafter.num_accepted > 0.4 * drafter.num_proposed > 60, (drafter.num_accepted, drafter.num_proposed)
    sampled = [RowParams(temperature=key % 2, top_k=0, top_p=0.9, min_p=0.0, seed=key) for key in range(9)]
    plain = [Request(key, np.arange(1 + 3 * key, dtype=np.int32), sampled[key], 30, max_drafts=key) for key in range(9)]
    alone = OfAModel()
    alone.propose = functools.partial(ModelDrafter.propose, alone)
    replayed = runner._executor._draft.model.graphs.decodes if backend == "graphs" else None
    before = 0 if replayed is None else replayed._num_steps
    run(runner, plain, end, alone, 400)
    assert replayed is None or replayed._num_steps - before > 30
    assert alone.num_accepted > 0.95 * alone.num_proposed > 100, (alone.num_accepted, alone.num_proposed)
    runner.close()
