"""One screen about a run, from the files that its parts wrote. Needs the standard library alone."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu.expected import DEVICE, surprises
from tools.gpu.parts import EVEN, RAGGED, Part

KERNELS = 5  # of each breakdown
FAILURES = 12
_WIDTH = 110
_FACTS = ("gpu", "driver", "torch", "cuda", "triton", "flashinfer", "python")


@dataclass(frozen=True, slots=True)
class PartResult:
    part: Part
    seconds: float
    succeeded: bool
    notes: Sequence[str]


def summary(facts: Mapping[str, Any], results: Sequence[PartResult], seconds: float, problems: Sequence[str]) -> str:
    """`facts`: of `aengine.bench.report.environment`. `problems`: of what is installed."""
    figures = {result.part.name: _read(result.part.figures) for result in results}
    benches = {name: found["figures"] for name, found in figures.items() if isinstance(found, dict)}
    steps = {name: found[0] for name, found in benches.items() if isinstance(found, list) and found}
    outcomes = {name: found for name, found in figures.items() if isinstance(found, list)}
    red = [result.part.name for result in results if not result.succeeded]
    about_all = ", ".join(f"{name} {facts.get(name)}" for name in _FACTS) + f"; {seconds:.0f} s"
    lines = ["== summary", *textwrap.wrap(about_all, _WIDTH), *problems]
    for result in results:
        found = outcomes.get(result.part.name)
        counted = ", ".join(f"{count} {name}" for name, count in Counter(one["outcome"] for one in found).items()) if found else ""
        about = ", ".join(part for part in ("ok" if result.succeeded else "FAILED", *result.notes, counted) if part)
        lines.append(f"{result.part.name:20}{result.seconds:4.0f} of {result.part.limit:.0f} s  {about}")
    lines += _failures(outcomes)
    lines += _steps(steps)
    if facts.get("gpu") == DEVICE:
        for name, model in steps.items():
            lines += surprises(name, {_text(one["figures"]["case"]): one["figures"]["milliseconds"] for one in model.get("steps", ())})
    for name, model in steps.items():
        lines += [f"{name}: {line}" for line in model.get("start_up", ()) if "no graphs" in line or "attention backend" in line]
        lines += _kernels(name, model)
    for name, found in benches.items():
        if isinstance(found, dict):
            lines.append(_offline(name, found))
    lines.append(f"FAILED: {', '.join(red) or 'what is installed'}" if red or problems else "all parts succeeded")
    return "\n".join(line[:_WIDTH] for line in lines)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _failures(outcomes: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    failed = [one for found in outcomes.values() for one in found if one["outcome"] in ("failed", "unfinished")]
    for one in failed[:FAILURES]:
        yield f"  {one['outcome']}: {one['test'].rpartition('/')[2]}: {one['reason']}"
    if len(failed) > FAILURES:
        yield f"  ... and {len(failed) - FAILURES} more"


def _steps(steps: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each case, with milliseconds and the part of the floor that each run of steps reached."""
    measured = {name: {_text(one["figures"]["case"]): one["figures"] for one in model.get("steps", ())} for name, model in steps.items()}
    if any(measured.values()):
        yield f"{'step, ms (of floor)':28}" + "".join(f"{name.removeprefix('step-'):>20}" for name in measured)
    for text in dict.fromkeys(text for found in measured.values() for text in found):
        cells = (_cell(found.get(text)) for found in measured.values())
        yield f"{text:28}" + "".join(f"{cell:>20}" for cell in cells)
    for name, found in measured.items():
        if RAGGED in found and EVEN in found:
            ratio = found[RAGGED]["milliseconds"] / found[EVEN]["milliseconds"]
            yield f"{name.removeprefix('step-')}: {RAGGED} takes {ratio:.2f} of {EVEN}"
    for name, model in steps.items():
        for left in (*model.get("left_out", ()), *model.get("failed", ())):
            yield f"{name}: not measured: {left['case']}: {left['reason']}"
        if "error" in model:
            yield f"{name}: {model['error']}"


def _cell(figures: Mapping[str, Any] | None) -> str:
    return "-" if figures is None else f"{figures['milliseconds']:.2f} ({figures['fraction']:.2f})"


def _text(case: Mapping[str, Any]) -> str:
    """As a case is given to `aengine-bench step`."""
    groups = "+".join(f"{one['rows']}x{one['length']}@{one['context']}" for one in (case, *case.get("beside", ())))
    return groups if case.get("top_p", 1) == 1 else f"{groups},top_p={case['top_p']:g}"


def _kernels(name: str, model: Mapping[str, Any]) -> Iterator[str]:
    for times in model.get("kernels", ()):
        span = times["span_microseconds"] or 0.0
        yield f"{name}, {times['case']}: kernels {times['busy_microseconds']:.0f} us of {span:.0f}; us a layer, us a step, calls:"
        for kernel in times["kernels"][:KERNELS]:
            layer = "" if kernel["microseconds_per_layer"] is None else f"{kernel['microseconds_per_layer']:.1f}"
            yield f"  {layer:>7} {kernel['microseconds']:8.0f} {kernel['calls']:5.0f}  {kernel['name'][:80]}"


def _offline(name: str, found: Mapping[str, Any]) -> str:
    throughput = found["summary"]["output_tokens_per_second"]
    floor = found.get("floor")
    return f"{name}: {throughput:.0f} output tok/s" + (f", {floor['fraction']:.2f} of the floor" if floor else "")
