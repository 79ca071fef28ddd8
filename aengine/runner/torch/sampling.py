"""`TorchSampling`: what follows from the logits of a step, in torch: prompts are scored, and tokens are sampled. `ResultBuffer`: the host
memory that this is copied to.

Knows nothing of how logits are computed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.arrays import upload
from aengine.runner.contract import Step
from aengine.runner.results import PromptScorer, PromptScores
from aengine.runner.setup import ExecutorSetup
from aengine.runner.torch.graphs import Forward
from aengine.runner.torch.model import TorchDraftModel
from aengine.sampling.arrays import DeviceArrays
from aengine.sampling.draw import num_accepted
from aengine.sampling.sampler import DeviceLogprobs, SampledTokens, Sampler
from aengine.scheduler.drafters import BY_MODEL
from aengine.scheduler.plan import NO_INTS

Results = tuple[SampledTokens | None, PromptScores | None]


class TorchSampling:
    """Is called on the stream of the steps. What it returns is on the device yet."""

    def __init__(
        self, setup: ExecutorSetup, sampler: Sampler, scorer: PromptScorer, draft: TorchDraftModel | None, last_tokens: Tensor
    ) -> None:
        """`last_tokens`: as of `DecodeGraphs`."""
        self._setup, self._arrays = setup, DeviceArrays(setup.torch_device)
        self._sampler = sampler
        self._scorer = scorer
        self._draft = draft
        self._last_tokens = last_tokens

    def results(self, step: Step, forward: Forward) -> Results:
        """Scores prompts, and samples; sampled tokens become the last tokens of their rows."""
        scores = self._scores(step, forward)
        if len(step.sampled_rows) == 0:
            return None, scores
        greedy = self._sampler.is_greedy(step.sampled_rows, step.next_positions)
        made = forward.greedy if greedy else None
        if made is not None and step.layout.num_decodes == step.layout.num_rows:  # the last tokens already
            return made, scores
        sampled = made or self._sample(step, forward, greedy=greedy)
        tokens, rows = sampled.tokens, forward.rows
        if step.drafts is not None:
            (firsts,) = upload((step.first_samples().astype(np.int32),), self._setup.torch_device)
            if sampled.accepted is None:
                sampled = replace(sampled, accepted=num_accepted(tokens, self._drafts(step), firsts))
            assert sampled.accepted is not None
            last = firsts + (sampled.accepted - 1).clamp(min=0)
            tokens, rows = tokens.index_select(0, last), rows.index_select(0, last)
        self._last_tokens.index_copy_(0, rows.long(), tokens.to(torch.int32))
        return sampled, scores

    def _scores(self, step: Step, forward: Forward) -> PromptScores | None:
        ranks, hidden = self._setup.followers, forward.hidden if step.scores_prompts else None
        if ranks is None or not (step.scores_prompts or self._setup.shard.num_stages > 1):
            return self._scorer.score(step.rows, step.layout, forward.logits, hidden)

        def logits(indices: Tensor) -> Tensor:
            ranks.send_logits(indices.cpu().numpy())
            return forward.logits(indices)

        scores = self._scorer.score(step.rows, step.layout, logits, hidden)
        ranks.send_last_tokens(NO_INTS)  # there are no more to be scored; of several stages, the others of the first one end the step
        return scores

    def _sample(self, step: Step, forward: Forward, *, greedy: bool) -> SampledTokens:
        """Without `accepted`, which follow from the tokens, where no logits are processed. Where they are, the host must know the drafts,
        and waits for those of a draft model."""
        logits = forward.logits(forward.logits_indices)
        if greedy:
            return SampledTokens(*self._arrays.likeliest(logits))
        drafts = None
        if self._sampler.processes(step.sampled_rows, step.next_positions):
            drafts, logits = step.drafts, logits.to(torch.float32, copy=True)  # which change in place
        if drafts is not None and self._draft is not None:
            drafts = self._drafts(step).cpu().numpy()
        return self._sampler.sample(logits, step.sampled_rows, step.next_positions, forward.rows, forward.next_positions, drafts)

    def _drafts(self, step: Step) -> Tensor:
        """[m] int32, those of a step with drafts, -1 where there is none."""
        assert step.drafts is not None
        (drafts,) = upload((step.drafts,), self._setup.torch_device)
        if self._draft is None:
            return drafts
        rows = step.sampled_rows
        at = np.flatnonzero((step.drafts[:-1] == BY_MODEL) & (rows[:-1] == rows[1:]))  # a row's last token has no draft
        return self._draft.fill(drafts, at, rows[at], step.next_positions[at])


class ResultBuffer:
    """Pinned host memory for the results of one step at a time, and the event after which they are there."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._device = device
        self._tokens = torch.zeros(max_tokens, dtype=torch.int64, pin_memory=not self._on_cpu)
        self._chosen: dict[torch.dtype, Tensor] = {}  # [max_tokens]
        # A blocking event sleeps and does not spin while it waits: the event loop needs the core, other threads the CUDA driver's lock.
        self._copied = None if self._on_cpu else torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def copy(self, sampled: SampledTokens | None, scores: PromptScores | None) -> tuple[SampledTokens | None, PromptScores | None]:
        """Starts the copies of both from the device, on the current stream; returns them with tensors in host memory."""
        if sampled is not None:
            tokens = self._tokens[: len(sampled.tokens)]
            tokens.copy_(sampled.tokens, non_blocking=True)
            chosen = self._room_for_chosen(sampled.chosen.dtype)[: len(tokens)]
            chosen.copy_(sampled.chosen, non_blocking=True)
            logprobs = None if sampled.logprobs is None else DeviceLogprobs(*map(self._copy, sampled.logprobs))
            accepted = None if sampled.accepted is None else self._copy(sampled.accepted)
            sampled = replace(sampled, tokens=tokens, chosen=chosen, logprobs=logprobs, accepted=accepted)
        if scores is not None:
            scores = scores.copied(self._copy)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return sampled, scores

    def wait(self) -> None:
        """Waits until the copies are done. Other threads may run meanwhile."""
        if self._copied is not None:
            self._copied.synchronize()

    def _room_for_chosen(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._chosen:
            self._chosen[dtype] = torch.zeros(len(self._tokens), dtype=dtype, pin_memory=not self._on_cpu)
        return self._chosen[dtype]

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._on_cpu:
            return tensor
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        memory.copy_(tensor, non_blocking=True)
        return memory
