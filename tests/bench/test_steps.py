from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from aengine.api.config import EngineConfig
from aengine.bench import steps
from aengine.bench.floor import Machine, MachineProbe
from aengine.bench.step_cases import Case, CaseRows, case_pages, fill_pages, step_plan, why_not
from aengine.bench.steps import ROUNDS, StepBench
from aengine.models.config.model_config import load_spec
from aengine.models.loading.hub import resolve_model
from aengine.runner.contract import InFlightStep
from aengine.runner.runner import ModelRunner
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
    step = StepBench(runner).measure(CASES[0])
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


def test_all_pages_get_keys_and_values(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is copied from one that a prompt, or a copy before, has filled."""
    plans: list[StepPlan] = []
    launch = runner.launch

    def record(plan: StepPlan) -> InFlightStep:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(runner, "launch", record)
    fill_pages(runner, itertools.count())
    assert len(plans) > 2
    filled = set(plans[0].page_ids.tolist())
    for plan in plans[1:]:
        assert set(plan.copy_from.tolist()) <= filled
        filled |= set(plan.copy_to.tolist())
    assert filled == set(range(1, runner.num_pages))


@pytest.mark.slow
def test_real_steps(runner: ModelRunner) -> None:
    bench = StepBench(runner, seconds=0.01)
    found = [bench.measure(case).figures for case in CASES]
    assert [figures.case for figures in found] == CASES
    for figures in found:
        assert 0 < figures.best_milliseconds <= figures.milliseconds
        assert figures.fraction > 0
        assert figures.tokens_per_second == pytest.approx(1e3 * figures.case.rows * figures.case.length / figures.milliseconds)


def test_pages_behind_windows_are_not_needed() -> None:
    runner = SimpleNamespace(windows=(None, 8), page_size=4, num_pages=1 + 2 * (6 + 3), state_pages=0)
    runner.max_num_seqs = runner.max_num_batched_tokens = runner.max_model_len = 100
    case = Case(rows=2, length=1, context=20)  # a query at position 20 sees positions from 13 on, in page 3
    pages = case_pages(runner, case)
    assert pages.shape == (2, 2, 6)
    assert (pages == 0).tolist() == [[[False] * 6] * 2, [[True] * 3 + [False] * 3] * 2]
    assert sorted(pages[pages > 0].tolist()) == list(range(1, 19))
    assert np.array_equal(pages[1, 0, 3:], [13, 14, 15])
    assert why_not(runner, case) is None
    runner.num_pages -= 1
    assert why_not(runner, case) == "it needs 18 KV pages of 4 tokens, and there are 17"


@pytest.mark.slow
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


RAGGED = Case(rows=3, length=1, context=20, beside=(CaseRows(1, 1, 90), CaseRows(2, 16, 4)))


def test_a_case_is_read_from_a_text() -> None:
    assert Case.parse("2x1@20") == Case(2, 1, 20)
    assert Case.parse("3x1@20+1x1@90+2x16@4") == RAGGED
    assert Case.parse("1x64@0+4x1@20,top_p=0.9") == Case(1, 64, 0, beside=(CaseRows(4, 1, 20),), top_p=0.9)
    assert Case.parse("1x64@0+4x1@20,top_p=0.9").name == "decode 4 x 20 + prefill 1 x 64 @ 0, top_p 0.9"
    assert RAGGED.lengths.tolist() == [1, 1, 1, 1, 16, 16]
    assert RAGGED.contexts.tolist() == [20, 20, 20, 90, 4, 4]
    for text in ("", "2x1", "2x1@20+", "2x1@20,top_k=3", "2x1@20,top_p=0", "2x1@20,top_p=", "0x1@20", "2x1@20,top_p=often"):
        with pytest.raises(ValueError, match=r"is not|are at least|could not convert"):
            Case.parse(text)


def test_rows_of_different_lengths_have_pages_of_their_own(runner: ModelRunner) -> None:
    pages = case_pages(runner, RAGGED)[0]
    counts = -(-(RAGGED.contexts + RAGGED.lengths) // runner.page_size)
    assert [np.flatnonzero(row).tolist() for row in pages] == [list(range(count)) for count in counts]
    assert sorted(pages[pages > 0].tolist()) == list(range(1, counts.sum() + 1))
    plan = step_plan(runner, replace(RAGGED, top_p=0.9), 7, given_tokens=False, new_rows=True)
    assert (plan.num_decodes, len(plan.token_ids)) == (4, 32)
    assert {(row.params.temperature, row.params.top_p) for row in plan.new_rows} == {(1.0, 0.9)}
    assert [row.prompt_len for row in plan.new_rows] == [20, 20, 20, 90, 4, 4]


def test_work_is_that_of_all_rows(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row reads its own KV, and no token counts twice."""
    monkeypatch.setattr(MachineProbe, "measure", lambda probe: Machine(1e9, 1e12))
    bench = StepBench(runner, seconds=0.001)
    ragged, *parts = (bench.measure(case).figures for case in (RAGGED, Case(3, 1, 20), Case(1, 1, 90), Case(2, 16, 4)))
    assert ragged.kv_bytes == sum(part.kv_bytes for part in parts)
    assert ragged.flops == sum(part.flops for part in parts)
    assert ragged.weight_bytes == parts[0].weight_bytes
    assert ragged.tokens_per_second == pytest.approx(36e3 / ragged.milliseconds)


@pytest.mark.slow
def test_the_kernels_of_a_step_are_those_of_its_layers() -> None:
    config = EngineConfig(model="demo", device="cpu", attention_backend="torch_native", kv_cache_memory=8 << 20, max_num_seqs=4)
    found: list[int] = []
    measured = steps.measure_model(
        "demo", config, [], 0.01, profiled=[CASES[0]], on_progress=lambda so_far: found.append(len(so_far.kernels))
    )
    (times,) = measured.kernels
    products = next(kernel for kernel in times.kernels if kernel.name in ("aten::mm", "aten::addmm"))
    num_layers = load_spec(resolve_model("demo")).num_layers
    assert products.calls >= 4 * num_layers
    assert products.microseconds_per_layer == pytest.approx(products.microseconds / num_layers)
    assert times.busy_microseconds == pytest.approx(sum(kernel.microseconds for kernel in times.kernels))
    assert found == [1]
    assert "kernels of decode 2 x 20: " in measured.show()


def test_a_case_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(bench: StepBench, case: Case) -> None:
        raise AssertionError(f"no {case.name}")

    monkeypatch.setattr(StepBench, "measure", measure)
    config = EngineConfig(model="demo", device="cpu", kv_cache_memory=8 << 20, max_num_seqs=4)
    measured = steps.measure_model("demo", config, CASES, seconds=0.01)
    assert [(entry.case, entry.reason) for entry in measured.failed] == [(case.name, f"AssertionError: no {case.name}") for case in CASES]
    assert measured.show().endswith("FAILED: prefill 1 x 16 @ 0: AssertionError: no prefill 1 x 16 @ 0")
