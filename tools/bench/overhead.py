"""What the engine costs beside the model, on a CPU: `python -m tools.bench.overhead`.

Streams are read with `async for`, and the time from one decode step's end to the next one's is taken. Then the bare call of the kernels,
all layers and the head, runs again and again with nothing beside it. The difference is the overhead: scheduling, metadata, commit and the
hand-over, as far as the kernels do not run meanwhile, and the cores that all this and the event loop take from them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.api.config import EngineConfig
from aengine.api.params import SamplingParams
from aengine.api.runtime import switch_often
from aengine.attention import StepLayout
from aengine.bench.report import table, write_json
from aengine.bench.shapes import SHAPES, shape_folder
from aengine.engine.async_engine import AsyncEngine
from aengine.engine.core import EngineCore
from aengine.engine.loading import LoadedModel
from aengine.kernels.cpu.library import Workspace
from aengine.kernels.cpu.ops import KvPool
from aengine.models.cpu.stack import PreparedStep
from aengine.runner.cpu.executor import CpuExecutor

PROMPT_TOKENS = 128
WARM_UP_STEPS = 20
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Overhead:
    """Of decode steps; milliseconds, medians."""

    batch: int
    step: float  # from the end of a step to the end of the next
    kernels: float  # their bare call
    overhead: float  # the difference


class TimedEngine(AsyncEngine):
    """`AsyncEngine` that notes how long every step was, and keeps the latest calls of the kernels."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.steps: list[tuple[int, float]] = []  # tokens of each, and seconds from the end of the one before
        self.latest: dict[int, PreparedStep] = {}  # by their number of tokens
        self._threads = 1

    def _load(self, core: EngineCore) -> LoadedModel:
        loaded = super()._load(core)
        runner: Any = loaded.runner
        executor = runner._executor
        if not isinstance(executor, CpuExecutor):
            raise SystemExit("there are no CPU kernels here to compare with")
        stack: Any = executor._model._stack
        prepare = stack.prepare

        def kept(workspace: Workspace, pool: KvPool, layout: StepLayout, token_ids: NDArray[np.int32], *args: Any, **options: Any) -> Any:
            step = self.latest[len(token_ids)] = prepare(workspace, pool, layout, token_ids, *args, **options)
            self._threads = workspace.threads
            return step

        stack.prepare = kept
        stats: Any = core.steps.stats
        stats.add_step = lambda seconds, num_tokens, num_prefill: self.steps.append((num_tokens, seconds))
        return loaded

    def call_again(self, num_tokens: int, times: int) -> list[float]:
        """Seconds of the kernels alone, for the latest step of so many tokens again and again. Nothing may run meanwhile."""
        step = self.latest[num_tokens]
        ends = [time.perf_counter()]
        for _ in range(times):
            if self._threads > 1:
                step.begin()
            step.run()
            ends.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(ends)]


async def measure_overhead(config: EngineConfig, batch: int, num_tokens: int) -> Overhead:
    """With `batch` streams that generate `num_tokens` each."""
    steps: list[float] = []
    kernels: list[float] = []
    engine = TimedEngine(config)
    async with engine:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

        async def read(index: int) -> None:
            prompt = [(3 + 7 * index + i) % engine.model_info.vocab_size for i in range(PROMPT_TOKENS)]
            async for _ in engine.stream(prompt, params):
                pass

        for _ in range(ROUNDS):  # in turns: the machine's memory drifts
            engine.steps.clear()
            await asyncio.gather(*(read(index) for index in range(batch)))
            pairs = list(itertools.pairwise(engine.steps))[WARM_UP_STEPS:]
            steps += [after[1] for before, after in pairs if before[0] == after[0] == batch]
            kernels += engine.call_again(batch, num_tokens)[WARM_UP_STEPS:]
    if not steps:
        raise ValueError(f"no two decode steps of {batch} rows follow one another: generate more tokens")
    step, bare = statistics.median(steps), statistics.median(kernels)
    return Overhead(batch, 1e3 * step, 1e3 * bare, 1e3 * (step - bare))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.overhead", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-60m", help="of the model, with random weights (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="(default: 1 8 32)")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream, in each of 5 rounds (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    switch_often()  # as aengine-grpc does
    with shape_folder(options.shape) as folder:
        config = EngineConfig(model=str(folder), device="cpu", dtype=options.dtype, load_format="dummy")
        found = [asyncio.run(measure_overhead(config, batch, options.tokens)) for batch in options.batch]
    print(table(("batch", "step ms", "kernels ms", "overhead ms"), [(one.batch, one.step, one.kernels, one.overhead) for one in found]))
    if options.json is not None:
        write_json(options.json, ["python", "-m", "tools.bench.overhead", *(sys.argv[1:] if arguments is None else arguments)], found)


if __name__ == "__main__":
    main()
