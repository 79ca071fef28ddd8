"""In which order the step thread does things."""

from __future__ import annotations

from typing import Any

import pytest
from oracle_engine import OracleEngine

from aengine import SamplingParams
from aengine.scheduler import Updates

pytestmark = pytest.mark.anyio


def _noted(engine: OracleEngine) -> list[tuple[str, int]]:
    """What happens from now on: a step is launched, it is computed, what it changed is told. The second is the number of the step."""
    events: list[tuple[str, int]] = []
    steps: Any = engine._steps
    hand_on = steps._hand_on

    def tell(report: Any) -> None:
        if isinstance(report, Updates) and report.keys:
            events.append(("tell", sum(kind == "tell" for kind, _ in events)))
        hand_on(report)

    steps._hand_on = tell
    engine.runner.before_launch = lambda plan: events.append(("launch", plan.step))
    engine.runner.before_step = lambda plan: events.append(("compute", plan.step))
    return events


async def test_a_step_is_told_while_the_next_one_is_computed() -> None:
    """The event loop takes the interpreter from the step thread: it should do so when that one needs none."""
    async with OracleEngine() as engine:
        events = _noted(engine)
        await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=4, ignore_eos=True))
    assert events[:2] == [("launch", 0), ("compute", 0)]
    for step in range(1, 4):
        assert events[3 * step - 1 : 3 * step + 2] == [("launch", step), ("tell", step - 1), ("compute", step)]
    assert events[11:] == [("tell", 3)]


async def test_one_step_ahead_a_step_is_told_at_once() -> None:
    """The device computes the next one meanwhile."""
    async with OracleEngine(asynchronous=True) as engine:
        events = _noted(engine)
        await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=4, ignore_eos=True))
    launches = [event for event in events if event[0] != "compute"]
    assert launches[:5] == [("launch", 0), ("launch", 1), ("tell", 0), ("launch", 2), ("tell", 1)]


async def test_nothing_is_withheld_when_nothing_follows() -> None:
    async with OracleEngine() as engine:
        events = _noted(engine)
        await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=1))
    assert events == [("launch", 0), ("compute", 0), ("tell", 0)]
