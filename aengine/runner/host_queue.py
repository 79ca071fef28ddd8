"""`HostQueue`: steps of a CPU, which has no queue of its own. They are computed in order, when a result is asked for at the latest.

Owns the order, and that a step which can run on the kernels' own threads begins as soon as the step before it finishes, unless it is held.
Knows nothing of what a step computes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable

from aengine.models.cpu_stack import PreparedStep
from aengine.scheduler.plan import StepResult


class HostStep:
    """Satisfies `InFlightStep`."""

    def __init__(
        self, queue: HostQueue, call: PreparedStep, make_result: Callable[[], StepResult], *, begins: bool, overlaps: bool
    ) -> None:
        self.overlaps = overlaps
        self._queue = queue
        self._call = call
        self._make_result = make_result
        self._begins = begins
        self._was_first = False  # and may have begun
        self._result: StepResult | None = None

    @property
    def has_begun(self) -> bool:
        return self._was_first or self._call.has_begun

    def begin(self) -> None:
        """To be called when the results of all steps before are known."""
        if self._begins and not self.has_begun:
            self._call.begin()
        self._was_first = True

    def compute(self, following: HostStep | None, hold: ctypes.c_int32) -> None:
        self.begin()
        self._call.run(following._call if following is not None and following._begins else None, hold)
        self._result = self._make_result()

    def wait(self) -> None:
        if self._result is None:
            self._queue.compute(self)

    def result(self) -> StepResult:
        self.wait()
        self._queue.begin_first()
        assert self._result is not None, "computed"
        return self._result

    def withdraw(self) -> bool:
        return self._queue.withdraw(self)


class HostQueue:
    def __init__(self) -> None:
        self.hold = ctypes.c_int32()
        """Not 0: no step begins by itself. The kernels read it without the GIL, any thread may write it."""
        self._steps: deque[HostStep] = deque()  # that are not computed

    def add(self, call: PreparedStep, make_result: Callable[[], StepResult], *, begins: bool, overlaps: bool) -> HostStep:
        """`make_result` is called after `call`. `begins`: the call can run on the kernels' own threads, ahead of whoever asks for its
        result. `overlaps`: the next step may be planned meanwhile."""
        step = HostStep(self, call, make_result, begins=begins, overlaps=overlaps)
        self._steps.append(step)
        if len(self._steps) == 1:
            step.begin()
        return step

    def begin_first(self) -> None:
        if self._steps:
            self._steps[0].begin()

    def compute(self, last: HostStep | None = None) -> None:
        """Computes all steps up to `last`, or all."""
        while self._steps:
            step = self._steps.popleft()
            step.compute(self._steps[0] if self._steps else None, self.hold)
            if step is last:
                return

    def withdraw(self, step: HostStep) -> bool:
        """As `InFlightStep.withdraw`, of the latest step."""
        if step.has_begun:
            return False
        assert self._steps.pop() is step, "the latest"
        return True

    def close(self) -> None:
        """Finishes the step that has begun, since its threads use the model, and forgets the others."""
        if self._steps and self._steps[0].has_begun:
            with contextlib.suppress(Exception):
                self._steps.popleft().compute(None, self.hold)
        self._steps.clear()
