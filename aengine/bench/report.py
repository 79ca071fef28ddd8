"""Figures -> a table on the terminal, JSON in a file, a plot. Knows the names of figures, not how they were measured."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import aengine
from aengine.bench.load import Outcome
from aengine.bench.metrics import Distribution, Summary, tokens_by_second


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
        "aengine": aengine.__version__,
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


def plot(path: Path, outcomes: Sequence[Outcome], title: str) -> None:
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
