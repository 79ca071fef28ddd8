"""Steps that have begun before anybody waits for them."""

from __future__ import annotations

import ctypes
import gc
import time

import numpy as np
import pytest
import torch
from cpu_ops import NO_LAST_TOKENS, stack_logits
from hang_guard import HANG_SECONDS
from numpy.typing import NDArray
from slow_cases import slow_but
from test_cpu_stack import everything, hidden_states, layouts, pool_of, random_weights, run_step, stack_of, tiny_spec, token_ids

from aengine.attention import StepLayout, build_layout
from aengine.kernels.arrays import as_tensor
from aengine.kernels.cpu.library import CpuKernels, Workspace
from aengine.kernels.cpu.ops import KvPool
from aengine.models.cpu.stack import CpuLastTokens, DecoderStack, PreparedStep


class Setup:
    """A tiny model with everything that its steps need."""

    def __init__(self, kernels: CpuKernels, threads: int, dtype: torch.dtype = torch.float32, page_size: int = 16) -> None:
        spec = tiny_spec("qwen3")
        self.workspace = Workspace(kernels, threads)
        self.stack: DecoderStack = stack_of(self.workspace, spec, random_weights(spec), dtype)
        self.pool: KvPool = pool_of(spec, dtype, page_size)

    def prepare(self, layout: StepLayout, number: int, *, greedy: bool) -> PreparedStep:
        return self.stack.prepare(
            self.workspace, self.pool, layout, token_ids(layout, number), everything(layout), greedy=greedy, last_tokens=NO_LAST_TOKENS
        )


def loiter(seconds: float) -> None:
    """Keeps the GIL, as planning the next step does."""
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
            assert greedy.sampled is not None
            assert torch.equal(as_tensor(step.hidden), expected[number])
            assert greedy.sampled.tolist() == stack_logits(reference.stack, reference.workspace, expected[number]).argmax(-1).tolist()


def test_it_goes_ahead_by_itself(some_kernels: CpuKernels) -> None:
    made = Setup(some_kernels, 2)
    layout = layouts(16)[0]
    step = made.prepare(layout, 0, greedy=True)
    last_values = made.pool._memory[-1]
    step.begin()
    end = time.monotonic() + HANG_SECONDS
    while not last_values.any():
        assert time.monotonic() < end, "the last layer never wrote its values"
    step.run()


def test_thousands_in_a_row(some_kernels: CpuKernels) -> None:
    """Two threads meet some thirty times in each."""
    made = Setup(some_kernels, 2)
    layout = layouts(16)[4]
    step = made.prepare(layout, 4, greedy=True)
    step.run()
    assert step.sampled is not None
    expected = step.sampled.copy()
    for i in range(2000):
        step.sampled[:] = -1
        step.begin()
        loiter(i % 40 * 1e-6)
        step.run()
        assert np.array_equal(step.sampled, expected)


def test_token_ids_are_read_when_it_begins(some_kernels: CpuKernels) -> None:
    made, layout = Setup(some_kernels, 2), layouts(16)[0]
    expected = made.prepare(layout, 0, greedy=True)
    expected.run()
    ids = np.zeros(layout.num_tokens, np.int32)
    step = made.stack.prepare(made.workspace, made.pool, layout, ids, everything(layout), greedy=True, last_tokens=NO_LAST_TOKENS)
    ids[:] = token_ids(layout, 0)
    step.begin()
    step.run()
    assert np.array_equal(step.sampled, expected.sampled)


ROWS = np.array([3, 1], np.int32)
LAST_TOKENS = np.array([90, 5, 91, 17, 92], np.int32)  # of five rows
NO_HOLD = ctypes.c_int32(0)


def decodes(step: int) -> StepLayout:
    """Of both rows, from their first token on; a page is full after 16."""
    table = np.arange(1, 1 + 5 * 4, dtype=np.int32).reshape(1, 5, 4)
    return build_layout(ROWS, 2, np.full(2, step, np.int32), np.ones(2, np.int32), table, 16)


class Decoding:
    """Steps whose input ids are the tokens that the step before sampled."""

    def __init__(self, kernels: CpuKernels, threads: int) -> None:
        self.made = Setup(kernels, threads)
        self.last_tokens = LAST_TOKENS.copy()

    def step(self, number: int, input_rows: NDArray[np.int32] = ROWS, output_rows: NDArray[np.int32] = ROWS) -> PreparedStep:
        made, layout = self.made, decodes(number)
        ids = np.full(2, -1, np.int32)
        last_tokens = CpuLastTokens(self.last_tokens, input_rows, output_rows)
        return made.stack.prepare(made.workspace, made.pool, layout, ids, everything(layout), greedy=True, last_tokens=last_tokens)


def sampled_by_hand(kernels: CpuKernels, count: int) -> list[list[int]]:
    made, ids, found = Setup(kernels, 1), LAST_TOKENS[ROWS], []
    for number in range(count):
        step = made.stack.prepare(
            made.workspace, made.pool, decodes(number), ids, everything(decodes(number)), greedy=True, last_tokens=NO_LAST_TOKENS
        )
        step.run()
        assert step.sampled is not None
        ids = step.sampled.astype(np.int32)
        found.append(ids.tolist())
    return found


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("held_every", slow_but([None, 3], [None, 1, 3, 100]))
def test_each_goes_on_with_what_the_one_before_sampled(some_kernels: CpuKernels, threads: int, begun: bool, held_every: int | None) -> None:
    """Run or begun before; with `held_every` it begins right after the one before, unless it is held."""
    expected = sampled_by_hand(some_kernels, 30)
    decoding = Decoding(some_kernels, threads)
    hold = ctypes.c_int32(0)
    step, found = decoding.step(0), []
    for number in range(30):
        following = decoding.step(number + 1)
        if begun and not step.has_begun:
            step.begin()
        hold.value = held_every is not None and number % held_every == 0
        follows = step.has_begun and held_every is not None and not hold.value
        step.run(*(() if held_every is None else (following, hold)))
        assert (step.has_begun, following.has_begun) == (False, follows)
        assert step.sampled is not None
        found.append(step.sampled.tolist())
        step = following
    step.run()
    assert found == expected
    assert np.delete(decoding.last_tokens, ROWS).tolist() == np.delete(LAST_TOKENS, ROWS).tolist()


def test_nothing_begins_after_a_step_that_had_not_begun(some_kernels: CpuKernels) -> None:
    """One that was run at once may be followed by work on the same memory."""
    decoding = Decoding(some_kernels, 2)
    first, second = (decoding.step(number) for number in range(2))
    first.run(second, NO_HOLD)
    assert not second.has_begun
    second.begin()
    second.run()


def test_one_that_is_refused_does_not_follow(some_kernels: CpuKernels) -> None:
    decoding = Decoding(some_kernels, 2)
    nobody = np.array([3, 5], np.int32)
    for bad in (decoding.step(1, input_rows=nobody), decoding.step(1, output_rows=nobody), decoding.step(1, input_rows=-ROWS)):
        first = decoding.step(0)
        first.begin()
        first.run(bad, NO_HOLD)
        assert not bad.has_begun
        with pytest.raises(ValueError, match="a row of the step has no last token"):
            bad.run()
    with pytest.raises(ValueError, match="2 input rows and 1 output rows do not fit 2 tokens, 2 sampled"):
        decoding.step(1, output_rows=ROWS[:1])
    decoding.last_tokens = decoding.last_tokens.astype(np.int64)
    with pytest.raises(ValueError, match="the last tokens are not contiguous int32, but int64"):
        decoding.step(1)
    decoding.last_tokens = LAST_TOKENS.copy()
    decoding.step(1).run()


def test_the_workspace_serves_nothing_else(some_kernels: CpuKernels) -> None:
    made, steps = Setup(some_kernels, 2), layouts(16)
    hidden = run_step(made.stack, made.workspace, made.pool, steps[0], token_ids(steps[0], 0), everything(steps[0]))
    step, other = made.prepare(steps[1], 1, greedy=True), made.prepare(steps[2], 2, greedy=True)
    pages = np.array([1], np.int32)
    step.begin()
    for refused in (
        other.run,
        lambda: stack_logits(made.stack, made.workspace, hidden),
        lambda: made.pool.copy_pages(made.workspace, pages, pages + 1),
    ):
        with pytest.raises(RuntimeError, match="a step that has begun and is not finished"):
            refused()
    other.begin()  # does nothing
    step.run()
    other.run()
    stack_logits(made.stack, made.workspace, hidden)


def test_what_is_refused_does_not_begin(some_kernels: CpuKernels) -> None:
    made, layout = Setup(some_kernels, 2), layouts(16)[0]
    bad = made.stack.prepare(
        made.workspace, made.pool, layout, np.full(37, 199, np.int32), everything(layout), greedy=True, last_tokens=NO_LAST_TOKENS
    )
    bad.begin()
    assert made.workspace.running is None
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
