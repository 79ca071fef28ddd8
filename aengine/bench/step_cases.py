"""Which kernels a step spends its time in: a few steps under torch's profiler. Knows nothing of floors.

On a CPU the operators of torch take the place of kernels, with what each spends itself; our own kernels for CPUs are not seen.

What a bare step computes: cases of `aengine-bench step`, and their plans for a runner.

Owns the text of a case, the pages that its rows have and the plan of a step. Knows nothing of how steps are timed."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from aengine.api.dataclass import dataclass
from aengine.bench.report import table
from aengine.runner.contract import InFlightStep
from aengine.runner.runner import ModelRunner
from aengine.runner.setup import GREEDY
from aengine.scheduler.plan import NewRow, StateRows, StepPlan

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
            torch.cuda.synchronize(runner.device.of_torch())
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


_ROWS = re.compile(r"(\d+)x(\d+)@(\d+)")
FORM = "ROWSxTOKENS@CONTEXT[+ROWSxTOKENS@CONTEXT...][,top_p=P]"


@dataclass(frozen=True, slots=True)
class CaseRows:
    """`rows` sequences, each of which computes `length` tokens behind `context` computed ones."""

    rows: int
    length: int
    context: int

    @property
    def name(self) -> str:
        return f"decode {self.rows} x {self.context}" if self.length == 1 else f"prefill {self.rows} x {self.length} @ {self.context}"


@dataclass(frozen=True, slots=True)
class Case:
    """A step of `rows` sequences as of `CaseRows`, with those `beside` it."""

    rows: int
    length: int
    context: int
    adapters: int = 0  # that the rows have, in turns
    beside: tuple[CaseRows, ...] = ()
    top_p: float = 1.0  # 1: the rows are greedy; below: drawn at temperature 1

    @classmethod
    def parse(cls, text: str) -> Case:
        """Reads a case from a text in the form of `FORM`. Raises ValueError for any other text."""
        groups, _, option = text.partition(",")
        matches = [_ROWS.fullmatch(group) for group in groups.split("+")]
        name, _, value = option.partition("=")
        if option and name != "top_p":
            raise ValueError(f"{text!r}: {name!r} is not top_p")
        first, *others = [CaseRows(*map(int, match.groups())) if match else None for match in matches]
        if first is None or None in others:
            raise ValueError(f"{text!r} is not {FORM}")
        case = cls(
            first.rows, first.length, first.context, beside=tuple(one for one in others if one), top_p=float(value) if option else 1.0
        )
        if not all(one.rows and one.length for one in case.groups) or not 0 < case.top_p <= 1:
            raise ValueError(f"{text!r}: rows and tokens are at least 1, and top_p is in (0, 1]")
        return case

    @property
    def groups(self) -> Sequence[CaseRows]:
        """Rows that decode come first, as in a step."""
        return sorted((CaseRows(self.rows, self.length, self.context), *self.beside), key=lambda group: group.length > 1)

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.repeat([group.length for group in self.groups], [group.rows for group in self.groups]).astype(np.int32)

    @property
    def contexts(self) -> NDArray[np.int32]:
        return np.repeat([group.context for group in self.groups], [group.rows for group in self.groups]).astype(np.int32)

    @property
    def num_rows(self) -> int:
        return sum(group.rows for group in self.groups)

    @property
    def num_tokens(self) -> int:
        return sum(group.rows * group.length for group in self.groups)

    @property
    def name(self) -> str:
        name = " + ".join(group.name for group in self.groups)
        name += f", top_p {self.top_p:g}" if self.top_p < 1 else ""
        return f"{name}, {self.adapters} adapters" if self.adapters else name


def why_not(runner: ModelRunner, case: Case) -> str | None:
    """Why a case cannot be measured with this runner, in a few words; None: it can."""
    if case.num_rows > runner.max_num_seqs:
        return f"max_num_seqs is {runner.max_num_seqs}"
    if case.adapters and case.adapters > runner.max_adapters:
        return f"max_adapters is {runner.max_adapters}"
    if case.num_tokens > runner.max_num_batched_tokens:
        return f"max_num_batched_tokens is {runner.max_num_batched_tokens}"
    if (case.contexts + case.lengths).max() >= runner.max_model_len:
        return f"max_model_len is {runner.max_model_len}"
    pages = int(case_pages(runner, case).max()) + case.num_rows * runner.state_pages
    if pages > runner.num_pages - 1:
        return f"it needs {pages} KV pages of {runner.page_size} tokens, and there are {runner.num_pages - 1}"
    return None


def case_pages(runner: ModelRunner, case: Case) -> NDArray[np.int32]:
    """The pages of all rows [layer groups, rows, columns], numbered from 1 on; 0 behind the window of a group and behind the row's end."""
    counts = -(-(case.contexts + case.lengths) // runner.page_size)
    columns = np.arange(counts.max())
    firsts = [[0 if window is None else max(0, context - window + 1) // runner.page_size for context in case.contexts.tolist()]
              for window in runner.windows]  # fmt: skip
    seen = (columns >= np.array(firsts)[:, :, None]) & (columns < counts[None, :, None])
    pages: NDArray[np.int32] = seen * seen.cumsum(dtype=np.int32).reshape(seen.shape)
    return pages


def step_plan(runner: ModelRunner, case: Case, step: int, *, given_tokens: bool, new_rows: bool) -> StepPlan:
    """A plan of the case's step, which can be run again and again. `new_rows`: with the rows' parameters and pages, which the runner then
    keeps.

    `given_tokens`: rows that decode get tokens as if they were the ends of prompts. They are different ones, so that the rows go on with
    different tokens: equal rows would choose the same experts."""
    rows, lengths = np.arange(case.num_rows, dtype=np.int32), case.lengths
    pages = case_pages(runner, case) if new_rows else np.zeros((0, 0, 0), np.int32)
    groups, page_rows, columns = np.indices(pages.shape, np.int32).reshape(3, -1)
    num_decodes = 0 if given_tokens else int((lengths == 1).sum())
    params = GREEDY if case.top_p == 1 else replace(GREEDY, temperature=1.0, top_p=case.top_p)
    added = zip(rows.tolist(), case.contexts.tolist(), strict=True)
    return StepPlan(
        step=step,
        rows=rows,
        num_decodes=num_decodes,
        starts=case.contexts,
        lengths=lengths,
        num_sampled=np.ones_like(rows),
        token_ids=np.random.default_rng(step).integers(runner.spec.vocab_size, size=lengths[num_decodes:].sum(), dtype=np.int32),
        new_rows=tuple(NewRow(row, replace(params, seed=row), prompt_len=context) for row, context in added) if new_rows else (),
        page_groups=groups,
        page_rows=page_rows,
        page_cols=columns,
        page_ids=pages.reshape(-1),
        states=_states(runner, case) if runner.state_pages else None,
        adapters=1 + rows % case.adapters if case.adapters else np.zeros(0, np.int32),
    )


def _states(runner: ModelRunner, case: Case) -> StateRows:
    """The rows' recurrent states, in the last pages; as if the rows began, since the same tokens come again."""
    rows, nothing = np.arange(case.num_rows, dtype=np.int32), np.zeros(0, np.int32)
    pages = np.arange(runner.num_pages - case.num_rows * runner.state_pages, runner.num_pages, dtype=np.int32).reshape(case.num_rows, -1)
    return StateRows(rows, pages, pages, nothing, nothing, pages[:0])


def fill_pages(runner: ModelRunner, numbers: Iterator[int]) -> None:
    """Computes a prompt, as long as a step can be, and copies its keys and values to all pages: a GPU reads zeros at less power, so faster.
    `numbers` count the steps of the runner."""
    last = runner.num_pages - 1
    room = (last - runner.state_pages) // len(runner.windows) * runner.page_size
    length = min(runner.max_num_batched_tokens, runner.max_model_len - 1, room)
    prompt = Case(1, length, 0)
    runner.launch(step_plan(runner, prompt, next(numbers), given_tokens=True, new_rows=True)).result()
    computed = filled = int(case_pages(runner, prompt).max())
    one = Case(1, 1, 0)
    while filled < last:
        count = min(computed, last - filled)
        plan = step_plan(runner, one, next(numbers), given_tokens=True, new_rows=True)
        copies = np.arange(1, count + 1, dtype=np.int32)
        runner.launch(replace(plan, copy_from=copies, copy_to=copies + filled)).result()
        filled += count
