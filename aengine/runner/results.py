"""How the tensors of a step become a `StepResult`, and the host memory that they are copied to. Knows nothing of models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from aengine.runner.contract import Step
from aengine.runner.prompt_scores import PromptScores
from aengine.sampling.sampler import DeviceLogprobs, SampledTokens, Sampler
from aengine.scheduler.plan import StepResult, TokenLogprobs


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


def step_result(step: Step, sampled: SampledTokens | None, scores: PromptScores | None, sampler: Sampler) -> StepResult:
    """The result, from tensors in host memory. Has the sampler observe the tokens, which some rows need on the host for their next one."""
    prompt_logprobs = () if scores is None else scores.logprobs_on_host()
    pooled = () if scores is None or scores.pooled is None else scores.pooled.on_host()
    if sampled is None:
        return StepResult(step.number, np.zeros(0, dtype=np.int32), prompt_logprobs=prompt_logprobs, pooled=pooled)
    tokens, accepted = sampled.tokens.numpy().astype(np.int32), None if sampled.accepted is None else sampled.accepted.numpy()
    failures = sampler.observe(sampled)
    if sampled.step is None:
        failures = sampler.refusals(step.sampled_rows, step.next_positions, sampled.impossible.numpy(), accepted)
    return StepResult(
        step=step.number,
        tokens=tokens,
        logprobs=_logprobs_by_row(sampled),
        prompt_logprobs=prompt_logprobs,
        pooled=pooled,
        failures={**sampler.observe_later(step.sampled_rows, tokens, accepted), **failures},
        accepted=accepted,
        forced=sampler.forced(step.sampled_rows) if step.wants_forced else {},
    )


def _logprobs_by_row(sampled: SampledTokens) -> TokenLogprobs | None:
    """By sampled row; rows without logprobs get some of another row, which nobody reads."""
    if sampled.logprobs is None or sampled.logprob_rows is None:
        return None
    if len(sampled.logprob_rows) == len(sampled.tokens):
        return sampled.logprobs.on_host()
    indices = np.zeros(len(sampled.tokens), dtype=np.int64)
    indices[sampled.logprob_rows] = np.arange(len(sampled.logprob_rows))
    return sampled.logprobs.on_host().select(indices)
