"""Outcomes -> figures, in the definitions of the field's serving benchmarks (`vllm bench serve` and `sglang.bench_serving` agree).

TTFT: first chunk minus send. ITL: every gap between chunks of a request; a chunk may hold several tokens, so tokens per chunk are
reported beside it. TPOT: (E2EL - TTFT) / (output tokens - 1) of a request, requests with one token left out. E2EL: last chunk minus send.
Goodput: requests per second that meet all of the given limits. Throughputs are over the wall time from the first send to the last chunk.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aengine.api.outputs import Drafted, DraftUsage
from aengine.bench.load import Outcome


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds, unless a name says otherwise. NaN where there is nothing."""

    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    maximum: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        if not values:
            return cls(*[math.nan] * 7)
        median, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
        return cls(float(np.mean(values)), median, p90, p95, p99, max(values), float(np.std(values)))


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafts of requests, and the mean number of tokens that a step brought a sequence: of all steps, and of those with drafts."""

    drafts: tuple[DraftUsage, ...]  # by drafter
    tokens_per_step: float
    acceptance_length: float

    @classmethod
    def of(cls, output_tokens: int, requests: Iterable[Sequence[DraftUsage]]) -> Speculation | None:
        """`requests`: the drafts of each. None if there are none."""
        total: dict[str, DraftUsage] = {}
        for one in itertools.chain.from_iterable(requests):
            total[one.drafter] = total.get(one.drafter, DraftUsage(one.drafter)).plus(one.drafted, one.accepted, one.steps)
        both = Drafted(drafts=tuple(total.values()))
        tokens_per_step = output_tokens / max(1, output_tokens - both.accepted_draft_tokens)
        return cls(both.drafts, tokens_per_step, both.acceptance_length) if total else None

    def show(self) -> str:
        by_drafter = (f"{one.drafter} {one.drafted} tokens, {100 * one.accepted / one.drafted:.0f} % right" for one in self.drafts)
        means = f"tokens per step {self.tokens_per_step:.2f}, with drafts {self.acceptance_length:.2f}"
        return f"drafts: {'; '.join(by_drafter)}; {means}"


@dataclass(frozen=True, slots=True)
class Summary:
    completed: int
    failed: int
    duration: float  # seconds
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    peak_output_tokens_per_second: float  # of the best whole second
    peak_concurrency: int
    goodput: float | None  # requests per second within the limits
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution
    tokens_per_chunk: float
    errors: Mapping[str, int]  # message of failed requests -> how often
    speculation: Speculation | None = None  # None where no request had drafts


def summarise(outcomes: Sequence[Outcome], limits: Mapping[str, float] | None = None) -> Summary:
    """`limits`: milliseconds under "ttft", "tpot" and "e2el" that a good request must keep."""
    done = [outcome for outcome in outcomes if outcome.completed]
    start = min((outcome.sent for outcome in outcomes), default=0.0)
    duration = max((outcome.chunk_times[-1] for outcome in done), default=start) - start
    per_second = 1 / duration if duration > 0 else math.nan
    output_tokens, prompt_tokens = sum(o.output_tokens for o in done), sum(o.prompt_tokens for o in done)
    good = [o for o in done if all(getattr(o, name) <= limit for name, limit in (limits or {}).items())]
    return Summary(
        completed=len(done),
        failed=len(outcomes) - len(done),
        duration=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_second=len(done) * per_second,
        output_tokens_per_second=output_tokens * per_second,
        total_tokens_per_second=(prompt_tokens + output_tokens) * per_second,
        peak_output_tokens_per_second=max(tokens_by_second(done, start).values(), default=0),
        peak_concurrency=_peak_concurrency(done),
        goodput=len(good) * per_second if limits else None,
        ttft=Distribution.of([o.ttft for o in done]),
        tpot=Distribution.of([o.tpot for o in done if o.output_tokens > 1]),
        itl=Distribution.of([gap for o in done for _, gap in o.gaps]),
        e2el=Distribution.of([o.e2el for o in done]),
        tokens_per_chunk=output_tokens / max(1, sum(len(o.chunk_tokens) for o in done)),
        errors=Counter(o.error or "no output" for o in outcomes if not o.completed),
        speculation=Speculation.of(output_tokens, (o.drafts for o in done)),
    )


def tokens_by_second(outcomes: Sequence[Outcome], start: float) -> Counter[int]:
    """How many tokens came in each whole second after `start`."""
    seconds = Counter[int]()
    for outcome in outcomes:
        for time, tokens in zip(outcome.chunk_times, outcome.chunk_tokens, strict=True):
            seconds[int(time - start)] += tokens
    return seconds


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    changes = sorted([(o.sent, 1) for o in outcomes] + [(o.chunk_times[-1], -1) for o in outcomes])
    return max(itertools.accumulate(change for _, change in changes), default=0)
