"""Steps that have begun before anybody waits for them."""

from __future__ import annotations

import ctypes
import gc
import time

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from slow_cases import slow_but
from test_cpu_stack import everything, hidden_states, layouts, pool_of, random_weights, stack_of, tiny_spec, token_ids

from aengine.attention import StepLayout, build_layout
from aengine.kernels.cpu import CpuKernels, DecoderStack, KvPool, PreparedStep, Workspace
from aengine.kernels.feed import Feed


class Setup:
    """A tiny model with everything that its steps need."""

    def __init__(self, kernels: CpuKernels, threads: int, dtype: torch.dtype = torch.float32, page_size: int = 16) -> None:
        spec = tiny_spec("qwen3")
        self.workspace = Workspace(kernels, threads)
        self.stack: DecoderStack = stack_of(self.workspace, spec, random_weights(spec), dtype)
        self.pool: KvPool = pool_of(spec, dtype, page_size)

    def prepare(self, layout: StepLayout, number: int, *, greedy: bool) -> PreparedStep:
        return self.stack.prepare(self.workspace, self.pool, layout, token_ids(layout, number), everything(layout), greedy=greedy)


def loiter(seconds: float) -> None:
    """Keeps the interpreter busy, as planning the next step does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", slow_but([2], [1, 2, 5]))
def test_it_brings_the_same(some_kernels: CpuKernels, threads: int, dtype: torch.dtype, page_size: int) -> None:
    """Whenever whoever waits joins in: at once, in the middle, or when all is done."""
    steps = layouts(page_size)
    reference = Setup(some_kernels, 1, dtype, page_size)
    expected = hidden_states(reference.workspace, reference.stack, reference.pool, steps)
    made = Setup(some_kernels, threads, dtype, page_size)
    for late in (0.0, 20e-6, 100e-6, 1e-3):
        for number, layout in enumerate(steps):
            step, greedy = made.prepare(layout, number, greedy=False), made.prepare(layout, number, greedy=True)
            for one in (step, greedy):
                one.begin()
                loiter(late)
                one.run()
            assert step.hidden is not None
            assert greedy.chosen is not None
            assert torch.equal(step.hidden, expected[number])
            assert greedy.chosen.tolist() == reference.stack.greedy(reference.workspace, expected[number]).tolist()


def test_it_goes_ahead_by_itself(some_kernels: CpuKernels) -> None:
    made = Setup(some_kernels, 2)
    layout = layouts(16)[0]
    step = made.prepare(layout, 0, greedy=True)
    last_values = made.pool._memory[-1]
    step.begin()
    end = time.monotonic() + 30
    while not last_values.any():
        assert time.monotonic() < end, "the last layer never wrote its values"
    step.run()


def test_thousands_in_a_row(some_kernels: CpuKernels) -> None:
    """Two threads meet some thirty times in each."""
    made = Setup(some_kernels, 2)
    layout = layouts(16)[4]
    step = made.prepare(layout, 4, greedy=True)
    step.run()
    assert step.chosen is not None
    expected = step.chosen.copy()
    for i in range(2000):
        step.chosen[:] = -1
        step.begin()
        loiter(i % 40 * 1e-6)
        step.run()
        assert np.array_equal(step.chosen, expected)


def test_token_ids_are_read_when_it_begins(some_kernels: CpuKernels) -> None:
    made, layout = Setup(some_kernels, 2), layouts(16)[0]
    expected = made.prepare(layout, 0, greedy=True)
    expected.run()
    ids = np.zeros(layout.num_tokens, np.int32)
    step = made.stack.prepare(made.workspace, made.pool, layout, ids, everything(layout), greedy=True)
    ids[:] = token_ids(layout, 0)
    step.begin()
    step.run()
    assert np.array_equal(step.chosen, expected.chosen)


ROWS = np.array([3, 1], np.int32)
LATEST = np.array([90, 5, 91, 17, 92], np.int32)  # of five rows
NO_HOLD = ctypes.c_int32(0)


def decodes(step: int) -> StepLayout:
    """Of both rows, from their first token on; a page is full after 16."""
    table = np.arange(1, 1 + 5 * 4, dtype=np.int32).reshape(5, 4)
    return build_layout(ROWS, 2, np.full(2, step, np.int32), np.ones(2, np.int32), table, 16)


class Fed:
    """Steps that take the tokens which the one before chose."""

    def __init__(self, kernels: CpuKernels, threads: int) -> None:
        self.made = Setup(kernels, threads)
        self.latest = LATEST.copy()

    def step(self, number: int, fed: NDArray[np.int32] = ROWS, kept: NDArray[np.int32] = ROWS) -> PreparedStep:
        made, layout = self.made, decodes(number)
        ids = np.full(2, -1, np.int32)
        feed = Feed(self.latest, fed, kept)
        return made.stack.prepare(made.workspace, made.pool, layout, ids, everything(layout), greedy=True, feed=feed)


def chosen_by_hand(kernels: CpuKernels, count: int) -> list[list[int]]:
    made, ids, found = Setup(kernels, 1), LATEST[ROWS], []
    for number in range(count):
        step = made.stack.prepare(made.workspace, made.pool, decodes(number), ids, everything(decodes(number)), greedy=True)
        step.run()
        assert step.chosen is not None
        ids = step.chosen.astype(np.int32)
        found.append(ids.tolist())
    return found


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("held_every", slow_but([None, 3], [None, 1, 3, 100]))
def test_each_goes_on_with_what_the_one_before_chose(some_kernels: CpuKernels, threads: int, begun: bool, held_every: int | None) -> None:
    """Called or begun before; with `held_every` it follows by itself, where it is not held."""
    expected = chosen_by_hand(some_kernels, 30)
    fed = Fed(some_kernels, threads)
    hold = ctypes.c_int32(0)
    step, found = fed.step(0), []
    for number in range(30):
        following = fed.step(number + 1)
        if begun and not step.has_begun:
            step.begin()
        if held_every is not None:
            hold.value = number % held_every == 0
            following.follow(hold)
        follows = step.has_begun and held_every is not None and not hold.value
        step.run()
        assert (step.has_begun, following.has_begun) == (False, follows)
        assert step.chosen is not None
        found.append(step.chosen.tolist())
        step = following
    step.run()
    assert found == expected
    assert np.delete(fed.latest, ROWS).tolist() == np.delete(LATEST, ROWS).tolist()


def test_only_what_is_under_way_is_followed(some_kernels: CpuKernels) -> None:
    """One that was run at once may be followed by work on the same memory."""
    fed = Fed(some_kernels, 2)
    first, second, third = (fed.step(number) for number in range(3))
    second.follow(NO_HOLD)
    first.run()
    assert not second.has_begun
    second.begin()
    second.run()
    assert not third.has_begun
    third.run()


def test_one_that_is_refused_does_not_follow(some_kernels: CpuKernels) -> None:
    fed = Fed(some_kernels, 2)
    nobody = np.array([3, 5], np.int32)
    for bad in (fed.step(1, fed=nobody), fed.step(1, kept=nobody), fed.step(1, fed=-ROWS)):
        first = fed.step(0)
        first.begin()
        bad.follow(NO_HOLD)
        first.run()
        assert not bad.has_begun
        with pytest.raises(ValueError, match="a row of the step has no latest token"):
            bad.run()
    with pytest.raises(ValueError, match="2 rows are fed and 1 kept, of 2 tokens and 2 chosen ones"):
        fed.step(1, kept=ROWS[:1])
    fed.latest = fed.latest.astype(np.int64)
    with pytest.raises(ValueError, match="the latest tokens are not contiguous int32, but int64"):
        fed.step(1)
    fed.latest = LATEST.copy()
    fed.step(1).run()


def test_the_workspace_serves_nothing_else(some_kernels: CpuKernels) -> None:
    made, steps = Setup(some_kernels, 2), layouts(16)
    hidden = made.stack.run(made.workspace, made.pool, steps[0], token_ids(steps[0], 0), everything(steps[0]))
    step, other = made.prepare(steps[1], 1, greedy=True), made.prepare(steps[2], 2, greedy=True)
    pages = np.array([1], np.int32)
    step.begin()
    for refused in (
        other.run,
        lambda: made.stack.logits(made.workspace, hidden),
        lambda: made.stack.greedy(made.workspace, hidden),
        lambda: made.pool.copy_pages(made.workspace, pages, pages + 1),
    ):
        with pytest.raises(RuntimeError, match="a step that has begun and was not finished"):
            refused()
    other.begin()  # does nothing
    step.run()
    other.run()
    made.stack.logits(made.workspace, hidden)


def test_what_is_refused_does_not_begin(some_kernels: CpuKernels) -> None:
    made, layout = Setup(some_kernels, 2), layouts(16)[0]
    bad = made.stack.prepare(made.workspace, made.pool, layout, np.full(37, 199, np.int32), everything(layout), greedy=True)
    bad.begin()
    assert made.workspace.under_way is None
    with pytest.raises(ValueError, match="a token id of the step is not one of the embedding's"):
        bad.run()
    assert not any(memory.any() for memory in made.pool._memory)


def test_one_that_nobody_finishes(some_kernels: CpuKernels) -> None:
    """The workspace sees it through before the memory goes."""
    for _ in range(3):
        made = Setup(some_kernels, 3)
        made.prepare(layouts(16)[3], 3, greedy=False).begin()
        del made
        gc.collect()
