"""Layouts of steps that follow one another equal those that are built alone, whatever changes between them."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from aengine.attention import Layouts, StepLayout, build_layout
from aengine.runner.runner import StateTable
from aengine.scheduler.plan import NO_INTS, StateRows, StepPlan

PAGE_SIZE = 4
MAX_ROWS, MAX_PAGES = 6, 10
GROUPS = 2


class Steps:
    """Rows at random positions; each step says what it changed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.table = np.zeros((GROUPS, MAX_ROWS, MAX_PAGES), np.int32)
        self.ends = np.zeros(MAX_ROWS, np.int32)
        self.layouts = Layouts(self.table, PAGE_SIZE)
        self.same_pages = False

    def turn_over(self, row: int) -> None:
        """Another sequence, with pages of its own, takes the row."""
        self.table[:, row] = self.rng.integers(1, 1000, (GROUPS, MAX_PAGES))
        self.ends[row] = self.rng.integers(0, 3 * PAGE_SIZE)
        self.same_pages = False

    def step(self, rows: np.ndarray, num_decodes: int) -> tuple[StepLayout, StepLayout]:
        rows = rows.astype(np.int32)
        lengths = np.ones(len(rows), np.int32)
        lengths[num_decodes:] = self.rng.integers(1, 4, len(rows) - num_decodes)
        starts = self.ends[rows]
        got = self.layouts.build(rows, num_decodes, starts, lengths, same_pages=self.same_pages)
        expected = build_layout(rows, num_decodes, starts, lengths, self.table, PAGE_SIZE)
        self.ends[rows] += lengths
        self.same_pages = True
        return got, expected


def check_equal(got: StepLayout, expected: StepLayout) -> None:
    for field in fields(StepLayout):
        one, other = getattr(got, field.name), getattr(expected, field.name)
        assert np.array_equal(one, other), field.name
        assert not isinstance(one, np.ndarray) or one.dtype == np.int32, field.name


@pytest.mark.quick_cases(15)
@pytest.mark.parametrize("seed", range(40))
def test_any_steps(seed: int) -> None:
    steps = Steps(seed)
    rng = steps.rng
    for row in range(MAX_ROWS):
        steps.turn_over(row)
    rows = np.arange(3)
    for _ in range(300):
        match rng.integers(8):
            case 0:
                rows = np.sort(rng.permutation(MAX_ROWS)[: rng.integers(1, MAX_ROWS + 1)])
            case 1:
                steps.turn_over(int(rng.integers(MAX_ROWS)))
            case _:
                pass
        for row in np.flatnonzero(steps.ends + 4 > MAX_PAGES * PAGE_SIZE).tolist():
            steps.turn_over(row)
        num_decodes = len(rows) if rng.random() < 0.8 else int(rng.integers(len(rows)))
        check_equal(*steps.step(rows, num_decodes))


def test_a_row_at_the_same_position_is_another_row() -> None:
    steps = Steps(0)
    for row in range(2):
        steps.turn_over(row)
        steps.ends[row] = 5
    steps.same_pages = True
    check_equal(*steps.step(np.array([0]), 1))
    steps.ends[:] = 6
    check_equal(*steps.step(np.array([1]), 1))


def test_a_row_may_be_elsewhere() -> None:
    steps = Steps(0)
    steps.turn_over(0)
    steps.ends[0] = 4
    check_equal(*steps.step(np.array([0]), 1))
    steps.ends[0] = 6
    check_equal(*steps.step(np.array([0]), 1))


def test_what_did_not_change_is_kept() -> None:
    steps = Steps(0)
    steps.turn_over(0)
    steps.ends[0] = 4
    pages = [id(steps.step(np.array([0]), 1)[0].kv_indices) for _ in range(8)]
    assert len(set(pages)) == 2  # one for each page of the row


def step_of(row: int, start: int, length: int = 1, *, num_sampled: int = 1, states: StateRows | None = None) -> StepPlan:
    numbers = (np.array([number], np.int32) for number in (start, length, num_sampled))
    return StepPlan(0, np.array([row], np.int32), 0, *numbers, NO_INTS, (), NO_INTS, NO_INTS, NO_INTS, NO_INTS, states=states)


def test_a_row_reads_what_it_begins_with_in_its_first_step() -> None:
    """Which may be a later one than that which says so, as where the row is parked in between."""
    table, row = StateTable(3, 2), np.array([1], np.int32)
    pages, source = np.array([[4, 5]], np.int32), np.array([[8, 9]], np.int32)
    table.of_step(step_of(0, 7, states=StateRows(row, pages, source, NO_INTS, NO_INTS, pages[:0])))
    first = table.of_step(step_of(1, 16))
    assert (first.reads.tolist(), first.writes.tolist()) == ([[8, 9]], [[4, 5]])
    second = table.of_step(step_of(1, 17))
    assert (second.reads.tolist(), second.writes.tolist()) == ([[4, 5]], [[4, 5]])


def test_a_row_computes_again_what_counts_of_a_step_with_drafts() -> None:
    """A state that is kept is told from the first of these tokens on."""
    table, row = StateTable(3, 2), np.array([1], np.int32)
    pages, kept = np.array([[4, 5]], np.int32), np.array([[6, 7]], np.int32)
    table.of_step(step_of(1, 0, 8, states=StateRows(row, pages, np.zeros((1, 2), np.int32), NO_INTS, NO_INTS, pages[:0])))
    drafts = table.of_step(step_of(1, 8, 4, num_sampled=4))
    assert (drafts.replays.tolist(), drafts.drafts.tolist()) == ([0], [1])
    again = table.of_step(step_of(1, 11, 3, num_sampled=3, states=StateRows(NO_INTS, pages[:0], pages[:0], row, row * 10, kept)))
    assert (again.replays.tolist(), again.drafts.tolist(), again.kept_lengths.tolist()) == ([3], [1], [2])
    plain = table.of_step(step_of(1, 12))
    assert (plain.replays.tolist(), plain.drafts.tolist()) == ([1], [0])
    assert table.of_step(step_of(1, 13)).replays.tolist() == [0]
