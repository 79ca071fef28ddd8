"""Bare steps against the floor: `aengine-bench step`. The runner alone, without scheduler, streams or text.

A decode step's context is made up: what the pages hold does not change how long it takes to read them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from aengine.bench.floor import Machine, MachineProbe, step_work
from aengine.bench.step_cases import Case
from aengine.runner.base import InFlightStep
from aengine.runner.model_runner import ModelRunner
from aengine.scheduler.plan import NewRow, RowParams, StepPlan

ROUNDS = 5
"""Of a case, with the machine measured in between."""
GREEDY = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


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
    fraction: float  # the floor of the machine right before and after a round, over that round's median; the median of rounds


def why_not(runner: ModelRunner, case: Case) -> str | None:
    """Why a case cannot be measured with this runner, in a few words; None: it can."""
    rows, tokens, length = case.rows, case.rows * case.length, case.context + case.length
    pages = rows * _pages_per_row(runner, case)
    if rows > runner.max_num_seqs:
        return f"max_num_seqs is {runner.max_num_seqs}"
    if tokens > runner.max_num_batched_tokens:
        return f"max_num_batched_tokens is {runner.max_num_batched_tokens}"
    if length >= runner.max_model_len:
        return f"max_model_len is {runner.max_model_len}"
    if pages > runner.num_pages - 1:
        return f"it needs {pages} KV pages of {runner.page_size} tokens, and there are {runner.num_pages - 1}"
    return None


def measure_steps(
    runner: ModelRunner, cases: Sequence[Case], seconds: float = 2.0, kv_item_bytes: int | None = None
) -> Iterator[tuple[StepFigures, Machine]]:
    """Runs each case for about so long, in rounds with the machine measured anew between them, since shared machines drift.

    `kv_item_bytes`: of a number in the KV cache; None: as of the weights.
    """
    probe = MachineProbe(runner.device, runner.dtype)
    numbers = itertools.count()
    for case in cases:
        lengths, contexts = [case.length] * case.rows, [case.context] * case.rows
        work = step_work(runner.spec, lengths, contexts, case.rows, runner.dtype.itemsize, kv_item_bytes)
        machines = [probe.measure()]
        rounds: list[Sequence[float]] = []
        for number in range(ROUNDS):
            rounds.append(_time_steps(runner, case, seconds / ROUNDS, numbers, take_over=number == 0))
            machines.append(probe.measure())
        machine = Machine(
            statistics.median(one.bytes_per_second for one in machines), statistics.median(one.flops_per_second for one in machines)
        )
        times = [taken for one in rounds for taken in one]
        median = statistics.median(times)
        yield (
            StepFigures(
                case=case,
                milliseconds=1e3 * median,
                best_milliseconds=1e3 * min(times),
                tokens_per_second=case.rows * case.length / median,
                weight_bytes=work.weight_bytes,
                kv_bytes=work.kv_bytes,
                flops=work.flops,
                floor_milliseconds=1e3 * work.seconds(machine),
                fraction=statistics.median(
                    (work.seconds(before) + work.seconds(after)) / 2 / statistics.median(one)
                    for before, after, one in zip(machines, machines[1:], rounds, strict=False)
                ),
            ),
            machine,
        )


def _time_steps(runner: ModelRunner, case: Case, seconds: float, numbers: Iterator[int], *, take_over: bool) -> Sequence[float]:
    """Seconds of each of some steps, at least one, without the first, which finds caches cold."""
    times: list[float] = []
    flights: deque[tuple[float, InFlightStep]] = deque()
    last = time.perf_counter()
    end = last + seconds
    while len(times) < 2 or time.perf_counter() < end:
        flights.append((time.perf_counter(), runner.launch(_plan(runner, case, next(numbers), first=take_over))))
        take_over = False
        if len(flights) > flights[-1][1].overlaps:  # one step ahead where possible, as the engine does it
            launched, flight = flights.popleft()
            flight.result()
            now = time.perf_counter()
            times.append(now - max(launched, last))
            last = now
    while flights:
        flights.popleft()[1].result()
    return times[1:]


def _pages_per_row(runner: ModelRunner, case: Case) -> int:
    return -(-(case.context + case.length) // runner.page_size)


def _plan(runner: ModelRunner, case: Case, step: int, *, first: bool) -> StepPlan:
    """The same step again and again; `first` takes over the rows."""
    rows = np.arange(case.rows, dtype=np.int32)
    pages = _pages_per_row(runner, case)
    decode = case.length == 1
    empty = np.zeros(0, np.int32)
    return StepPlan(
        step=step,
        rows=rows,
        num_decodes=case.rows if decode else 0,
        starts=np.full(case.rows, case.context, np.int32),
        lengths=np.full(case.rows, case.length, np.int32),
        samples=np.ones(case.rows, np.bool_),
        token_ids=empty if decode else np.arange(case.rows * case.length, dtype=np.int32) % runner.spec.vocab_size,
        new_rows=tuple(NewRow(row, GREEDY, prompt_len=case.context) for row in range(case.rows)) if first else (),
        page_rows=np.repeat(rows, pages) if first else empty,
        page_cols=np.tile(np.arange(pages, dtype=np.int32), case.rows) if first else empty,
        page_ids=np.arange(1, 1 + case.rows * pages, dtype=np.int32) if first else empty,
    )
