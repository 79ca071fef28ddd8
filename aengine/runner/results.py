"""How the tensors of a step become a `StepResult`, and the host memory that they are copied to. Knows nothing of models or plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.runner.base import Step
from aengine.runner.prompt_logprobs import PromptScores
from aengine.sampling import DeviceLogprobs, SampledTokens, Sampler
from aengine.scheduler.plan import StepResult, TokenLogprobs

_T = TypeVar("_T", bound=np.generic)


class ResultBuffer:
    """Host memory for the sampled tokens of one step at a time, and the event after which it and all other copies of the step are there."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._device = device
        self._memory = torch.zeros(max_rows, dtype=torch.int64, pin_memory=not on_cpu)
        # A blocking event sleeps while it waits and does not spin: the event loop needs the core, and the driver its lock.
        self._copied = None if on_cpu else torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def copy(self, tokens: Tensor) -> Tensor:
        """Starts the copy of [m] int64 tokens from the device, on the current stream; returns the host memory that it fills."""
        memory = self._memory[: len(tokens)]
        memory.copy_(tokens, non_blocking=True)
        return memory

    def record(self) -> None:
        """To be called when all copies of the step are on the current stream."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Waits until the copies are done. Other threads may run meanwhile."""
        if self._copied is not None:
            self._copied.synchronize()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step has put on a device's stream. Its tensors are host memory, which is filled once `buffer.wait()` has returned."""

    sampled: SampledTokens | None
    scores: PromptScores | None
    buffer: ResultBuffer

    @classmethod
    def copy(cls, sampled: SampledTokens | None, scores: PromptScores | None, buffer: ResultBuffer, device: torch.device) -> StepOutput:
        """Starts the copies from `device`, on the current stream."""
        put = _same if device.type == "cpu" else _copy_to_host
        if sampled is not None:
            sampled = replace(
                sampled,
                tokens=buffer.copy(sampled.tokens),
                logprobs=None if sampled.logprobs is None else DeviceLogprobs(*map(put, sampled.logprobs)),
                impossible=None if sampled.impossible is None else put(sampled.impossible),
            )
        if scores is not None:
            scores = PromptScores(scores.spans, DeviceLogprobs(*map(put, scores.logprobs)))
        buffer.record()
        return cls(sampled, scores, buffer)


def step_result(step: Step, sampled: SampledTokens | None, scores: PromptScores | None, sampler: Sampler) -> StepResult:
    """The result, from tensors in host memory. Tells the sampler the tokens, since some rows' next tokens depend on them on the host."""
    prompt_logprobs = () if scores is None else scores.on_host()
    if sampled is None:
        return StepResult(step.number, np.zeros(0, dtype=np.int32), prompt_logprobs=prompt_logprobs)
    return StepResult(
        step=step.number,
        tokens=sampled.tokens.numpy().astype(np.int32),
        logprobs=_of_all_rows(sampled),
        prompt_logprobs=prompt_logprobs,
        failures=sampler.observe(step.sampled_rows, step.next_positions, sampled),
        postponed=sampled.postponed,
    )


def _of_all_rows(sampled: SampledTokens) -> TokenLogprobs | None:
    """The logprobs by sampled row; zeros for rows without logprobs."""
    if sampled.logprobs is None or sampled.logprob_rows is None:
        return None
    logprobs = sampled.logprobs.on_host()
    count, at = len(sampled.tokens), sampled.logprob_rows
    if len(at) == count:
        return logprobs

    def all_rows(values: NDArray[_T]) -> NDArray[_T]:
        out = np.zeros((count, *values.shape[1:]), dtype=values.dtype)
        out[at] = values
        return out

    return TokenLogprobs(
        all_rows(logprobs.token_logprobs), all_rows(logprobs.ranks), all_rows(logprobs.top_ids), all_rows(logprobs.top_logprobs)
    )


def _copy_to_host(tensor: Tensor) -> Tensor:
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    memory.copy_(tensor, non_blocking=True)
    return memory


def _same(tensor: Tensor) -> Tensor:
    return tensor
