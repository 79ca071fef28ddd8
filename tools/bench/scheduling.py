"""What the host does per step, without a model: `python -m tools.bench.scheduling`.

Drives scheduler, metadata and commit with random tokens. Prints microseconds per decode step by number of running sequences, their
share of a step of the bundled model on this machine, the cost of admitting a burst, and how two tenants of very unequal load are served.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict, astuple, dataclass

import numpy as np

from aengine.api.config import EngineConfig
from aengine.attention import build_layout
from aengine.bench.report import table
from aengine.models.loading.hub import DEMO, resolve_model
from aengine.runner.runner import ModelRunner
from aengine.scheduler.plan import RowParams, StepPlan, StepResult
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request, SchedulerConfig

PAGE_SIZE = 16
PROMPT_TOKENS = 128
VOCAB_SIZE = 4096
GREEDY = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Microseconds per decode step; medians, and the mean and 99th percentile of the sum, so that page borders count."""

    running: int
    schedule: float
    metadata: float
    commit: float
    mean: float
    p99: float
    model_step: float  # of the bundled model with as many sequences of the same length
    share: float  # of the mean in model_step


@dataclass(frozen=True, slots=True)
class BurstCost:
    waiting: int
    submit: float  # microseconds per request
    admit: float  # microseconds per request, prefill planning and commit included
    steps: int


@dataclass(frozen=True, slots=True)
class TenantShare:
    load: dict[str, int]  # requests per tenant
    served: dict[str, int]  # tokens computed while all are backlogged


def _scheduler(num_seqs: int, budget: int = 8192) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(budget, num_seqs),
            max_model_len=2048,
            num_pages=1 + num_seqs * (2048 // PAGE_SIZE),
            page_size=PAGE_SIZE,
        )
    )


def _submit(scheduler: Scheduler, key: int, rng: np.random.Generator, num_tokens: int, max_tokens: int, tenant: str = "") -> None:
    prompt = rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)
    scheduler.submit(Request(key=key, prompt=prompt, params=GREEDY, max_tokens=max_tokens, tenant=tenant, arrival=time.monotonic()))


def _result(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    return StepResult(plan.step, rng.integers(0, VOCAB_SIZE, int(plan.num_sampled.sum())).astype(np.int32))


def decode_cost(running: int, steps: int = 320) -> DecodeCost:
    rng = np.random.default_rng(0)
    scheduler = _scheduler(running)
    for key in range(running):
        _submit(scheduler, key, rng, PROMPT_TOKENS + int(rng.integers(PAGE_SIZE)), 1500)
    page_table = np.zeros((1, running, 2048 // PAGE_SIZE), np.int32)
    times: list[tuple[float, float, float]] = []
    while len(times) < steps:
        start = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        scheduled = time.perf_counter()
        page_table[plan.page_groups, plan.page_rows, plan.page_cols] = plan.page_ids
        build_layout(plan.rows, plan.num_decodes, plan.starts, plan.lengths, page_table, PAGE_SIZE)
        built = time.perf_counter()
        result = _result(plan, rng)
        returned = time.perf_counter()
        scheduler.commit(plan, result)
        scheduler.take_updates()
        scheduler.stats()
        done = time.perf_counter()
        if plan.num_decodes == running:
            times.append((scheduled - start, built - scheduled, done - returned))
    parts = np.array(times) * 1e6
    total = parts.sum(axis=1)
    model_step = _model_step(running)
    schedule, metadata, commit = (float(value) for value in np.median(parts, axis=0))
    return DecodeCost(
        running=running,
        schedule=schedule,
        metadata=metadata,
        commit=commit,
        mean=float(total.mean()),
        p99=float(np.percentile(total, 99)),
        model_step=model_step,
        share=float(total.mean()) / model_step,
    )


def _model_step(running: int, steps: int = 10) -> float:
    """Microseconds of a decode step of the bundled model in its runner."""
    config = EngineConfig(
        model=DEMO, max_num_seqs=running, max_num_batched_tokens=max(8192, running), max_model_len=512, kv_cache_memory=2 << 30
    )
    runner = ModelRunner(config, resolve_model(DEMO))
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=runner.max_num_batched_tokens,
            max_model_len=runner.max_model_len,
            num_pages=runner.num_pages,
            page_size=runner.page_size,
        )
    )
    rng = np.random.default_rng(0)
    for key in range(running):
        _submit(scheduler, key, rng, PROMPT_TOKENS, 300)
    times: list[float] = []
    while len(times) < steps:
        plan = scheduler.schedule()
        assert plan is not None
        start = time.perf_counter()
        result = runner.launch(plan).result()
        if plan.num_decodes == running:
            times.append(time.perf_counter() - start)
        scheduler.commit(plan, result)
    runner.close()
    return float(np.median(times)) * 1e6


def burst_cost(waiting: int = 1000) -> BurstCost:
    """`waiting` requests at once, of which 256 run at a time, until all have been admitted."""
    rng = np.random.default_rng(0)
    scheduler = _scheduler(256)
    start = time.perf_counter()
    for key in range(waiting):
        _submit(scheduler, key, rng, PROMPT_TOKENS, 2)
    submitted = time.perf_counter()
    steps = 0
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(plan, _result(plan, rng))
        scheduler.take_updates()
        steps += 1
    done = time.perf_counter()
    return BurstCost(waiting, (submitted - start) * 1e6 / waiting, (done - submitted) * 1e6 / waiting, steps)


def tenant_share() -> TenantShare:
    """Two tenants of equal weight, one with ten times the load, on an engine of 16 sequences."""
    rng = np.random.default_rng(0)
    scheduler = _scheduler(16, budget=512)
    load = {"loud": 3000, "quiet": 300}
    tenants = ["loud"] * load["loud"] + ["quiet"] * load["quiet"]
    for key, tenant in enumerate(tenants):
        _submit(scheduler, key, rng, 32, 32, tenant)
    row_tenants: dict[int, str] = {}
    started = 0
    served = dict.fromkeys(load, 0)
    waiting = dict(load)
    while min(waiting.values()) > 0:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, _result(plan, rng))
        new_rows = iter(plan.new_rows)
        for key, _, _, _ in scheduler.take_updates().started:
            row_tenants[next(new_rows).row] = tenants[key]
            waiting[tenants[key]] -= 1
            started += 1
        for row, length in zip(plan.rows.tolist(), plan.lengths.tolist(), strict=True):
            served[row_tenants[row]] += length
    return TenantShare(load, served)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.scheduling", description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256, 1024], help="numbers of running sequences")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    gc.collect()
    gc.freeze()  # a collection over everything torch has loaded would be most of the time
    decodes = [decode_cost(running) for running in options.running]
    burst, share = burst_cost(), tenant_share()
    if options.json:
        print(json.dumps({"decode": [asdict(cost) for cost in decodes], "burst": asdict(burst), "tenants": asdict(share)}))
        return
    print("decode step, microseconds")
    header = ("running", "schedule", "metadata", "commit", "mean", "p99", "model step", "share")
    print(table(header, [(*astuple(cost)[:-1], f"{cost.share:.1%}") for cost in decodes]))
    print(f"\nburst of {burst.waiting} requests of {PROMPT_TOKENS} tokens, 256 at a time, {burst.steps} steps")
    print(f"submit {burst.submit:.1f} us, admit and finish {burst.admit:.1f} us per request")
    total = sum(share.served.values())
    shares = ", ".join(f"{tenant} {tokens / total:.1%} ({share.load[tenant]} requests)" for tenant, tokens in share.served.items())
    print(f"\ntwo tenants of weight 1:1 while both are backlogged: {shares} of {total} tokens")


if __name__ == "__main__":
    main()
