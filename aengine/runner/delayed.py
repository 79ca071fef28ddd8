"""`DelayedSteps`: steps of a device that has no queue of its own. They are computed in order, when a result is asked for at the latest.

Owns the order, and that a step which can go on by itself begins as soon as the one before is over. Knows nothing of what a step is.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from aengine.runner.base import Hold
from aengine.runner.executor import StepRun
from aengine.runner.in_flight import LaunchedStep
from aengine.scheduler.plan import StepResult


class DelayedStep:
    """Satisfies `InFlightStep`."""

    def __init__(self, steps: DelayedSteps, run: StepRun, compute: Callable[[], LaunchedStep], *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self._begun = False
        self._steps = steps
        self._run = run
        self._compute = compute
        self._launched: LaunchedStep | None = None

    @property
    def has_begun(self) -> bool:
        return self._begun or self._run.has_begun

    def begin(self) -> None:
        if not self.has_begun:
            self._run.begin()
        self._begun = True

    def follow(self, hold: Hold) -> None:
        """Begins when the one before is over, unless `hold` is set then."""
        self._run.follow(hold)

    def compute(self) -> None:
        self.begin()
        self._launched = self._compute()

    def wait(self, hold: Hold | None = None) -> None:
        if self._launched is None:
            self._steps.compute(self, hold)

    def result(self) -> StepResult:
        self.wait()
        self._steps.begin()
        assert self._launched is not None, "computed"
        return self._launched.result()

    def withdraw(self) -> bool:
        return self._steps.drop(self)


class DelayedSteps:
    def __init__(self) -> None:
        self._steps: deque[DelayedStep] = deque()  # not computed

    def add(self, run: StepRun, compute: Callable[[], LaunchedStep], *, overlaps: bool) -> DelayedStep:
        """`compute` sees `run` through. `overlaps`: the next step may be planned meanwhile."""
        step = DelayedStep(self, run, compute, overlaps=overlaps)
        self._steps.append(step)
        if len(self._steps) == 1:
            step.begin()
        return step

    def begin(self) -> None:
        """The next one may, now that all before it are known."""
        if self._steps:
            self._steps[0].begin()

    def compute(self, last: DelayedStep | None = None, hold: Hold | None = None) -> None:
        """All steps up to `last`, or all. With `hold`, one that can go on by itself begins as soon as the one before is over."""
        while self._steps:
            step = self._steps.popleft()
            if hold is not None and self._steps:
                self._steps[0].follow(hold)
            step.compute()
            if step is last:
                return

    def drop(self, step: DelayedStep) -> bool:
        """Forgets the latest step, if it has not begun."""
        if step.has_begun:
            return False
        assert self._steps.pop() is step, "the latest"
        return True

    def abandon(self) -> None:
        """Sees through what has begun, so that nothing is used any more. Nobody will ask for the results."""
        if self._steps and self._steps[0].has_begun:
            with contextlib.suppress(Exception):
                self._steps[0].compute()
        self._steps.clear()
