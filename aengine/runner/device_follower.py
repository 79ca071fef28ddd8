"""`DeviceFollower`: a `DeviceExecutor` on a rank that follows another one, which samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from aengine.kernels.upload import to_device
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.messages import Logits
from aengine.runner.base import Step
from aengine.runner.decode_graphs import Forward
from aengine.runner.device_executor import DeviceExecutor
from aengine.runner.device_sampling import Results
from aengine.runner.device_step import Output
from aengine.runner.prompt_logprobs import PromptScores
from aengine.runner.results import ResultBuffer
from aengine.runner.setup import ExecutorSetup
from aengine.sampling.sampler import SampledTokens
from aengine.scheduler.plan import NO_INTS, NewRow, StepResult


class DeviceFollower(DeviceExecutor):
    """Takes part in what all ranks compute together: the steps of the model, and the logits that the first rank samples from. Its last
    tokens are those of the first rank."""

    def __init__(self, setup: ExecutorSetup, ranks: FollowerRanks, check: Callable[[], object]) -> None:
        """As `build_executor`."""
        super().__init__(replace(setup, draft=None), check)
        self._ranks = ranks
        self._nothing = ResultBuffer(0, setup.device)

    def assign_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Nothing here depends on them."""

    def start(self, step: Step, hidden: Tensor | None = None) -> Output:
        with self._stream.enter():
            self._begin(step)
            return self._nothing, *self._run(step, hidden)

    def finish(self, step: Step, buffer: ResultBuffer, sampled: SampledTokens | None, scores: PromptScores | None) -> StepResult:
        return StepResult(step.number, NO_INTS)

    def _results(self, step: Step, forward: Forward) -> Results:
        told = step.scores_prompts or self._setup.shard.num_stages > 1
        while told and isinstance(message := self._ranks.receive(), Logits):
            forward.logits(to_device(message.indices, self._setup.device))
        if len(step.sampled_rows) and forward.greedy_tokens is None:  # else a graph has computed them
            forward.logits(forward.logits_indices)
        return None, None
