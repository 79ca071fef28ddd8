"""Which kernels a step spends its time in: a few steps under torch's profiler. Knows nothing of floors.

On a CPU the operators of torch take the place of kernels, with what each spends itself; our own kernels for CPUs are not seen.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from aengine.bench.report import table
from aengine.bench.step_cases import Case, step_plan
from aengine.runner.contract import InFlightStep
from aengine.runner.runner import ModelRunner
from aengine.scheduler.plan import StepPlan

STEPS = 5
_LONGEST_NAME = 160  # of a template's instance
_SHOWN = 12
_WIDTH = 60


@dataclass(frozen=True, slots=True)
class KernelTime:
    name: str
    calls: float  # in a step
    microseconds: float  # in a step
    microseconds_per_layer: float | None  # of a kernel that every layer calls at least once


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """The kernels of a step of one case, those with the most time first."""

    case: str
    busy_microseconds: float  # the kernels of a step together
    span_microseconds: float | None  # of a step, from the first kernel to the last, gaps included; None on a CPU
    kernels: Sequence[KernelTime]

    def show(self) -> str:
        if not self.kernels:
            return f"kernels of {self.case}: the profiler sees none"
        span = "" if self.span_microseconds is None else f" of {self.span_microseconds:.0f}"
        head = f"kernels of {self.case}: {self.busy_microseconds:.0f}{span} us a step, {sum(one.calls for one in self.kernels):.0f} calls"
        rows = [(one.name[:_WIDTH], one.calls, one.microseconds, _or_dash(one.microseconds_per_layer)) for one in self.kernels[:_SHOWN]]
        return f"{head}\n{table(('kernel', 'calls', 'us a step', 'us a layer'), rows)}"


def kernel_times(runner: ModelRunner, case: Case, num_layers: int, numbers: Iterator[int]) -> KernelTimes:
    """Runs `STEPS` steps of a case under the profiler, after two without it. `numbers` count the steps of the runner."""
    plans = (
        step_plan(runner, case, next(numbers), given_tokens=first, new_rows=first)
        for first in itertools.chain([True], itertools.repeat(False))
    )
    _run(runner, itertools.islice(plans, 2))
    on_cuda = runner.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU], acc_events=True) as profiler:
        _run(runner, itertools.islice(plans, STEPS))
        if on_cuda:
            torch.cuda.synchronize(runner.device)
    times: dict[str, list[float]] = {}
    begin, end = float("inf"), 0.0
    for event in profiler.events() or ():
        if not on_cuda:
            times.setdefault(event.name, []).append(event.self_cpu_time_total)
        elif event.device_type.name == "CUDA":
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
            begin, end = min(begin, event.time_range.start), max(end, event.time_range.end)
    kernels = [_kernel(name, each, num_layers) for name, each in times.items()]
    kernels.sort(key=lambda kernel: kernel.microseconds, reverse=True)
    busy = sum(kernel.microseconds for kernel in kernels)
    return KernelTimes(case.name, busy, (end - begin) / STEPS if on_cuda and kernels else None, kernels)


def _run(runner: ModelRunner, plans: Iterator[StepPlan]) -> None:
    """One step ahead where possible, as the engine does it."""
    flights: deque[InFlightStep] = deque()
    for plan in plans:
        flights.append(runner.launch(plan))
        if len(flights) > flights[-1].overlaps:
            flights.popleft().result()
    for flight in flights:
        flight.result()


def _kernel(name: str, times: Sequence[float], num_layers: int) -> KernelTime:
    calls, microseconds = len(times) / STEPS, sum(times) / STEPS
    return KernelTime(name[:_LONGEST_NAME], calls, microseconds, microseconds / num_layers if calls >= num_layers else None)


def _or_dash(value: float | None) -> object:
    return "-" if value is None else value
