"""What the engine costs beside the model, on a CPU: `python -m aengine.bench.overhead`.

Streams are read with `async for` while the time inside the call that runs all layers and the head is taken in the step thread. A decode
step's overhead is the time from one step's end to the next one's, less this call: scheduling, metadata, commit, the hand-over, and what
the event loop takes away from the step thread. Prints it per batch size.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aengine.bench.report import table, write_json
from aengine.bench.shapes import SHAPES, shape_folder
from aengine.config import EngineConfig
from aengine.engine.async_engine import AsyncEngine
from aengine.engine.loading import LoadedModel
from aengine.params import SamplingParams
from aengine.runner.base import InFlightStep
from aengine.scheduler.plan import StepPlan, StepResult

PROMPT_TOKENS = 128
WARM_UP_STEPS = 20


@dataclass(frozen=True, slots=True)
class Overhead:
    """Of decode steps; milliseconds, medians."""

    batch: int
    step: float  # from the end of a step to the end of the next
    model: float  # of it, in the executor
    overhead: float  # the rest


class _Timed:
    """Whatever `inner` does, with the time that calls take added to `spent`."""

    def __init__(self, inner: Any, spend: Callable[[float], None]) -> None:
        self._inner = inner
        self._spend = spend

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value
        if name == "prepare":  # it computes nothing; what it returns does
            return lambda *args, **options: self._timed(value(*args, **options), brings_hidden=True)
        return self._timed(value, brings_hidden=name == "forward")

    def _timed(self, function: Callable[..., Any], *, brings_hidden: bool) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **options)
            self._spend(time.perf_counter() - start)
            return _Timed(result, self._spend) if brings_hidden else result

        return call


@dataclass(frozen=True, slots=True)
class _TimedStep:
    engine: TimedEngine
    plan: StepPlan
    flight: InFlightStep

    def result(self) -> StepResult:
        result = self.flight.result()
        self.engine.ended(self.plan)
        return result


class TimedEngine(AsyncEngine):
    """`AsyncEngine` that notes, for every step, when it ended and how long the executor took."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.ends: list[tuple[int, float, float]] = []  # rows, end on perf_counter, seconds in the executor
        self._spent = 0.0

    def _load(self) -> LoadedModel:
        loaded = super()._load()
        runner: Any = loaded.runner
        runner._passes._executor = _Timed(runner._executor, self._spend)
        launch = runner.launch
        runner.launch = lambda plan: _TimedStep(self, plan, launch(plan))
        return loaded

    def ended(self, plan: StepPlan) -> None:
        """A step is over."""
        self.ends.append((plan.num_decodes if plan.num_decodes == len(plan.rows) else 0, time.perf_counter(), self._spent))
        self._spent = 0.0

    def _spend(self, seconds: float) -> None:
        self._spent += seconds


async def measure_overhead(config: EngineConfig, batch: int, num_tokens: int) -> Overhead:
    """With `batch` streams that generate `num_tokens` each."""
    engine = TimedEngine(config)
    async with engine:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

        async def read(index: int) -> None:
            prompt = [(3 + 7 * index + i) % engine.model_info.vocab_size for i in range(PROMPT_TOKENS)]
            async for _ in engine.stream(prompt, params):
                pass

        await asyncio.gather(*(read(index) for index in range(batch)))
        steps = engine.ends
    pairs = list(itertools.pairwise(steps))[WARM_UP_STEPS:]
    found = [(after[1] - before[1], after[2]) for before, after in pairs if before[0] == after[0] == batch]
    if not found:
        raise ValueError(f"no two decode steps of {batch} rows follow one another: generate more tokens")
    step, model, rest = (statistics.median(values) for values in zip(*((a, b, a - b) for a, b in found), strict=True))
    return Overhead(batch, 1e3 * step, 1e3 * model, 1e3 * rest)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m aengine.bench.overhead", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-60m", help="of the model, with random weights (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="(default: 1 8 32)")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    with shape_folder(options.shape) as folder:
        config = EngineConfig(model=str(folder), device="cpu", dtype=options.dtype, load_format="dummy")
        found = [asyncio.run(measure_overhead(config, batch, options.tokens)) for batch in options.batch]
    print(table(("batch", "step ms", "model ms", "overhead ms"), [(one.batch, one.step, one.model, one.overhead) for one in found]))
    if options.json is not None:
        write_json(options.json, ["python", "-m", "aengine.bench.overhead", *(sys.argv[1:] if arguments is None else arguments)], found)


if __name__ == "__main__":
    main()
