"""`DeviceStep`: a step of a `DeviceExecutor`, from its launch to its result."""

from __future__ import annotations

from collections.abc import Callable

from aengine.runner.prompt_logprobs import PromptScores
from aengine.runner.results import ResultBuffer
from aengine.sampling.sampler import SampledTokens
from aengine.scheduler.plan import StepResult

Output = tuple[ResultBuffer, SampledTokens | None, PromptScores | None]
"""Tensors are in host memory once the buffer's `wait` has returned."""


class DeviceStep:
    """Satisfies `InFlightStep`."""

    def __init__(self, start: Callable[[], Output], finish: Callable[..., StepResult], *, overlaps: bool) -> None:
        """`start` and `finish`: as of `DeviceExecutor`, of this step."""
        self.overlaps = overlaps
        self._start = start
        self._finish = finish
        self._output: Output | None = None
        self._result: StepResult | None = None

    def start(self) -> Output:
        """Puts the step on the device's stream, unless it is there already."""
        if self._output is None:
            self._output = self._start()
        return self._output

    def wait(self) -> None:
        if self._result is None:
            self.start()[0].wait()

    def result(self) -> StepResult:
        if self._result is None:
            self.wait()
            self._result = self._finish(*self.start())
        return self._result

    def withdraw(self) -> bool:
        return False
