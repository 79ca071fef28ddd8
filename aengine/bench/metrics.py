"""Outcomes -> figures, in the definitions of the field's serving benchmarks (`vllm bench serve` and `sglang.bench_serving` agree).

TTFT: first chunk minus send. ITL: every gap between chunks of a request; a chunk may hold several tokens, so tokens per chunk are told
beside it. TPOT: (E2EL - TTFT) / (output tokens - 1) of a request, requests with one token left out. E2EL: last chunk minus send.
Goodput: requests per second that meet all of the given limits. Throughputs are over the wall time from the first send to the last chunk.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aengine.bench.load import Outcome, answered, tokens_by_second


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
        ordered = sorted(values)
        return cls(
            mean=statistics.fmean(ordered),
            median=_percentile(ordered, 0.5),
            p90=_percentile(ordered, 0.9),
            p95=_percentile(ordered, 0.95),
            p99=_percentile(ordered, 0.99),
            maximum=ordered[-1],
            std=statistics.pstdev(ordered),
        )


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
    errors: Mapping[str, int]  # what failed requests said -> how often


def summarise(outcomes: Sequence[Outcome], limits: Mapping[str, float] | None = None) -> Summary:
    """`limits`: milliseconds under "ttft", "tpot" and "e2el" that a good request must keep."""
    good = answered(outcomes)
    start = min((outcome.sent for outcome in outcomes), default=0.0)
    end = max((outcome.chunk_times[-1] for outcome in good), default=start)
    duration = end - start
    output_tokens, prompt_tokens = sum(o.output_tokens for o in good), sum(o.prompt_tokens for o in good)
    ttft = [1e3 * (o.chunk_times[0] - o.sent) for o in good]
    e2el = [1e3 * (o.chunk_times[-1] - o.sent) for o in good]
    tpot = [1e3 * (o.chunk_times[-1] - o.chunk_times[0]) / (o.output_tokens - 1) if o.output_tokens > 1 else 0.0 for o in good]
    itl = [1e3 * gap for o in good for _, gap in o.gaps]
    kept = None
    if limits:
        measured = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
        kept = sum(all(measured[name][i] <= limit for name, limit in limits.items()) for i in range(len(good)))
    per_second = 1 / duration if duration > 0 else math.nan
    return Summary(
        completed=len(good),
        failed=len(outcomes) - len(good),
        duration=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_second=len(good) * per_second,
        output_tokens_per_second=output_tokens * per_second,
        total_tokens_per_second=(prompt_tokens + output_tokens) * per_second,
        peak_output_tokens_per_second=max(tokens_by_second(good, start).values(), default=0),
        peak_concurrency=_peak_concurrency(good),
        goodput=None if kept is None else kept * per_second,
        ttft=Distribution.of(ttft),
        tpot=Distribution.of([value for value, o in zip(tpot, good, strict=True) if o.output_tokens > 1]),
        itl=Distribution.of(itl),
        e2el=Distribution.of(e2el),
        tokens_per_chunk=output_tokens / max(1, sum(len(o.chunk_tokens) for o in good)),
        errors=Counter(o.error or "no output" for o in outcomes if o.error is not None or not o.chunk_times),
    )


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    changes = sorted([(o.sent, 1) for o in outcomes] + [(o.chunk_times[-1], -1) for o in outcomes])
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest values, as numpy does it."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
