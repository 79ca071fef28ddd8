"""`LaunchedStep`: a step on its way, and how its tensors become a `StepResult`. Knows nothing of models or plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.runner.prompt_logprobs import PromptScores
from aengine.sampling import DeviceLogprobs, SampledTokens, Sampler
from aengine.scheduler.plan import StepResult, TokenLogprobs

_T = TypeVar("_T", bound=np.generic)


class NothingToChoose(RuntimeError):
    """Every token of a row's vocabulary was ruled out, or its logits are no numbers any more."""

    def __init__(self) -> None:
        super().__init__("no token can be chosen: the masks and logits processors of the request leave none of the vocabulary")


@dataclass(slots=True)
class LaunchedStep:
    """Satisfies `InFlightStep`. Tensors are host memory, filled once `done` has happened."""

    step: int
    rows: NDArray[np.int32]  # that were sampled
    sampled: SampledTokens | None
    scores: PromptScores | None
    done: torch.cuda.Event | None
    sampler: Sampler
    known: StepResult | None = None  # once it was asked for

    @classmethod
    def of(
        cls, step: int, rows: NDArray[np.int32], sampled: SampledTokens | None, scores: PromptScores | None, sampler: Sampler
    ) -> LaunchedStep:
        """Starts the copies to the host; the arguments' tensors are on the device."""
        tensors = [] if sampled is None else [sampled.tokens]
        if all(tensor.device.type == "cpu" for tensor in tensors) and (scores is None or scores.logprobs.chosen.device.type == "cpu"):
            return cls(step, rows, sampled, scores, None, sampler)
        if sampled is not None:
            sampled = SampledTokens(
                tokens=_land(sampled.tokens),
                logprobs=_land_all(sampled.logprobs),
                logprob_rows=sampled.logprob_rows,
                impossible=None if sampled.impossible is None else _land(sampled.impossible),
                impossible_rows=sampled.impossible_rows,
                failures=sampled.failures,
            )
        if scores is not None:
            landed = _land_all(scores.logprobs)
            assert landed is not None
            scores = PromptScores(scores.spans, landed)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # sleeps rather than spins while it waits
        done.record(torch.cuda.current_stream(sampler.device))
        return cls(step, rows, sampled, scores, done, sampler)

    def result(self) -> StepResult:
        """Waits; the first call also tells the sampler of the tokens, for rows whose next token depends on them on the host."""
        if self.known is None:
            if self.done is not None:
                self.done.synchronize()  # releases the GIL
            result = self._assemble()
            kept = ~np.isin(self.rows, list(result.failures))
            refused = self.sampler.observe(self.rows[kept], result.tokens[kept])
            self.known = replace(result, failures={**result.failures, **refused}) if refused else result
        return self.known

    def _assemble(self) -> StepResult:
        prompt_logprobs = () if self.scores is None else self.scores.on_host()
        sampled = self.sampled
        if sampled is None:
            return StepResult(self.step, np.zeros(0, dtype=np.int32), prompt_logprobs=prompt_logprobs)
        failures: dict[int, BaseException] = {}
        if sampled.impossible is not None and sampled.impossible_rows is not None:
            rows = self.rows[sampled.impossible_rows[sampled.impossible.numpy()]]
            failures.update((row, NothingToChoose()) for row in rows.tolist())
        failures.update(sampled.failures)
        return StepResult(
            step=self.step,
            tokens=sampled.tokens.numpy().astype(np.int32),
            logprobs=_spread(sampled),
            prompt_logprobs=prompt_logprobs,
            failures=failures,
        )


def _spread(sampled: SampledTokens) -> TokenLogprobs | None:
    """From the rows that want logprobs to all rows."""
    if sampled.logprobs is None or sampled.logprob_rows is None:
        return None
    some = sampled.logprobs.on_host()
    count, at = len(sampled.tokens), sampled.logprob_rows
    if len(at) == count:
        return some

    def all_rows(values: NDArray[_T]) -> NDArray[_T]:
        out = np.zeros((count, *values.shape[1:]), dtype=values.dtype)
        out[at] = values
        return out

    return TokenLogprobs(all_rows(some.chosen), all_rows(some.ranks), all_rows(some.top_ids), all_rows(some.top_logprobs))


def _land(tensor: Tensor) -> Tensor:
    landing = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    landing.copy_(tensor, non_blocking=True)
    return landing


def _land_all(logprobs: DeviceLogprobs | None) -> DeviceLogprobs | None:
    return None if logprobs is None else DeviceLogprobs(*map(_land, logprobs))
