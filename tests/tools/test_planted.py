"""Drafters that are told what will come: how often their drafts are right."""

from __future__ import annotations

import numpy as np
import pytest

from tools.lab.planted import PROMPT, EditDrafter, Planted, PlantedDrafter

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 500, PROMPT + 5).tolist() for _ in range(3)]
OUTPUTS = [RNG.integers(0, 500, 600).tolist() for _ in range(3)]


def run(drafter: Planted, number: int, row: int) -> tuple[int, int, int]:
    """Of a greedy use of all drafts: steps, draft tokens, and how many of them were right."""
    drafter.assign(row)
    tokens = np.array([*PROMPTS[number], *OUTPUTS[number]], np.int32)
    end, steps, drafted, accepted = PROMPT + 6, 0, 0, 0
    while end < len(tokens):
        draft = drafter.propose(row, tokens[:end], 4)
        following = tokens[end : end + len(draft.token_ids)]
        right = draft.token_ids[: len(following)] == following
        num_right = len(right) if right.all() else int(right.argmin())
        if len(draft.token_ids):
            drafter.observe(row, end, draft, num_right)
        steps, drafted, accepted, end = steps + 1, drafted + len(draft.token_ids), accepted + num_right, end + num_right + 1
    return steps, drafted, accepted


@pytest.mark.parametrize(("acceptance", "least", "most"), [(0.0, 1.0, 1.0), (0.6, 2.1, 2.5), (1.0, 4.9, 5.0)])
def test_planted_drafts_are_right_as_often_as_wanted(acceptance: float, least: float, most: float) -> None:
    """With acceptance a, a step with 4 drafts brings 1 + a + a^2 + a^3 + a^4 tokens."""
    drafter = PlantedDrafter()
    drafter.acceptance = acceptance
    for prompt, output in zip(PROMPTS, OUTPUTS, strict=True):
        drafter.plant(prompt, output)
    steps = sum(run(drafter, number, row)[0] for row, number in ((0, 2), (1, 0), (0, 1)))
    assert least <= 3 * 599 / steps <= most
    if acceptance == 0.6:
        measured = drafter.propose(0, np.array([*PROMPTS[1], *OUTPUTS[1][:9]], np.int32), 4).acceptance
        assert measured == pytest.approx(0.6, abs=0.2)


def test_an_edited_copy_is_mostly_what_it_was() -> None:
    drafter = EditDrafter(500, 2)
    for prompt, output in zip(PROMPTS, OUTPUTS, strict=True):
        drafter.plant(prompt, output)
    steps, drafted, accepted = (sum(counts) for counts in zip(*(run(drafter, number, number % 2) for number in range(3)), strict=True))
    assert 2.0 < 3 * 599 / steps < 4.0
    assert 0.7 < accepted / drafted < 0.95
