"""Steps of a CPU that are planned while the one before is computed."""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
from driver import GREEDY, Driver, Sequence_, sampled
from reference import save_tiny
from test_greedy import make_runner

from aengine.runner.contract import InFlightStep
from aengine.runner.cpu.executor import CpuStep, HostQueue
from aengine.runner.runner import ModelRunner
from aengine.scheduler.plan import StepResult


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("qwen3", path)
    return path


class Call:
    """Stands in for a `PreparedStep`; what happens is noted as a verb and a number."""

    def __init__(self, events: list[str], number: int) -> None:
        self.events = events
        self.number = number
        self.has_begun = False

    def begin(self) -> None:
        self.has_begun = True
        self.events.append(f"begin {self.number}")

    def run(self, following: Call | None, hold: ctypes.c_int32) -> None:
        self.events.append(f"compute {self.number}")
        self.has_begun = False
        if following is not None and not hold.value:
            following.begin()


def added(queue: HostQueue, events: list[str], number: int, *, can_run_ahead: bool = True) -> CpuStep:
    call: Any = Call(events, number)
    return queue.add_step(call, lambda: StepResult(number, np.zeros(0, np.int32)), can_run_ahead=can_run_ahead, overlaps=can_run_ahead)


class TestOrder:
    @pytest.mark.parametrize("held", [False, True])
    def test_each_begins_when_the_one_before_finishes_unless_it_is_held(self, held: bool) -> None:
        events: list[str] = []
        queue = HostQueue()
        first, second = (added(queue, events, number) for number in (1, 2))
        assert events == ["begin 1"]
        queue.hold.value = held
        first.wait()
        first.wait()
        assert events == ["begin 1", "compute 1", *(() if held else ("begin 2",))]
        assert first.result().step == 1
        assert events == ["begin 1", "compute 1", "begin 2"]
        assert not second.withdraw()
        assert second.result().step == second.result().step == 2
        assert events == ["begin 1", "compute 1", "begin 2", "compute 2"]
        assert not second.withdraw()

    def test_what_is_held_can_be_withdrawn(self) -> None:
        events: list[str] = []
        queue = HostQueue()
        first, second, third = (added(queue, events, number) for number in range(3))
        first.wait()
        assert not second.withdraw()
        queue.hold.value = True
        second.wait()
        assert third.withdraw()
        assert second.result().step == 1
        assert events == ["begin 0", "compute 0", "begin 1", "compute 1"]

    def test_a_late_one_needs_those_before(self) -> None:
        events: list[str] = []
        queue = HostQueue()
        steps = [added(queue, events, number) for number in range(3)]
        assert steps[2].result().step == 2
        assert events == ["begin 0", "compute 0", "begin 1", "compute 1", "begin 2", "compute 2"]
        assert [step.result().step for step in steps] == [0, 1, 2]

    def test_steps_that_take_the_threads_of_torch_do_not_begin(self) -> None:
        events: list[str] = []
        queue = HostQueue()
        first, second = (added(queue, events, number, can_run_ahead=False) for number in range(2))
        first.wait()
        assert events == ["compute 0"]
        assert first.result().step == 0
        assert not second.withdraw(), "it is the first, and rows are as it needs them"
        assert second.result().step == 1
        assert events == ["compute 0", "compute 1"]

    def test_the_latest_can_be_withdrawn_until_it_begins(self) -> None:
        events: list[str] = []
        queue = HostQueue()
        queue.hold.value = True
        first, second = (added(queue, events, number) for number in (1, 2))
        first.wait()
        assert second.withdraw()
        assert not first.withdraw()
        assert first.result().step == 1
        third = added(queue, events, 3)
        assert not third.withdraw()
        assert events == ["begin 1", "compute 1", "begin 3"]

    def test_what_has_begun_is_finished_in_the_end(self) -> None:
        events: list[str] = []
        queue = HostQueue()
        for number in range(2):
            added(queue, events, number)
        queue.close()
        queue.close()
        assert events == ["begin 0", "compute 0"]


def launch_decode(driver: Driver, sequences: list[Sequence_]) -> InFlightStep:
    runner = driver.runner
    flight = runner.launch(driver._plan([(one, 1) for one in sequences], len(sequences)))
    for one in sequences:
        one.computed += 1
    return flight


def started(runner: ModelRunner, prompts: list[list[int]], **options: Any) -> tuple[Driver, list[Sequence_]]:
    """Sequences that decode from now on."""
    driver = Driver(runner)
    sequences = [driver.add(prompt, dataclasses.replace(GREEDY, **options)) for prompt in prompts]
    driver.run_step(sequences)
    return driver, sequences


PROMPTS = [list(range(20)), list(range(30, 35)), [7]]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tokens_are_those_of_one_after_the_other(tiny: pathlib.Path, dtype: str, held: bool) -> None:
    """Every third step is withdrawn before it begins, and launched again; pages are crossed. Others begin by themselves, unless `held`."""
    expected = Driver(make_runner(tiny, dtype=dtype, threads=1)).generate(PROMPTS, 40)
    runner = make_runner(tiny, dtype=dtype, threads=2)
    driver, sequences = started(runner, PROMPTS)
    flight = launch_decode(driver, sequences)
    assert flight.overlaps
    for step in range(38):
        following = launch_decode(driver, sequences)
        withdrawn = step % 3 == 0
        runner.hold(held or withdrawn)
        flight.wait()
        assert (runner._executor._model.workspace.running is None) is (held or withdrawn)
        if withdrawn:
            assert following.withdraw()
            for one in sequences:
                one.computed -= 1
            following = None
        for one, token in zip(sequences, flight.result().tokens.tolist(), strict=True):
            one.output.append(token)
        flight = following or launch_decode(driver, sequences)
    for one, token in zip(sequences, flight.result().tokens.tolist(), strict=True):
        one.output.append(token)
    assert [one.output for one in sequences] == expected


def test_who_comes_in_waits_for_what_is_under_way(tiny: pathlib.Path) -> None:
    """A plan with a new row is launched while two steps are in flight: the row is assigned when these have finished."""
    alone = [Driver(make_runner(tiny, threads=1)).generate([prompt], 6)[0] for prompt in PROMPTS]
    driver, (first, second) = started(make_runner(tiny, threads=2), PROMPTS[:2])
    flights = [launch_decode(driver, [first, second]) for _ in range(2)]
    third = driver.add(PROMPTS[2])
    mixed = driver.runner.launch(driver._plan([(first, 1), (second, 1), (third, 1)], 2))
    assert not mixed.overlaps
    assert not mixed.withdraw(), "it has begun, with the rows as they are now"
    tokens = [flight.result().tokens.tolist() for flight in (*flights, mixed)]
    assert [step[0] for step in tokens] == alone[0][1:4]
    assert [step[1] for step in tokens] == alone[1][1:4]
    assert tokens[2][2] == alone[2][0]


def test_what_overlaps(tiny: pathlib.Path) -> None:
    """Decodes on more than one thread that choose their tokens: torch, which does all else, has threads that would be in the way."""
    with_logprobs = dataclasses.replace(GREEDY, logprobs=1)
    for threads, params, expected in ((2, GREEDY, True), (1, GREEDY, False), (2, sampled(1), True), (2, with_logprobs, False)):
        runner = make_runner(tiny, threads=threads)
        driver = Driver(runner)
        one = driver.add(PROMPTS[0], params)
        prefill = runner.launch(driver._plan([(one, 20)], 0))
        assert not prefill.overlaps
        one.computed, one.decodes = 20, True
        one.output += prefill.result().tokens.tolist()
        assert launch_decode(driver, [one]).overlaps is expected
        runner.close()


def test_a_runner_that_is_closed_in_the_middle(tiny: pathlib.Path) -> None:
    for _ in range(5):
        runner = make_runner(tiny, threads=2)
        driver, sequences = started(runner, PROMPTS)
        workspace = runner._executor._model.workspace
        launch_decode(driver, sequences)
        launch_decode(driver, sequences)
        assert workspace.running is not None
        runner.close()
        assert workspace.running is None


def test_results_do_not_change_later(tiny: pathlib.Path) -> None:
    driver, sequences = started(make_runner(tiny, threads=2), PROMPTS)
    first = launch_decode(driver, sequences)
    second = launch_decode(driver, sequences)
    tokens = first.result().tokens
    kept = tokens.copy()
    second.result()
    assert np.array_equal(tokens, kept)
    assert np.array_equal(first.result().tokens, kept)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_tokens_beside_whoever(tiny: pathlib.Path, threads: int) -> None:
    """Rows that only draw do so in the call of the kernels, and elsewhere when a neighbour wants more of the logits."""
    drawing = [sampled(1), sampled(2, 0.7, top_p=0.8), sampled(3, 1.3, top_k=20, min_p=0.01), GREEDY]
    wanting = dataclasses.replace(GREEDY, logprobs=2)
    runner = make_runner(tiny, threads=threads)
    prompts = [list(range(at, at + 9)) for at in range(4)]
    alone = Driver(runner).generate(prompts, 30, drawing)
    beside = Driver(make_runner(tiny, threads=threads)).generate([*prompts, [3, 4]], 30, [*drawing, wanting])
    assert beside[:4] == alone
    assert alone == Driver(make_runner(tiny, attention_backend="torch_native")).generate(prompts, 30, drawing), "up to rounding"
