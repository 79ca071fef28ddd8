"""Bare steps of a model against the floor: `aengine-bench step`. The runner alone, without scheduler, streams or text.

The KV of a decode step's context is arbitrary. So are the numbers of its adapters, which are random ones in the files that PEFT writes.

The command `aengine-bench step`: its arguments, what it prints and the file that it writes."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import pathlib
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from typing import Any

import torch
from safetensors.torch import save_file

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import AEngineError, ConfigError
from aengine.bench.floor import Machine, MachineProbe, step_work
from aengine.bench.load_options import add_engine_options, counts, engine_config
from aengine.bench.probes import start_up_log
from aengine.bench.report import table, write_json
from aengine.bench.step_cases import Case, KernelTimes, fill_pages, kernel_times, step_plan, why_not
from aengine.kernels.arrays import torch_dtype
from aengine.models.loading.hub import resolve_model
from aengine.models.named_weights import named_weights
from aengine.models.spec import ModelSpec
from aengine.runner.contract import InFlightStep, LoadAdapter
from aengine.runner.memory import quantized_bytes, weight_bytes
from aengine.runner.runner import ModelRunner

_MODULES = ("qkv", "output", "gate_up", "up", "down", "q", "q_down", "q_up", "kv_down")  # all linear ones of a layer that is no mixture


def write_adapter(folder: pathlib.Path, spec: ModelSpec, low_rank: int, dtype: torch.dtype, seed: int) -> pathlib.Path:
    """Writes one of all linear modules of the layers into a new `folder`, which it returns."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in named_weights(spec).items():
        stem, _, kind = name.rpartition(".")
        if not stem.startswith("layers.") or kind != "weight" or stem.split(".", 2)[2] not in _MODULES:
            continue
        for part in weight.parts:
            module, (rows, columns) = part.source.removesuffix(".weight"), part.matrix_shape
            for letter, shape in (("A", (low_rank, columns)), ("B", (rows, low_rank))):
                tensor = torch.randn(shape, generator=generator).mul_(0.02).to(dtype)
                tensors[f"base_model.model.{module}.lora_{letter}.weight"] = tensor
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": low_rank, "lora_alpha": low_rank, "bias": "none", "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


_log = logging.getLogger("aengine")
ROUNDS = 5
"""Of a case, with the machine measured in between, since shared machines drift."""
HEADER = ("step", "ms", "best ms", "tok/s", "MB moved", "GFLOP", "floor ms", "of floor", "GB/s", "TFLOP/s")


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
        """The cells of one row of the table with `HEADER`."""
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
    """What was measured of the steps of one model, and what was left out or failed."""

    model: str
    device: str
    dtype: str
    config: Mapping[str, Any]  # fields of EngineConfig
    start_up: Sequence[str]  # what the runner logged: attention backend, graphs, memory
    steps: list[MeasuredStep] = field(default_factory=list)
    kernels: list[KernelTimes] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    failed: list[LeftOut] = field(default_factory=list)

    def show(self) -> str:
        lines = [f"{self.model}: {self.dtype} on {self.device}", *(f"  {line}" for line in self.start_up)]
        if self.steps:
            lines.append(table(HEADER, [step.cells for step in self.steps]))
        figures = [step.figures for step in self.steps]
        if ratios := [f"{one.with_adapters:.3f} in {one.case.name}" for one in figures if one.with_adapters is not None]:
            lines.append(f"time with adapters over time without: {', '.join(ratios)}")
        if shares := [f"{100 * one.exchange:.1f} % of {one.case.name}" for one in figures if one.exchange]:
            lines.append(f"exchange between ranks: {', '.join(shares)}")
        lines += [times.show() for times in self.kernels]
        lines += [f"not measured: {entry.case}: {entry.reason}" for entry in self.left_out]
        lines += [f"FAILED: {entry.case}: {entry.reason}" for entry in self.failed]
        return "\n".join(lines)


def measure_model(
    name: str,
    config: EngineConfig,
    cases: Sequence[Case],
    seconds: float,
    adapter_rank: int = 16,
    profiled: Sequence[Case] = (),
    on_progress: Callable[[ModelSteps], object] = lambda steps: None,
) -> ModelSteps:
    """Repeats each case for about `seconds`; adapters are random ones of that low rank. Then shows the kernels of those `profiled`.
    `on_progress` is called with what there is after each. Raises what building a runner raises; a case that fails is left out.

    Where max_num_batched_tokens is left open, it is raised to the largest step, so that each prompt is one step.
    """
    if config.max_num_batched_tokens is None:
        config = EngineConfig.of(config, max_num_batched_tokens=max([config.num_seqs, *(case.num_tokens for case in (*cases, *profiled))]))
    model_dir = resolve_model(config.model, config.revision, config.load_format)
    with start_up_log() as log:
        runner = ModelRunner(config, model_dir)
    try:
        weights = None
        if isinstance(runner.spec, ModelSpec) and (runner.executor_name == "cpu" or runner.device.type == "cuda"):
            weights = weight_bytes(config, runner.spec, runner.dtype.itemsize, quantized_bytes(config, runner.spec, model_dir))
        found = ModelSteps(
            model=name,
            device=str(runner.device),
            dtype=runner.dtype.name,
            config={**asdict(config), "model": name},
            start_up=log,
        )
        reasons = {case: why_not(runner, case) for case in (*cases, *profiled)}
        adapter_bytes = _load_adapters(runner, max((case.adapters for case in cases if reasons[case] is None), default=0), adapter_rank)
        bench = StepBench(runner, seconds, config.kv_cache_dtype, weights, adapter_bytes)

        def measure(case: Case) -> None:
            found.steps.append(bench.measure(case))

        def profile(case: Case) -> None:
            found.kernels.append(bench.profile(case))

        for case, action in [*((case, measure) for case in cases), *((case, profile) for case in profiled)]:
            if (reason := reasons[case]) is not None:
                found.left_out.append(LeftOut(case.name, reason))
            else:
                try:
                    action(case)
                except Exception as error:  # the other cases are measured all the same
                    _log.warning("%s failed", case.name, exc_info=True)
                    found.failed.append(LeftOut(case.name, f"{type(error).__name__}: {error}"))
            on_progress(found)
        return found
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
            path = write_adapter(pathlib.Path(folder, "adapter"), runner.spec, low_rank, torch_dtype(runner.dtype), key)
            prepared = runner.prepare(LoadAdapter(key, f"adapter-{key}", str(path)))
        runner.apply(prepared)
        assert prepared.adapter is not None
        size = prepared.adapter.num_bytes
    return size


class StepBench:
    """Measures steps of one runner. `kv_cache_dtype` and `weights` are as in `step_work`; `adapter_bytes` are those of one adapter."""

    def __init__(
        self,
        runner: ModelRunner,
        seconds: float = 2.0,
        kv_cache_dtype: str = "auto",
        weights: Mapping[str, int] | None = None,
        adapter_bytes: int = 0,
    ) -> None:
        if not isinstance(runner.spec, ModelSpec):
            raise ConfigError.of("model_impl", "the least work of a step is known of native models only")
        self._runner, self._spec, self._seconds = runner, runner.spec, seconds
        self._kv_cache_dtype, self._weights, self._adapter_bytes = kv_cache_dtype, weights, adapter_bytes
        self._probe = MachineProbe(runner.device.of_torch(), torch_dtype(runner.dtype))
        self._numbers = itertools.count()
        if runner.device.type == "cuda":
            fill_pages(runner, self._numbers)

    def measure(self, case: Case) -> MeasuredStep:
        """Repeats a case for about `seconds`, in rounds."""
        runner, probe, numbers, seconds = self._runner, self._probe, self._numbers, self._seconds / ROUNDS
        sizes = case.lengths.tolist(), case.contexts.tolist(), case.num_rows, runner.dtype.itemsize
        work = step_work(self._spec, *sizes, self._kv_cache_dtype, self._weights)
        work = replace(work, weight_bytes=work.weight_bytes + case.adapters * self._adapter_bytes)
        machines = [probe.measure()]
        rounds: list[Sequence[float]] = []
        plain_medians = []
        exchanged, ran = 0.0, 0.0
        for number in range(ROUNDS):
            if case.adapters:
                without = replace(case, adapters=0)
                plain_medians.append(statistics.median(_time_steps(runner, without, seconds, numbers, new_rows=number == 0)))
            before, began = runner.exchange_seconds, time.perf_counter()
            rounds.append(_time_steps(runner, case, seconds, numbers, new_rows=number == 0 and not case.adapters))
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
            tokens_per_second=case.num_tokens / median,
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
        return MeasuredStep(figures, machine)

    def profile(self, case: Case) -> KernelTimes:
        return kernel_times(self._runner, case, self._spec.num_layers, self._numbers)


def _time_steps(runner: ModelRunner, case: Case, seconds: float, numbers: Iterator[int], *, new_rows: bool) -> Sequence[float]:
    """Seconds of each of some steps, at least one, without the first two: one makes the rows differ, the next finds caches cold."""
    times: list[float] = []
    flights: deque[tuple[float, InFlightStep]] = deque()
    last = time.perf_counter()
    end = last + seconds
    first = True
    while len(times) < 3 or time.perf_counter() < end:
        plan = step_plan(runner, case, next(numbers), given_tokens=first, new_rows=first and new_rows)
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


# By the type of the device: batch sizes of decode steps, and prompt lengths of prefill steps.
DECODES = {"cpu": (1, 8, 32), "cuda": (1, 8, 32, 64, 128, 256)}
PREFILLS = {"cpu": (1024,), "cuda": (1024, 4096, 8192)}


def add_step_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Without --json, which all commands have."""
    step = commands.add_parser("step", help="bare decode and prefill steps against the floor measured on the spot")
    for name, what, defaults in (
        ("decode", "batch sizes of decode steps", DECODES),
        ("prefill", "prompt lengths of prefill steps", PREFILLS),
    ):
        on_cpu, on_cuda = (",".join(map(str, defaults[device])) for device in ("cpu", "cuda"))
        step.add_argument(f"--{name}", type=counts, metavar="N,N", help=f"{what} (default: {on_cpu}; on CUDA {on_cuda})")
    step.add_argument("--context", type=int, default=1024, metavar="N", help="computed tokens of each row of a decode step (default: 1024)")
    more = "one more step, as often as it is given; top_p < 1 draws where other steps are greedy"
    step.add_argument("--case", action="append", default=[], metavar="ROWSxTOKENS@CONTEXT[+...][,top_p=P]", help=more)
    shown = "batch sizes of decode steps of which the time of each kernel is shown, after all others (default: none)"
    step.add_argument("--kernels", type=counts, default=(), metavar="N,N", help=shown)
    step.add_argument("--seconds", type=float, default=2.0, help="how long each step is repeated (default: 2)")
    step.add_argument(
        "--random-adapters", type=int, default=0, metavar="N", help="so many different ones, at most one for each row, beside none"
    )
    step.add_argument("--adapter-rank", type=int, default=16, metavar="R", help="the low rank of random adapters (default: 16)")
    step.set_defaults(run=_step)
    add_engine_options(step, several_shapes=True)
    return step


def _step(options: argparse.Namespace, command: list[str]) -> int:
    from aengine.bench import steps
    from aengine.bench.step_cases import Case
    from aengine.runner.torch.device import find_device

    shapes: list[str | None] = options.shape or [None]
    given = [Case.parse(text) for text in options.case]
    profiled = [Case(rows, 1, options.context) for rows in options.kernels]
    results: list[object] = []
    failures = 0

    def write(*latest: ModelSteps) -> None:
        """After each step, so that what was measured is kept whatever comes next."""
        if options.json:
            write_json(options.json, command, [*results, *latest])

    for shape in shapes:
        with engine_config(options, shape) as (name, config):
            try:
                device = find_device(config.device).type
                decodes = DECODES[device] if options.decode is None else options.decode
                prefills = PREFILLS[device] if options.prefill is None else options.prefill
                cases = [*(Case(rows, 1, options.context) for rows in decodes), *(Case(1, length, 0) for length in prefills), *given]
                cases = [replace(case, adapters=min(options.random_adapters, case.num_rows)) for case in cases]
                measured = steps.measure_model(name, config, cases, options.seconds, options.adapter_rank, profiled, write)
            except (AEngineError, RuntimeError) as error:
                if len(shapes) == 1:
                    raise
                failures += 1  # the other shapes are measured all the same
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                results.append({"model": name, "error": str(error)})
            else:
                failures += bool(measured.failed or not measured.steps)
                print(measured.show(), flush=True)
                results.append(measured)
        write()
    return 1 if failures else 0
