"""The scheduler drives several ranks with random plans: after every step all have the same page tables and last tokens, and each request
gets the tokens that it gets alone on one rank."""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from every_draft import EveryDraft
from reference import save_tiny
from runner_ranks import RankedRunner, State, runner_on_ranks
from simulation import FakeClock
from slow_cases import slow_but

from aengine.api.config import EngineConfig
from aengine.api.outputs import DraftSource, FinishReason
from aengine.parallel.messages import LastTokens, Plan
from aengine.runner.runner import ModelRunner
from aengine.scheduler.drafters import Draft
from aengine.scheduler.plan import RowParams, StepPlan
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request, SchedulerConfig

VOCAB, LONGEST = 199, 90
FAMILIES = ("llama", "qwen3-partly-windowed")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    paths = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, path in paths.items():
        save_tiny(name, path)
    return paths


class KnowingDrafter:
    """Satisfies `Drafter`. Proposes what comes, something else, or both."""

    def __init__(self, truth_of: Callable[[int], Sequence[int]], rng: random.Random) -> None:
        """`truth_of`: the tokens of the request that has a row."""
        self._truth_of = truth_of
        self._rng = rng

    def assign(self, row: int, group: object = None, context: object = None) -> None:
        pass

    def release(self, row: int, tokens: object) -> None:
        pass

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        pass

    def propose(self, row: int, tokens: np.ndarray, most: int, *, by_model: bool = True) -> Draft:
        count = self._rng.randint(0, most)
        right = list(self._truth_of(row)[len(tokens) :][: self._rng.choice([0, count, self._rng.randint(0, count)])])
        ids = (right + [self._rng.randrange(VOCAB) for _ in range(count)])[:count]
        return Draft(np.array(ids, np.int32), DraftSource.NGRAM)


class Run:
    """A scheduler over a runner: what it gives for each request."""

    def __init__(self, runner: ModelRunner, truths: dict[int, list[int]], rng: random.Random | None = None) -> None:
        """With `rng` there are drafts."""
        config = SchedulerConfig(
            runner.max_num_seqs,
            runner.max_num_batched_tokens,
            runner.max_model_len,
            runner.num_pages,
            runner.page_size,
            runner.windows,
            max_drafts=0 if rng is None else 5,
        )
        self.runner = runner
        self.clock = FakeClock()
        self.scheduler = Scheduler(config, self.clock, None if rng is None else KnowingDrafter(lambda row: truths[self._key(row)], rng))
        if self.scheduler._drafts is not None:
            self.scheduler._drafts._lengths = EveryDraft(config.max_num_seqs, rng)
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.kinds: set[str] = set()  # of plans that there were

    def _key(self, row: int) -> int:
        sequence = self.scheduler._rows.sequences[row]
        assert sequence is not None
        return sequence.request.key

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.kinds |= kinds_of(plan)
            self.scheduler.commit(plan, self.runner.launch(plan).result())
        updates = self.scheduler.take_updates()
        for key, token in zip(updates.keys, updates.token_ids, strict=True):
            self.outputs.setdefault(key, []).append(token)
        self.reasons.update((finished.key, finished.reason) for finished in updates.finished)
        self.clock.now += 1.0
        return plan is not None


def kinds_of(plan: StepPlan) -> set[str]:
    kinds = {
        "decodes and chunks": 0 < plan.num_decodes < len(plan.rows),
        "copies": len(plan.copy_from) > 0,
        "drafts": bool((plan.num_sampled > 1).any()),
        "nothing sampled": not plan.num_sampled.any(),
        "scored prompts": plan.scores_prompts,
        "pages of several groups": len(set(plan.page_groups.tolist())) > 1,
        "pages behind a window": bool((plan.page_ids == 0).any()),
    }
    return {kind for kind, there in kinds.items() if there}


def requests_of(rng: random.Random) -> list[Request]:
    """Greedy and drawn ones that share prefixes, some with forks."""
    prefixes = [[rng.randrange(VOCAB) for _ in range(LONGEST)] for _ in range(2)]
    requests: list[Request] = []
    for _ in range(rng.randint(6, 14)):
        prompt = rng.choice(prefixes)[: rng.choice([0, 4, 17, 60])] + [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 12]))]
        num_forks = rng.choice([0, 0, 0, 2])
        first = Request(
            key=len(requests),
            prompt=np.array(prompt, np.int32),
            params=RowParams(
                rng.choice([0.0, 0.0, 0.8]), rng.choice([0, 20]), rng.choice([1.0, 0.9]), 0.0, rng.randrange(1000), **extras(rng)
            ),
            max_tokens=rng.randint(1, min(25, LONGEST - len(prompt))),
            priority=rng.choice([0, 0, 1, -1]),
            num_forks=num_forks,
        )
        requests.append(first)
        for _ in range(num_forks):
            params = dataclasses.replace(first.params, seed=rng.randrange(1000), prompt_logprobs=None)
            requests.append(dataclasses.replace(first, key=len(requests), params=params, num_forks=0, fork_of=first.key))
    return requests


def extras(rng: random.Random) -> dict[str, Any]:
    """What logits are needed for."""
    return {
        "frequency_penalty": rng.choice([0.0, 0.0, 0.5]),
        "logprobs": rng.choice([None, None, 2]),
        "prompt_logprobs": rng.choice([None, None, 0]),
        "logit_bias": rng.choice([(), ((3, 5.0),)]),
    }


def config_of(rng: random.Random, model_dir: pathlib.Path, bytes_per_token: int, size: int) -> EngineConfig:
    """Often there are few more pages than one sequence needs."""
    page_size, most_seqs = rng.choice([1, 4, 16]), rng.choice([2, 5, 8])
    num_tokens = LONGEST + 2 * page_size + rng.choice([0, 20, 300])
    return EngineConfig(
        model=str(model_dir),
        dtype="float32",
        device="cpu",
        page_size=page_size,
        max_model_len=LONGEST,
        max_num_seqs=most_seqs,
        max_num_batched_tokens=max(most_seqs, rng.choice([8, 30, 200])),
        kv_cache_memory=num_tokens * bytes_per_token // size,
        tensor_parallel_size=size,
    )


def alone(model_dir: pathlib.Path, requests: list[Request]) -> tuple[dict[int, list[int]], int]:
    """All tokens of each request, and the bytes of a token's KV."""
    config = EngineConfig(model=str(model_dir), dtype="float32", device="cpu", max_model_len=LONGEST, kv_cache_memory=32 << 20)
    run = Run(ModelRunner(config, model_dir), {})
    for request in requests:
        run.scheduler.submit(request)
    while run.step():
        pass
    tokens = {request.key: [*request.prompt.tolist(), *run.outputs[request.key]] for request in requests}
    return tokens, run.runner.kv_bytes_per_token


def check_states(ranked: RankedRunner) -> None:
    own = State.of(ranked.runner)
    for other in ranked.others():
        assert np.array_equal(other.page_table, own.page_table)
        assert np.array_equal(other.last_tokens, own.last_tokens)


def run_workload(model_dir: pathlib.Path, seed: int, size: int) -> Run:
    rng = random.Random(seed)
    requests = requests_of(rng)
    truths, bytes_per_token = alone(model_dir, requests)
    p_cancel, p_park = rng.choice([0.0, 0.1]), rng.choice([0.0, 0.2])
    with runner_on_ranks(config_of(rng, model_dir, bytes_per_token, size), model_dir) as ranked:
        run = Run(ranked.runner, truths, random.Random(seed) if seed % 2 else None)
        check_states(ranked)
        waiting, parked, cancelled = list(requests), set[int](), set[int]()
        for _ in range(3000):
            while waiting and (waiting[0].fork_of is not None or rng.random() < 0.4):
                run.scheduler.submit(waiting.pop(0))
            submitted = len(requests) - len(waiting)
            if submitted and rng.random() < p_cancel:
                run.scheduler.cancel(key := rng.randrange(submitted))
                cancelled.add(key)
            if submitted and rng.random() < p_park:
                run.scheduler.set_parked(key := rng.randrange(submitted), True)
                parked.add(key)
            if parked and (rng.random() < 0.2 or not waiting):
                run.scheduler.set_parked(parked.pop(), False)
            if run.step():
                check_states(ranked)
            elif not waiting and not parked:
                break
        if run.scheduler.stats().preemptions:
            run.kinds.add("preemptions")
    for request in requests:
        output = run.outputs.get(request.key, [])
        expected = truths[request.key][len(request.prompt) :]
        assert output == (expected[: len(output)] if request.key in cancelled else expected), request
    assert len(run.reasons) == len(requests)
    return run


QUICK = [("llama", 2, (1, 4))]
CASES = [("llama", 2, range(5, 9)), ("llama", 4, range(20, 23)), ("qwen3-partly-windowed", 2, (7, 10))]


@pytest.mark.parametrize(("name", "size", "seeds"), slow_but(QUICK, [*QUICK, *CASES]))
def test_random_plans(models: dict[str, pathlib.Path], name: str, size: int, seeds: Sequence[int]) -> None:
    kinds: set[str] = set()
    for seed in seeds:
        print(f"workload {seed}")
        kinds |= run_workload(models[name], seed, size).kinds
    expected = {"decodes and chunks", "copies", "drafts", "nothing sampled", "scored prompts", "preemptions"}
    if name != "llama":
        expected |= {"pages of several groups", "pages behind a window"}
    assert kinds == expected


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("broken", ["a page", "last tokens"])
def test_a_rank_that_differs_is_seen(models: dict[str, pathlib.Path], broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "a page":
        plans = Plan.step_plan

        def other_page(message: Plan) -> StepPlan:
            plan = plans(message)
            return dataclasses.replace(plan, page_ids=plan.page_ids[::-1])

        monkeypatch.setattr(Plan, "step_plan", other_page)
    else:
        init = LastTokens.__init__
        monkeypatch.setattr(LastTokens, "__init__", lambda self, tokens: init(self, tokens[::-1] + 1))
    with pytest.raises(AssertionError):
        run_workload(models["llama"], 2, 2)
