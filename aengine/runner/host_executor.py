"""`HostExecutor`: the CPU stack, which runs all layers of a step in one call of our own kernels.

The time that `launch` takes is a visible part of a small model's step, so it does as few operations as it can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.cpu import ops
from aengine.kernels.warm_memory import WarmMemory
from aengine.models.cpu_stack import PreparedStep
from aengine.runner.base import InFlightStep, IntArray, Step
from aengine.runner.host_base import HostExecutorBase
from aengine.runner.host_queue import HostQueue
from aengine.runner.prompt_logprobs import PromptScorer
from aengine.runner.results import step_result
from aengine.runner.setup import ExecutorSetup
from aengine.sampling.acceptance import num_accepted_on_host
from aengine.sampling.sampler import SampledTokens, Sampler
from aengine.scheduler.plan import NewRow, StepResult


class HostExecutor(HostExecutorBase):
    """Satisfies `Executor`."""

    def __init__(self, setup: ExecutorSetup, warm: WarmMemory | None, check: Callable[[], object]) -> None:
        """As `build_executor`. Raises KernelsUnavailableError before it reads any weights."""
        super().__init__(setup, warm, check)
        model = self._model
        with torch.inference_mode():
            self._sampler = Sampler(
                setup.max_num_seqs,
                setup.native_spec.vocab_size,
                setup.device,
                draw=lambda logits, params, _: ops.draw(model.workspace, logits, params),
            )
        self._ranks = setup.followers
        spec = setup.native_spec
        self._scorer = PromptScorer(spec.vocab_size, setup.device, spec.logit_scale)  # which the kernels' last norm has as a factor
        self._queue = HostQueue()

    def assign_rows(self, new_rows: Sequence[NewRow]) -> None:
        self._queue.compute_through()  # they need the rows as they are
        with torch.inference_mode():
            self._sampler.update(new_rows)
            self._scorer.update(new_rows)

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        self._queue.compute_through()
        super().copy_pages(sources, destinations)

    def draft(self, step: Step) -> IntArray:
        assert self._model.draft is not None
        self._queue.compute_through()
        return self._model.draft.run(step, self._sampler.draft_params(step.sampled_rows, step.next_positions))

    def launch(self, step: Step) -> InFlightStep:
        if self._stages is not None:
            return self._stages.launch(step, functools.partial(self._torch_result, step))
        rows = step.sampled_rows
        needs_logits = step.scores_prompts or self._ranks is not None  # of several ranks each has a part of the vocabulary
        greedy = not needs_logits and self._sampler.is_greedy(rows, step.next_positions)
        draw_params = None if needs_logits or greedy else self._sampler.draw_params(rows, step.next_positions)
        kernels_sample = greedy or draw_params is not None
        call = self._model.prepare(step, greedy=greedy, draw_params=draw_params)
        # Sampling in torch follows otherwise, whose threads then spin on the cores that the next step needs.
        can_run_ahead = kernels_sample and self._model.workspace.threads > 1
        if call.hidden is None:
            make_result = functools.partial(self._kernel_result, step, call)
        else:
            make_result = functools.partial(self._torch_result, step, call.hidden)
        overlaps = can_run_ahead and step.layout.num_decodes == step.layout.num_rows
        return self._queue.add(call, make_result, can_run_ahead=can_run_ahead, overlaps=overlaps)

    def hold(self, held: bool) -> None:
        self._queue.hold.value = held

    def close(self) -> None:
        self._queue.close()
        super().close()
        del self._sampler, self._scorer

    def _kernel_result(self, step: Step, call: PreparedStep) -> StepResult:
        """The result of a step that the kernels sampled. The next step waits for this, so it uses nothing of torch."""
        assert call.sampled is not None
        tokens = call.sampled.astype(np.int32)
        accepted = None if step.drafts is None else num_accepted_on_host(tokens, step.drafts, step.first_samples())
        if accepted is not None:
            self._keep_last_tokens(step, tokens, accepted)
        self._sampler.observe_later(step.sampled_rows, tokens, accepted)
        forced = self._sampler.forced(step.sampled_rows) if step.wants_forced else {}
        return StepResult(step.number, tokens, accepted=accepted, forced=forced)

    def _keep_last_tokens(self, step: Step, tokens: NDArray[np.int32 | np.int64], accepted: IntArray | None) -> None:
        """Of [m] sampled tokens."""
        if accepted is None:
            self._model.last_tokens[step.sampled_rows] = tokens
        else:
            firsts = step.first_samples()
            self._model.last_tokens[step.sampled_rows[firsts]] = tokens[firsts + np.maximum(accepted - 1, 0)]

    def _torch_result(self, step: Step, hidden: Tensor) -> StepResult:
        """Scores prompts and samples, from the hidden states of a step that the kernels did not sample: at its logits indices, or of all
        tokens if prompts are scored."""

        def logits(indices: Tensor) -> Tensor:
            if self._ranks is not None and (step.scores_prompts or self._stages is not None):
                self._ranks.send_logits(indices.numpy() if step.scores_prompts else np.arange(len(hidden), dtype=np.int32))
            return self._model.logits(step, hidden, indices.numpy() if step.scores_prompts else None)

        with torch.inference_mode():
            scores = self._scorer.score(step.rows, step.layout, logits, hidden if step.scores_prompts else None)
            sampled: SampledTokens | None = None
            if len(step.sampled_rows):
                rows, positions = torch.from_numpy(step.sampled_rows), torch.from_numpy(step.next_positions)
                sampled_logits = logits(torch.from_numpy(step.logits_indices))
                sampled = self._sampler.sample(sampled_logits, step.sampled_rows, step.next_positions, rows, positions, step.drafts)
                self._keep_last_tokens(step, sampled.tokens.numpy(), None if sampled.accepted is None else sampled.accepted.numpy())
            if self._ranks is not None:
                self._ranks.send_last_tokens(self._model.last_tokens[step.rows_that_sample()])
            return step_result(step, sampled, scores, self._sampler)
