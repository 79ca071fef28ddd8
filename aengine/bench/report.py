"""Outcomes -> figures, in the definitions of the field's serving benchmarks (`vllm bench serve` and `sglang.bench_serving` agree).

TTFT: first chunk minus send. ITL: every gap between chunks of a request; a chunk may hold several tokens, so tokens per chunk are
reported beside it. TPOT: (E2EL - TTFT) / (output tokens - 1) of a request, requests with one token left out. E2EL: last chunk minus send.
Goodput: requests per second that meet all of the given limits. Throughputs are over the wall time from the first send to the last chunk.

Figures -> a table on the terminal, JSON in a file, a plot. Knows the names of figures, not how they were measured."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from aengine.api import VERSION
from aengine.api.dataclass import dataclass
from aengine.api.outputs import Drafted, DraftUsage
from aengine.bench.load_run import RequestOutcome


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


def summarise(outcomes: Sequence[RequestOutcome], limits: Mapping[str, float] | None = None) -> Summary:
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


def tokens_by_second(outcomes: Sequence[RequestOutcome], start: float) -> Counter[int]:
    """How many tokens came in each whole second after `start`."""
    seconds = Counter[int]()
    for outcome in outcomes:
        for time, tokens in zip(outcome.chunk_times, outcome.chunk_tokens, strict=True):
            seconds[int(time - start)] += tokens
    return seconds


def _peak_concurrency(outcomes: Sequence[RequestOutcome]) -> int:
    changes = sorted([(o.sent, 1) for o in outcomes] + [(o.chunk_times[-1], -1) for o in outcomes])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as they need to be; numbers to the right."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]) for first, *others in cells)


def show_summary(name: str, summary: Summary) -> str:
    head = [
        f"{name}: {summary.completed} requests in {summary.duration:.2f} s" + (f", {summary.failed} FAILED" if summary.failed else ""),
        f"  requests/s {summary.requests_per_second:.2f}   output tok/s {summary.output_tokens_per_second:.1f}"
        f" (peak {summary.peak_output_tokens_per_second:.0f})   total tok/s {summary.total_tokens_per_second:.1f}"
        f"   peak concurrency {summary.peak_concurrency}   tokens per chunk {summary.tokens_per_chunk:.2f}",
    ]
    if summary.goodput is not None:
        head.append(f"  goodput {summary.goodput:.2f} requests/s")
    if summary.speculation is not None:
        head.append(f"  {summary.speculation.show()}")
    rows = [
        (f"  {label} ms", *astuple(getattr(summary, key)))
        for key, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "E2EL"))
    ]
    head.append(table(("", "mean", "median", "p90", "p95", "p99", "max", "std"), rows))
    head += [f"  {count} x {error}" for error, count in summary.errors.items()]
    return "\n".join(head)


def show_distribution(label: str, values: Sequence[float]) -> str:
    return f"  {label}: " + "  ".join(f"{name} {_cell(value)}" for name, value in asdict(Distribution.of(values)).items())


def write_json(path: Path, command: Sequence[str], figures: object) -> None:
    """With where and when they were taken, so that the file speaks for itself."""
    document = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
        **environment(),
        "figures": json.loads(json.dumps(figures, default=asdict), parse_constant=lambda name: None),  # JSON has no NaN
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def environment() -> dict[str, Any]:
    """Hardware and versions. Of torch and the GPU only where torch is loaded already."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "cpu": _cpu_name(),
        "aengine": VERSION,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.__version__
        if torch.cuda.is_available():
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            found |= {"gpu": device.name, "gpu_memory": device.total_memory, "driver": _driver_version(), "cuda": torch.version.cuda}
            found |= {name: _installed(package) for name, package in (("triton", "triton"), ("flashinfer", "flashinfer-python"))}
    return found


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    """Returns the version of the NVIDIA driver as nvidia-smi prints it; None if that cannot be run."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def plot(path: Path, outcomes: Sequence[RequestOutcome], title: str) -> None:
    """TTFT, ITL and throughput over time, as PNG (or what the name's ending says; .html holds the PNG). Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [outcome for outcome in outcomes if outcome.completed]
    start = min((outcome.sent for outcome in done), default=0.0)
    figure, (first, gaps, rate) = pyplot.subplots(3, 1, sharex=True, figsize=(10, 9))
    first.scatter([o.sent - start for o in done], [o.ttft for o in done], s=8)
    first.set_ylabel("TTFT, ms")
    pairs = [pair for o in done for pair in o.gaps]
    gaps.scatter([time - start for time, _ in pairs], [gap for _, gap in pairs], s=2, alpha=0.4)
    gaps.set_ylabel("ITL, ms")
    seconds = tokens_by_second(done, start)
    rate.step(sorted(seconds), [seconds[second] for second in sorted(seconds)], where="post")
    rate.set_ylabel("output tokens/s")
    rate.set_xlabel("seconds since the first request")
    figure.suptitle(title)
    figure.tight_layout()
    if path.suffix == ".html":
        import base64
        import io

        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=120)
        encoded = base64.b64encode(image.getvalue()).decode()
        path.write_text(f'<!doctype html><title>{title}</title><img alt="{title}" src="data:image/png;base64,{encoded}">\n')
    else:
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
