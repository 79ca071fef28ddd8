from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from aengine.bench import steps
from aengine.bench.floor import Machine, MachineProbe
from aengine.bench.steps import ROUNDS, Case, measure_steps
from aengine.config import EngineConfig
from aengine.models.hub import resolve_model
from aengine.runner.base import InFlightStep
from aengine.runner.model_runner import ModelRunner
from aengine.scheduler.plan import StepPlan

CASES = [Case(rows=2, length=1, context=20), Case(rows=1, length=16, context=0)]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(EngineConfig(model="demo", device="cpu", dtype="float32", kv_cache_memory=8 << 20), resolve_model("demo"))


def test_the_machine_is_measured_around_every_round(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Machine] = []

    def measure(probe: MachineProbe) -> Machine:
        measured.append(Machine(bytes_per_second=1e9 * (1 + len(measured)), flops_per_second=1e30))
        return measured[-1]

    rounds = iter([[0.001], [0.002], [0.004], [0.008], [0.016]])
    monkeypatch.setattr(MachineProbe, "measure", measure)
    monkeypatch.setattr(steps, "_time_steps", lambda *arguments, **options: next(rounds))
    (step,) = measure_steps(runner, CASES[:1])
    figures, machine = step.figures, step.machine
    assert len(measured) == ROUNDS + 1 == 6
    assert machine.bytes_per_second == 3.5e9
    assert figures.milliseconds == 4.0
    assert figures.best_milliseconds == 1.0
    size = figures.weight_bytes + figures.kv_bytes
    assert figures.floor_milliseconds == pytest.approx(1e3 * size / 3.5e9)
    floors = [size * (1 / before + 1 / after) / 2 * 1e-9 for before, after in zip(range(1, 6), range(2, 7), strict=True)]
    fractions = sorted(floor / seconds for floor, seconds in zip(floors, [0.001, 0.002, 0.004, 0.008, 0.016], strict=True))
    assert figures.fraction == pytest.approx(fractions[2])


def test_rows_that_decode_begin_with_different_tokens(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round: equal rows would choose the same experts."""
    plans: list[StepPlan] = []
    launch = runner.launch

    def record(plan: StepPlan) -> InFlightStep:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(runner, "launch", record)
    for new_rows in (True, False):
        plans.clear()
        steps._time_steps(runner, CASES[0], 0.0, itertools.count(), new_rows=new_rows)
        first, *others = plans
        assert first.num_decodes == 0
        assert len(set(first.token_ids.tolist())) == CASES[0].rows
        assert others
        assert all((plan.num_decodes, len(plan.token_ids)) == (CASES[0].rows, 0) for plan in others)


@pytest.mark.slow
def test_real_steps(runner: ModelRunner) -> None:
    found = [step.figures for step in measure_steps(runner, CASES, seconds=0.01)]
    assert [figures.case for figures in found] == CASES
    for figures in found:
        assert 0 < figures.best_milliseconds <= figures.milliseconds
        assert figures.fraction > 0
        assert figures.tokens_per_second == pytest.approx(1e3 * figures.case.rows * figures.case.length / figures.milliseconds)


def test_pages_behind_windows_are_not_needed() -> None:
    runner = SimpleNamespace(windows=(None, 8), page_size=4, num_pages=1 + 2 * (6 + 3))
    runner.max_num_seqs = runner.max_num_batched_tokens = runner.max_model_len = 100
    case = Case(rows=2, length=1, context=20)  # a query at position 20 sees positions from 13 on, in page 3
    pages = steps._pages(runner, case)
    assert pages.shape == (2, 2, 6)
    assert (pages == 0).tolist() == [[[False] * 6] * 2, [[True] * 3 + [False] * 3] * 2]
    assert sorted(pages[pages > 0].tolist()) == list(range(1, 19))
    assert np.array_equal(pages[1, 0, 3:], [13, 14, 15])
    assert steps.why_not(runner, case) is None
    runner.num_pages -= 1
    assert steps.why_not(runner, case) == "it needs 18 KV pages of 4 tokens, and there are 17"


def test_rows_with_adapters_are_set_beside_rows_without(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[list[int]] = []
    launch = ModelRunner.launch

    def record(runner: ModelRunner, plan: StepPlan) -> InFlightStep:
        keys.append(plan.adapters.tolist())
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", record)
    config = EngineConfig(model="demo", device="cpu", kv_cache_memory=8 << 20, max_num_seqs=4)
    cases = [Case(rows=3, length=1, context=20, adapters=2), Case(rows=1, length=16, context=0, adapters=5)]
    measured = steps.measure_model("demo", config, cases, seconds=0.01, adapter_rank=4)
    (step,) = measured.steps
    assert step.figures.with_adapters is not None
    assert {tuple(each) for each in keys} == {(), (1, 2, 1)}
    assert "time with adapters over time without" in measured.show()
    assert measured.show().endswith("not measured: prefill 1 x 16 @ 0, 5 adapters: max_adapters is 4")
