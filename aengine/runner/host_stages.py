"""`HostStages`: the CPU kernels on a rank of one of several stages.

Each stage computes its layers of a step and sends the hidden states on. The first one, which has the output head, gets those at the logits
indices back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.parallel.ring import Ring
from aengine.runner.base import IntArray, Step
from aengine.runner.host_model import HostModel
from aengine.runner.setup import ExecutorSetup
from aengine.scheduler.plan import StepResult


class HostStages:
    def __init__(self, model: HostModel, ring: Ring, stage: int) -> None:
        self._model = model
        self._ring = ring
        self.stage = stage

    @classmethod
    def of(cls, setup: ExecutorSetup, model: HostModel) -> HostStages | None:
        """None: the model has one stage."""
        if setup.shard.num_stages == 1:
            return None
        assert setup.ranks is not None
        return cls(model, setup.ranks.connect_stages(), setup.shard.stage)

    def compute(self, step: Step) -> None:
        """This stage of a step. Returns when its hidden states are on their way."""
        inputs = self._receive(step, step.layout.num_tokens) if self.stage else None
        call = self._model.prepare(step, inputs=inputs)
        call.run()
        assert call.hidden is not None
        self._ring.send(step.number, _words(call.hidden))

    def finished(self, step: Step) -> Tensor:
        """On the first stage: the normed hidden states [m, hidden_size] of a step that the last one sends: at the logits indices, or of
        all tokens if prompts are scored. Waits for them."""
        return self._receive(step, step.layout.num_tokens if step.scores_prompts else len(step.logits_indices))

    def close(self) -> None:
        self._ring.close()

    def _receive(self, step: Step, num_rows: int) -> Tensor:
        width, words = self._model.hidden_size, torch.from_numpy(self._ring.receive(step.number))
        return words.view(self._model.dtype)[: num_rows * width].view(num_rows, width)


class StagedStep:
    """Satisfies `InFlightStep`, on the first stage: a step that later stages compute."""

    overlaps = False  # the next step has other rows

    def __init__(self, stages: HostStages, step: Step, make_result: Callable[[Tensor], StepResult]) -> None:
        """Computes this stage of it."""
        self._stages = stages
        self._step = step
        self._make_result = make_result
        self._hidden: Tensor | None = None
        self._result: StepResult | None = None
        stages.compute(step)

    def wait(self) -> None:
        if self._hidden is None:
            self._hidden = self._stages.finished(self._step)

    def result(self) -> StepResult:
        self.wait()
        if self._result is None:
            assert self._hidden is not None
            self._result = self._make_result(self._hidden)
        return self._result

    def withdraw(self) -> bool:
        return False


def _words(states: Tensor) -> IntArray:
    """Their bytes, which are padded to a whole number of words."""
    flat = states.contiguous().view(-1)
    if flat.nbytes % 4:
        flat = F.pad(flat, (0, 1))
    words: IntArray = flat.view(torch.int32).numpy()
    return words
