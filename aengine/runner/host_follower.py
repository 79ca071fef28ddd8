"""`HostFollower`: the CPU kernels on a rank that follows another one, which samples.

A step ends when the first rank has told the last tokens of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from aengine.kernels.warm_memory import WarmMemory
from aengine.models.cpu_stack import PreparedStep
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.messages import Logits
from aengine.runner.base import IntArray, Step
from aengine.runner.host_model import HostModel
from aengine.runner.setup import ExecutorSetup
from aengine.scheduler.plan import NO_INTS, NewRow, StepResult


class HostFollower:
    """Satisfies `Executor`. Steps bring no tokens."""

    name = "cpu"

    def __init__(self, setup: ExecutorSetup, ranks: FollowerRanks, warm: WarmMemory | None, check: Callable[[], object]) -> None:
        """As `build_executor`."""
        self._model = HostModel(setup, warm, check)
        self._ranks = ranks

    def bytes_per_page(self) -> int:
        return self._model.bytes_per_page()

    def kv_budget(self) -> int:
        return self._model.kv_budget()

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        self._model.allocate(num_pages)

    def assign_rows(self, new_rows: Sequence[NewRow]) -> None:
        raise AssertionError("plans of a follower have no new rows")

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        self._model.copy_pages(sources, destinations)

    def draft(self, step: Step) -> IntArray:
        raise AssertionError("drafts are in the plans of a follower")

    def launch(self, step: Step) -> FollowedStep:
        return FollowedStep(self._model, self._ranks, step, self._model.prepare(step))

    def hold(self, held: bool) -> None:
        """Changes nothing: a follower's step is never withdrawn."""

    def close(self) -> None:
        del self._model


class FollowedStep:
    """Satisfies `InFlightStep`."""

    overlaps = False

    def __init__(self, model: HostModel, ranks: FollowerRanks, step: Step, call: PreparedStep) -> None:
        self._model = model
        self._ranks = ranks
        self._step = step
        self._call = call

    def wait(self) -> None:
        self.result()

    def result(self) -> StepResult:
        step, model = self._step, self._model
        self._call.run()
        hidden = self._call.hidden
        assert hidden is not None
        with torch.inference_mode():
            if len(step.sampled_rows) and not step.scores_prompts:
                model.logits(hidden)
            while isinstance(message := self._ranks.receive(), Logits):
                model.logits(hidden.index_select(0, torch.from_numpy(message.indices)))
        model.last_tokens[step.rows_that_sample()] = message.tokens
        return StepResult(step.number, NO_INTS)

    def withdraw(self) -> bool:
        return False
