"""`HostFollower`: the CPU kernels on a rank that follows another one, which samples.

A step ends when the first rank has told the last tokens of its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aengine.kernels.warm_memory import WarmMemory
from aengine.models.cpu_stack import PreparedStep
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.messages import Logits
from aengine.runner.base import InFlightStep, IntArray, Step
from aengine.runner.host_base import HostExecutorBase
from aengine.runner.setup import ExecutorSetup
from aengine.scheduler.plan import NO_INTS, NewRow, StepResult


class HostFollower(HostExecutorBase):
    """Satisfies `Executor`. Steps bring no tokens."""

    def __init__(self, setup: ExecutorSetup, ranks: FollowerRanks, warm: WarmMemory | None, check: Callable[[], object]) -> None:
        """As `build_executor`."""
        super().__init__(setup, warm, check)
        self._ranks = ranks

    def assign_rows(self, new_rows: Sequence[NewRow]) -> None:
        raise AssertionError("plans of a follower have no new rows")

    def draft(self, step: Step) -> IntArray:
        raise AssertionError("drafts are in the plans of a follower")

    def launch(self, step: Step) -> InFlightStep:
        if self._stages is not None:
            return self._stages.launch(step, functools.partial(self._follow, step))
        return FollowedStep(functools.partial(self._compute, step, self._model.prepare(step)))

    def hold(self, held: bool) -> None:
        """Changes nothing: a follower's step is never withdrawn."""

    def _compute(self, step: Step, call: PreparedStep) -> StepResult:
        call.run()
        assert call.hidden is not None
        if len(step.sampled_rows) and not step.scores_prompts:
            self._model.logits(step, call.hidden)
        return self._follow(step, call.hidden)

    def _follow(self, step: Step, hidden: Tensor) -> StepResult:
        """The end of a step, as the first rank says: of the hidden states as they are in `HostExecutor`."""
        with torch.inference_mode():
            while isinstance(message := self._ranks.receive(), Logits):
                self._model.logits(step, hidden, message.indices)
        self._model.last_tokens[step.rows_that_sample()] = message.tokens
        return StepResult(step.number, NO_INTS)


class FollowedStep:
    """Satisfies `InFlightStep`."""

    overlaps = False

    def __init__(self, make_result: Callable[[], StepResult]) -> None:
        """`make_result` is called once."""
        self._make_result = make_result
        self._result: StepResult | None = None

    def wait(self) -> None:
        self.result()

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._make_result()
        return self._result

    def withdraw(self) -> bool:
        return False
