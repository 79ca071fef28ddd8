"""Bare steps of a model against the floor: `aengine-bench step`. The runner alone, without scheduler, streams or text.

The KV of a decode step's context is arbitrary: reading it takes as long whatever it holds.
"""

from __future__ import annotations

import gc
import itertools
import pathlib
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.bench.floor import Machine, MachineProbe, step_work
from aengine.bench.probes import start_up_log
from aengine.bench.random_adapters import write_adapter
from aengine.bench.report import table
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.models.hub import resolve_model
from aengine.models.spec import ModelSpec
from aengine.models.weight_bytes import quantized_bytes, weight_bytes
from aengine.runner.base import InFlightStep
from aengine.runner.changes import LoadAdapter
from aengine.runner.dummy_steps import GREEDY
from aengine.runner.model_runner import ModelRunner
from aengine.scheduler.plan import NewRow, StepPlan

ROUNDS = 5
"""Of a case, with the machine measured in between, since shared machines drift."""
HEADER = ("step", "ms", "best ms", "tok/s", "MB moved", "GFLOP", "floor ms", "of floor", "GB/s", "TFLOP/s")


@dataclass(frozen=True, slots=True)
class Case:
    """A step in which each of `rows` sequences computes `length` tokens behind `context` computed ones."""

    rows: int
    length: int
    context: int
    adapters: int = 0  # that the rows have, in turns

    @property
    def name(self) -> str:
        name = f"decode {self.rows} x {self.context}" if self.length == 1 else f"prefill {self.rows} x {self.length} @ {self.context}"
        return f"{name}, {self.adapters} adapters" if self.adapters else name


@dataclass(frozen=True, slots=True)
class StepFigures:
    case: Case
    milliseconds: float  # median
    best_milliseconds: float
    tokens_per_second: float
    weight_bytes: int
    kv_bytes: int
    flops: int
    floor_milliseconds: float
    with_adapters: (
        float | None
    )  # the time over that of the same step without adapters, which each round measures before; the median of rounds
    exchange: float  # the share of the time that rank 0 spent in the exchange with other ranks
    fraction: float  # the floor of the machine right before and after a round, over that round's median; the median of rounds


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    figures: StepFigures
    machine: Machine

    @property
    def cells(self) -> Sequence[object]:
        """Of the table with `HEADER`."""
        figures, machine = self.figures, self.machine
        moved = figures.weight_bytes + figures.kv_bytes
        times = (figures.milliseconds, figures.best_milliseconds, figures.tokens_per_second)
        floor = (moved / 1e6, figures.flops / 1e9, figures.floor_milliseconds, figures.fraction)
        return (figures.case.name, *times, *floor, machine.bytes_per_second / 1e9, machine.flops_per_second / 1e12)


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
    start_up: Sequence[str]  # what the runner logged: attention backend, graphs, memory
    steps: Sequence[MeasuredStep]
    left_out: Sequence[LeftOut]

    def show(self) -> str:
        lines = [f"{self.model}: {self.dtype} on {self.device}", *(f"  {line}" for line in self.start_up)]
        if self.steps:
            lines.append(table(HEADER, [step.cells for step in self.steps]))
        figures = [step.figures for step in self.steps]
        if ratios := [f"{one.with_adapters:.3f} in {one.case.name}" for one in figures if one.with_adapters is not None]:
            lines.append(f"time with adapters over time without: {', '.join(ratios)}")
        if shares := [f"{100 * one.exchange:.1f} % of {one.case.name}" for one in figures if one.exchange]:
            lines.append(f"exchange between ranks: {', '.join(shares)}")
        lines += [f"not measured: {entry.case}: {entry.reason}" for entry in self.left_out]
        return "\n".join(lines)


def measure_model(name: str, config: EngineConfig, cases: Sequence[Case], seconds: float, adapter_rank: int = 16) -> ModelSteps:
    """Repeats each case for about `seconds`; adapters are random ones of that low rank. Raises what building a runner raises, and what its
    steps do.

    Where max_num_batched_tokens is left open, it is raised to the longest prompt, so that each prompt is one step.
    """
    if config.max_num_batched_tokens is None:
        config = EngineConfig.of(config, max_num_batched_tokens=max(config.num_seqs, *(case.length for case in cases)))
    model_dir = resolve_model(config.model, config.revision, config.load_format)
    with start_up_log() as log:
        runner = ModelRunner(config, model_dir)
    try:
        weights = None
        if isinstance(runner.spec, ModelSpec) and (runner.executor_name == "cpu" or runner.device.type == "cuda"):
            weights = weight_bytes(config, runner.spec, runner.dtype.itemsize, quantized_bytes(config, runner.spec, model_dir))
        reasons = [(case, why_not(runner, case)) for case in cases]
        adapter_bytes = _load_adapters(runner, max((case.adapters for case, reason in reasons if reason is None), default=0), adapter_rank)
        return ModelSteps(
            model=name,
            device=str(runner.device),
            dtype=str(runner.dtype).removeprefix("torch."),
            config={**asdict(config), "model": name},
            start_up=log,
            steps=list(
                measure_steps(
                    runner,
                    [case for case, reason in reasons if reason is None],
                    seconds,
                    config.kv_cache_dtype,
                    weights,
                    adapter_bytes,
                )
            ),
            left_out=[LeftOut(case.name, reason) for case, reason in reasons if reason is not None],
        )
    finally:
        runner.close()
        del runner
        gc.collect()  # the next model needs the memory


def _load_adapters(runner: ModelRunner, count: int, low_rank: int) -> int:
    """Random adapters of the keys 1 .. count; returns the bytes of one."""
    size = 0
    for key in range(1, count + 1):
        if not isinstance(runner.spec, ModelSpec):
            raise ConfigError.of("model_impl", "adapters are possible with native models only")
        with tempfile.TemporaryDirectory() as folder:
            path = write_adapter(pathlib.Path(folder, "adapter"), runner.spec, low_rank, runner.dtype, key)
            prepared = runner.prepare(LoadAdapter(key, f"adapter-{key}", str(path)))
        runner.apply(prepared)
        assert prepared.adapter is not None
        size = prepared.adapter.num_bytes
    return size


def why_not(runner: ModelRunner, case: Case) -> str | None:
    """Why a case cannot be measured with this runner, in a few words; None: it can."""
    pages = int(_pages(runner, case).max())
    if case.rows > runner.max_num_seqs:
        return f"max_num_seqs is {runner.max_num_seqs}"
    if case.adapters and case.adapters > runner.max_adapters:
        return f"max_adapters is {runner.max_adapters}"
    if case.rows * case.length > runner.max_num_batched_tokens:
        return f"max_num_batched_tokens is {runner.max_num_batched_tokens}"
    if case.context + case.length >= runner.max_model_len:
        return f"max_model_len is {runner.max_model_len}"
    if pages > runner.num_pages - 1:
        return f"it needs {pages} KV pages of {runner.page_size} tokens, and there are {runner.num_pages - 1}"
    return None


def measure_steps(
    runner: ModelRunner,
    cases: Sequence[Case],
    seconds: float = 2.0,
    kv_cache_dtype: str = "auto",
    weights: Mapping[str, int] | None = None,
    adapter_bytes: int = 0,
) -> Iterator[MeasuredStep]:
    """Repeats each case for about `seconds`, in rounds. `kv_cache_dtype` and `weights` are as in `step_work`."""
    if not isinstance(runner.spec, ModelSpec):
        raise ConfigError.of("model_impl", "the least work of a step is known of native models only")
    probe = MachineProbe(runner.device, runner.dtype)
    numbers = itertools.count()
    for case in cases:
        lengths, contexts = [case.length] * case.rows, [case.context] * case.rows
        work = step_work(runner.spec, lengths, contexts, case.rows, runner.dtype.itemsize, kv_cache_dtype, weights)
        work = replace(work, weight_bytes=work.weight_bytes + case.adapters * adapter_bytes)
        machines = [probe.measure()]
        rounds: list[Sequence[float]] = []
        plain_medians = []
        exchanged, ran = 0.0, 0.0
        for number in range(ROUNDS):
            if case.adapters:
                without = replace(case, adapters=0)
                plain_medians.append(statistics.median(_time_steps(runner, without, seconds / ROUNDS, numbers, new_rows=number == 0)))
            before, began = runner.exchange_seconds, time.perf_counter()
            rounds.append(_time_steps(runner, case, seconds / ROUNDS, numbers, new_rows=number == 0 and not case.adapters))
            exchanged, ran = exchanged + runner.exchange_seconds - before, ran + time.perf_counter() - began
            machines.append(probe.measure())
        machine = Machine(
            statistics.median(one.bytes_per_second for one in machines), statistics.median(one.flops_per_second for one in machines)
        )
        times = [taken for one in rounds for taken in one]
        median = statistics.median(times)
        figures = StepFigures(
            case=case,
            milliseconds=1e3 * median,
            best_milliseconds=1e3 * min(times),
            tokens_per_second=case.rows * case.length / median,
            weight_bytes=work.weight_bytes,
            kv_bytes=work.kv_bytes,
            flops=work.flops,
            with_adapters=statistics.median(statistics.median(one) / plain for one, plain in zip(rounds, plain_medians, strict=True))
            if case.adapters
            else None,
            exchange=exchanged / ran,
            floor_milliseconds=1e3 * work.seconds(machine),
            fraction=statistics.median(
                (work.seconds(before) + work.seconds(after)) / 2 / statistics.median(one)
                for (before, after), one in zip(itertools.pairwise(machines), rounds, strict=True)
            ),
        )
        yield MeasuredStep(figures, machine)


def _time_steps(runner: ModelRunner, case: Case, seconds: float, numbers: Iterator[int], *, new_rows: bool) -> Sequence[float]:
    """Seconds of each of some steps, at least one, without the first two: one makes the rows differ, the next finds caches cold."""
    times: list[float] = []
    flights: deque[tuple[float, InFlightStep]] = deque()
    last = time.perf_counter()
    end = last + seconds
    first = True
    while len(times) < 3 or time.perf_counter() < end:
        plan = _plan(runner, case, next(numbers), given_tokens=first, new_rows=first and new_rows)
        flights.append((time.perf_counter(), runner.launch(plan)))
        first = False
        if len(flights) > flights[-1][1].overlaps:  # one step ahead where possible, as the engine does it
            launched, flight = flights.popleft()
            flight.result()
            now = time.perf_counter()
            times.append(now - max(launched, last))
            last = now
    while flights:
        flights.popleft()[1].result()
    return times[2:]


def _pages(runner: ModelRunner, case: Case) -> NDArray[np.int32]:
    """The pages of all rows [layer groups, rows, columns], numbered from 1 on; 0 behind the window of a group."""
    columns = -(-(case.context + case.length) // runner.page_size)
    seen = np.ones((len(runner.windows), case.rows, columns), np.int32)
    for group, window in enumerate(runner.windows):
        if window is not None:
            seen[group, :, : max(0, case.context - window + 1) // runner.page_size] = 0
    pages: NDArray[np.int32] = seen * seen.cumsum(dtype=np.int32).reshape(seen.shape)
    return pages


def _plan(runner: ModelRunner, case: Case, step: int, *, given_tokens: bool, new_rows: bool) -> StepPlan:
    """The same step again and again; `new_rows`: with the rows' parameters and pages, which the runner then keeps.

    `given_tokens`: rows that decode get tokens as if they were the ends of prompts. They are different ones, so that the rows go on with
    different tokens: equal rows would choose the same experts.
    """
    rows = np.arange(case.rows, dtype=np.int32)
    pages = _pages(runner, case) if new_rows else np.zeros((0, 0, 0), np.int32)
    groups, page_rows, columns = np.indices(pages.shape, np.int32).reshape(3, -1)
    decodes = case.length == 1 and not given_tokens
    empty = np.zeros(0, np.int32)
    vocab_size = runner.spec.vocab_size
    return StepPlan(
        step=step,
        rows=rows,
        num_decodes=case.rows if decodes else 0,
        starts=np.full(case.rows, case.context, np.int32),
        lengths=np.full(case.rows, case.length, np.int32),
        num_sampled=np.ones(case.rows, np.int32),
        token_ids=empty if decodes else np.random.default_rng(step).integers(vocab_size, size=case.rows * case.length, dtype=np.int32),
        new_rows=tuple(NewRow(row, GREEDY, prompt_len=case.context) for row in range(case.rows)) if new_rows else (),
        page_groups=groups,
        page_rows=page_rows,
        page_cols=columns,
        page_ids=pages.reshape(-1),
        adapters=1 + rows % case.adapters if case.adapters else empty,
    )
