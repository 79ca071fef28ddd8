"""`HostQueue`: steps of a CPU, which has no queue of its own. They are computed in order, each no later than its result is asked for.

Owns the order, and that a step which can run on the kernels' own threads begins as soon as the step before it finishes, unless it is held.
Knows nothing of what a step computes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable

from aengine.models.cpu.stack import PreparedStep
from aengine.scheduler.plan import StepResult


class HostStep:
    """The `InFlightStep` of a `HostQueue`, which computes it when its turn has come."""

    def __init__(
        self, queue: HostQueue, prepared: PreparedStep, make_result: Callable[[], StepResult], *, can_run_ahead: bool, overlaps: bool
    ) -> None:
        self.overlaps = overlaps
        self._queue = queue
        self._prepared = prepared
        self._make_result = make_result
        self._can_run_ahead = can_run_ahead
        self._reached_front = False
        self._result: StepResult | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it may have begun, and so cannot be withdrawn."""
        return self._reached_front or self._prepared.has_begun

    def begin(self) -> None:
        """To be called when the results of all steps before are known. Starts it if it can run ahead."""
        if self._can_run_ahead and not self.has_begun:
            self._prepared.begin()
        self._reached_front = True

    def compute(self, following: HostStep | None, hold: ctypes.c_int32) -> None:
        self.begin()
        self._prepared.run(following._prepared if following is not None and following._can_run_ahead else None, hold)
        self._result = self._make_result()

    def wait(self) -> None:
        if self._result is None:
            self._queue.compute_through(self)

    def result(self) -> StepResult:
        self.wait()
        self._queue.begin_first()  # not in `wait`: between the two a step that was held can still be withdrawn
        assert self._result is not None, "computed"
        return self._result

    def withdraw(self) -> bool:
        return self._queue.withdraw(self)


class HostQueue:
    def __init__(self) -> None:
        self.hold = ctypes.c_int32()
        """Not 0: a step that finishes does not begin the one after it. The kernels read it without the GIL, any thread may write it."""
        self._steps: deque[HostStep] = deque()  # that are not computed

    def add(self, prepared: PreparedStep, make_result: Callable[[], StepResult], *, can_run_ahead: bool, overlaps: bool) -> HostStep:
        """`make_result` is called when `prepared` has run. `can_run_ahead`: on the kernels' own threads, before its result is asked for.
        `overlaps`: the next step may be planned meanwhile."""
        step = HostStep(self, prepared, make_result, can_run_ahead=can_run_ahead, overlaps=overlaps)
        self._steps.append(step)
        if len(self._steps) == 1:
            step.begin()
        return step

    def begin_first(self) -> None:
        if self._steps:
            self._steps[0].begin()

    def compute_through(self, last: HostStep | None = None) -> None:
        """Computes all steps up to `last`, or all."""
        while self._steps:
            step = self._steps.popleft()
            step.compute(self._steps[0] if self._steps else None, self.hold)
            if step is last:
                return

    def withdraw(self, step: HostStep) -> bool:
        """Takes back `step`, the latest one, as if it had not been added. False: it has begun, and cannot be taken back."""
        if step.has_begun:
            return False
        assert self._steps[-1] is step, "the latest"
        self._steps.pop()
        return True

    def close(self) -> None:
        """Finishes the step that has begun, since its threads use the model, and forgets the others."""
        if self._steps and self._steps[0].has_begun:
            with contextlib.suppress(Exception):
                self._steps.popleft().compute(None, self.hold)
        self._steps.clear()
