"""In which order the step thread does things."""

from __future__ import annotations

import weakref
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from oracle_engine import Ahead, HookedFlight, OracleEngine, StepGate
from speculating import also_with_drafts

from aengine import SamplingParams
from aengine.api.outputs import EngineStats
from aengine.engine import edges
from aengine.runner.cpu.executor import HostQueue
from aengine.scheduler.plan import StepPlan
from aengine.scheduler.sequence import Updates

pytestmark = pytest.mark.anyio


def _noted(engine: OracleEngine) -> list[tuple[str, int]]:
    """What happens from now on: a step is launched, it is computed, what it changed is reported. The second is the number of the step."""
    events: list[tuple[str, int]] = []
    steps: Any = engine._core.steps
    hand_on = steps._report

    def note(report: Any) -> None:
        if isinstance(report, Updates) and report.keys:
            events.append(("report", sum(kind == "report" for kind, _ in events)))
        hand_on(report)

    steps._report = note
    engine.runner.before_launch = lambda plan: events.append(("launch", plan.step))
    engine.runner.before_step = lambda plan: events.append(("compute", plan.step))
    return events


@also_with_drafts
async def test_a_step_is_reported_while_the_next_one_is_computed() -> None:
    """The event loop takes the GIL from the step thread: it should do so while that one does not need it."""
    async with OracleEngine() as engine:
        events = _noted(engine)
        await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=20, ignore_eos=True))
        steps = engine.stats().steps
    assert events[:2] == [("launch", 0), ("compute", 0)]
    for step in range(1, steps):
        assert events[3 * step - 1 : 3 * step + 2] == [("launch", step), ("report", step - 1), ("compute", step)]
    assert events[3 * steps - 1 :] == [("report", steps - 1)]


async def test_one_step_ahead_a_step_is_reported_at_once() -> None:
    """The device computes the next one meanwhile."""
    async with OracleEngine(ahead=Ahead.DEVICE) as engine:
        events = _noted(engine)
        await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=4, ignore_eos=True))
    launches = [event for event in events if event[0] != "compute"]
    assert launches[:5] == [("launch", 0), ("launch", 1), ("report", 0), ("launch", 2), ("report", 1)]


async def test_as_many_steps_are_in_flight_as_there_are_stages() -> None:
    """And one that has returned is reported at once."""
    async with OracleEngine(ahead=Ahead.STAGES) as engine:
        gate = StepGate(engine)
        streams = [engine.stream([seed], SamplingParams(seed=seed, max_tokens=8, ignore_eos=True)) for seed in range(6)]
        await anyio.to_thread.run_sync(gate.held.wait)
        events = _noted(engine)
        gate.open()
        for seed, stream in enumerate(streams):
            assert [token.token_id async for token in stream] == engine.solo(seed)[0]
    first = events.index(("launch", 6))
    assert events[first : first + 6] == [("launch", 6), ("compute", 4), ("report", 4), ("launch", 7), ("compute", 5), ("report", 5)]


async def test_on_a_host_decodes_are_reported_at_once() -> None:
    """The kernels go on with the next step meanwhile. Of a prompt they do not, so that who comes is in the next step."""
    async with OracleEngine(ahead=Ahead.HOST) as engine:
        events = _noted(engine)
        await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=5, ignore_eos=True))
    assert events[:4] == [("launch", 0), ("compute", 0), ("launch", 1), ("report", 0)]
    assert events[4:10] == [("launch", 2), ("compute", 1), ("report", 1), ("launch", 3), ("compute", 2), ("report", 2)]


async def test_on_a_host_decodes_follow_one_another_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the step thread, which needs the GIL for it, asks for a result."""
    begun: list[bool] = []
    begin_first = HostQueue.begin_first

    def noted(queue: HostQueue) -> None:
        begun.extend(step.has_begun for step in queue._steps)
        begin_first(queue)

    monkeypatch.setattr(HostQueue, "begin_first", noted)
    async with OracleEngine(ahead=Ahead.HOST) as engine:
        await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=6, ignore_eos=True))
    assert begun == [True] * 4


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_step_that_has_not_begun_gives_way(leaves: bool) -> None:
    """To who has come or gone while the one before it was computed."""
    async with OracleEngine(ahead=Ahead.HOST) as engine, anyio.create_task_group() as tasks:
        plans: list[StepPlan] = []
        start = StepGate(engine)
        engine.runner.before_launch = plans.append
        first, second = (engine.stream([1, 2], SamplingParams(seed=seed, max_tokens=12, ignore_eos=True)) for seed in (1, 2))
        await anyio.to_thread.run_sync(start.held.wait)
        gate = StepGate(engine, at=4)  # both decode by then
        start.open()
        await anyio.to_thread.run_sync(gate.held.wait)
        if leaves:
            tasks.start_soon(second.aclose)
        else:
            third = engine.stream([1, 2], SamplingParams(seed=3, max_tokens=12, ignore_eos=True))
        while engine._core.steps._mailbox.is_empty:
            await anyio.lowlevel.checkpoint()
        gate.open()
        assert [token.token_id async for token in first] == engine.solo(1)[0]
        if not leaves:
            assert [token.token_id async for token in second] == engine.solo(2)[0]
            assert [token.token_id async for token in third] == engine.solo(3)[0]
    withdrawn, instead = (plan for plan in plans if plan.step == 5)
    assert len(withdrawn.rows) == 2
    assert (len(instead.rows), len(instead.new_rows)) == ((1, 0) if leaves else (3, 1))


@also_with_drafts
async def test_nothing_is_withheld_when_nothing_follows() -> None:
    async with OracleEngine() as engine:
        events = _noted(engine)
        await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=1))
    assert events == [("launch", 0), ("compute", 0), ("report", 0)]


@also_with_drafts
@pytest.mark.parametrize("ahead", list(Ahead))
async def test_a_flight_is_gone_before_its_step_is_reported(ahead: Ahead) -> None:
    """Tensors release the GIL when they are freed, which is not to be while the loop waits for it."""
    async with OracleEngine(ahead=ahead) as engine:
        flights: list[weakref.ref[HookedFlight]] = []
        alive: list[bool] = []
        steps: Any = engine._core.steps
        hand_on, launch = steps._report, engine.runner.launch

        def noted_launch(plan: StepPlan) -> HookedFlight:
            flight = launch(plan)
            flights.append(weakref.ref(flight))
            return flight

        def note(report: Any) -> None:
            if isinstance(report, Updates) and report.keys:
                alive.append(flights[len(alive)]() is not None)
            hand_on(report)

        steps._report = note
        engine.runner.launch = noted_launch  # type: ignore[method-assign]
        await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=15, ignore_eos=True))
    assert alive == [False] * len(flights)


async def test_stats_know_of_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of tokens now and then."""
    params = SamplingParams(seed=1, max_tokens=100, ignore_eos=True)
    known: list[EngineStats] = []
    monkeypatch.setattr(edges, "PUBLISH_SECONDS", 1e9)
    async with OracleEngine() as engine:
        engine.runner.before_launch = lambda plan: known.append(engine._core.steps.stats.published[0])
        await engine.generate([1, 2], params)
        assert [(stats.running, stats.completion_tokens) for stats in known] == [(0, 0)] + [(1, 1)] * 99
        stats = engine.stats()
        assert (stats.running, stats.completion_tokens) == (0, 100)
    known.clear()
    monkeypatch.setattr(edges, "PUBLISH_SECONDS", 0.0)
    async with OracleEngine() as engine:
        engine.runner.before_launch = lambda plan: known.append(engine._core.steps.stats.published[0])
        await engine.generate([1, 2], params)
    assert [stats.completion_tokens for stats in known] == list(range(100))


def test_the_age_of_stats_is_what_is_documented() -> None:
    assert f"at most {edges.PUBLISH_SECONDS * 1000:g} ms before" in (EngineStats.__doc__ or "")
