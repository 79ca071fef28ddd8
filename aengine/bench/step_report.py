"""The steps of one model, from its configuration to a table: builds the runner, chooses the cases, names those that cannot be measured.

Owns what is told beside the figures; the measuring is `steps.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aengine.bench.floor import Machine
from aengine.bench.report import table
from aengine.bench.start_up_log import start_up_log
from aengine.bench.step_cases import ON_CPU, ON_CUDA, StepsWanted
from aengine.bench.steps import StepFigures, measure_steps, why_not
from aengine.config import EngineConfig
from aengine.models.hub import resolve_model
from aengine.runner.device import find_device
from aengine.runner.model_runner import ModelRunner

HEADER = ("step", "ms", "best ms", "tok/s", "MB moved", "GFLOP", "floor ms", "of floor", "GB/s", "TFLOP/s")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    figures: StepFigures
    machine: Machine


@dataclass(frozen=True, slots=True)
class LeftOut:
    case: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelSteps:
    """All of one model."""

    model: str
    device: str
    dtype: str
    config: Mapping[str, Any]  # fields of EngineConfig
    start_up: Sequence[str]  # what the runner said: attention backend, graphs, memory
    steps: Sequence[MeasuredStep]
    left_out: Sequence[LeftOut]

    def show(self) -> str:
        lines = [f"{self.model}: {self.dtype} on {self.device}", *(f"  {line}" for line in self.start_up)]
        if self.steps:
            lines.append(table(HEADER, map(_row, self.steps)))
        lines += [f"not measured: {entry.case}: {entry.reason}" for entry in self.left_out]
        return "\n".join(lines)


def measure_model(name: str, config: EngineConfig, wanted: StepsWanted) -> ModelSteps:
    """Raises what building a runner raises, and what its steps do.

    Where max_num_batched_tokens is left open, it is raised to the longest prompt, so that each prompt is one step.
    """
    cases = wanted.cases(ON_CUDA if find_device(config.device).type == "cuda" else ON_CPU)
    if config.max_num_batched_tokens is None:
        config = EngineConfig.of(config, max_num_batched_tokens=max(config.num_seqs, *(case.length for case in cases)))
    kv_item_bytes = 1 if config.kv_cache_dtype == "fp8" else None
    with start_up_log() as said:
        runner = ModelRunner(config, resolve_model(config.model, config.revision, weights=config.load_format != "dummy"))
    try:
        reasons = [(case, why_not(runner, case)) for case in cases]
        measured = measure_steps(runner, [case for case, reason in reasons if reason is None], wanted.seconds, kv_item_bytes)
        return ModelSteps(
            model=name,
            device=str(runner.device),
            dtype=str(runner.dtype).removeprefix("torch."),
            config={**asdict(config), "model": name},
            start_up=said,
            steps=[MeasuredStep(figures, machine) for figures, machine in measured],
            left_out=[LeftOut(case.name, reason) for case, reason in reasons if reason is not None],
        )
    finally:
        runner.close()
        del runner
        gc.collect()  # the next model needs the memory


def _row(step: MeasuredStep) -> Sequence[object]:
    figures, machine = step.figures, step.machine
    moved = figures.weight_bytes + figures.kv_bytes
    times = (figures.milliseconds, figures.best_milliseconds, figures.tokens_per_second)
    floor = (moved / 1e6, figures.flops / 1e9, figures.floor_milliseconds, figures.fraction)
    return (figures.case.name, *times, *floor, machine.bytes_per_second / 1e9, machine.flops_per_second / 1e12)
