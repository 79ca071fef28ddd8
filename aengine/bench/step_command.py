"""The command `aengine-bench step`: its arguments, what it prints and the file that it writes."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from aengine.api.errors import AEngineError
from aengine.bench.options import add_engine_options, counts, engine_config
from aengine.bench.report import write_json

if TYPE_CHECKING:
    from aengine.bench.steps import ModelSteps

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
