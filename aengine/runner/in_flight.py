"""`LaunchedStep`: a step on its way, and how its tensors become a `StepResult`. Knows nothing of models or plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.runner.base import Hold
from aengine.runner.landing import Landing, Landings, as_int32
from aengine.runner.prompt_logprobs import PromptScores
from aengine.sampling import DeviceLogprobs, SampledTokens, Sampler
from aengine.scheduler.plan import StepResult, TokenLogprobs

_T = TypeVar("_T", bound=np.generic)


@dataclass(slots=True)
class LaunchedStep:
    """Satisfies `InFlightStep`. Tensors are host memory, filled once the landing is done."""

    step: int
    rows: NDArray[np.int32]  # that were sampled
    sampled: SampledTokens | None
    scores: PromptScores | None
    landing: Landing | None  # None: the tensors are where they are needed
    landings: Landings | None
    sampler: Sampler | None  # None: it need not hear of the tokens
    known: StepResult | None = None  # once it was asked for
    overlaps: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        step: int,
        rows: NDArray[np.int32],
        sampled: SampledTokens | None,
        scores: PromptScores | None,
        sampler: Sampler | None,
        landings: Landings | None,
    ) -> LaunchedStep:
        """Starts the copies to the host, on the current stream; the arguments' tensors are on the device. Without `landings` they are on
        the host, and nothing else writes to them."""
        if landings is None:
            return cls(step, rows, sampled, scores, None, landings, sampler)
        landing = landings.take()
        land = _land if landings.device.type != "cpu" else _stay
        if sampled is not None:
            sampled = replace(
                sampled,
                tokens=landing.copy(sampled.tokens),
                logprobs=None if sampled.logprobs is None else DeviceLogprobs(*map(land, sampled.logprobs)),
                checked=None if sampled.checked is None else replace(sampled.checked, impossible=land(sampled.checked.impossible)),
            )
        if scores is not None:
            scores = PromptScores(scores.spans, DeviceLogprobs(*map(land, scores.logprobs)))
        landing.close()
        return cls(step, rows, sampled, scores, landing, landings, sampler)

    def wait(self, hold: Hold | None = None) -> None:
        if self.landing is not None and self.known is None:
            self.landing.wait()

    def withdraw(self) -> bool:
        return False

    def result(self) -> StepResult:
        """Waits; the first call also tells the sampler of the tokens, for rows whose next token depends on them on the host."""
        if self.known is None:
            self.wait()
            result = self._assemble()
            if self.landing is not None and self.landings is not None:
                self.landings.give_back(self.landing)
            self.known = result if self.sampler is None else self._observed(self.sampler, result)
        return self.known

    def _observed(self, sampler: Sampler, result: StepResult) -> StepResult:
        """`result` with the rows, too, that cannot go on with their token."""
        rows, tokens = self.rows, result.tokens
        if result.failures or result.postponed:
            kept = ~np.isin(rows, [*result.failures, *result.postponed])
            rows, tokens = rows[kept], tokens[kept]
        refused = sampler.observe(rows, tokens)
        return replace(result, failures={**result.failures, **refused}) if refused else result

    def _assemble(self) -> StepResult:
        prompt_logprobs = () if self.scores is None else self.scores.on_host()
        sampled = self.sampled
        if sampled is None:
            return StepResult(self.step, np.zeros(0, dtype=np.int32), prompt_logprobs=prompt_logprobs)
        failures: dict[int, BaseException] = {}
        if sampled.checked is not None and self.sampler is not None:
            failures.update(self.sampler.refusals(self.rows, sampled.checked))
        failures.update(sampled.failures)
        return StepResult(
            step=self.step,
            tokens=as_int32(sampled.tokens),
            logprobs=_spread(sampled),
            prompt_logprobs=prompt_logprobs,
            failures=failures,
            postponed=sampled.postponed,
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
    place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    place.copy_(tensor, non_blocking=True)
    return place


def _stay(tensor: Tensor) -> Tensor:
    return tensor
