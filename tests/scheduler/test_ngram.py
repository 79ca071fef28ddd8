"""`NgramDrafter` against a plain search."""

from __future__ import annotations

import random

import numpy as np

from aengine.scheduler import drafters
from aengine.scheduler.drafters import NGRAM, NgramDrafter


def match_length(tokens: list[int], place: int) -> int:
    """How many tokens before `place` are those at the end, up to `_LONGEST`."""
    length = 0
    while length < min(place, drafters._LONGEST) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def plain(tokens: list[int], most: int) -> list[int]:
    places = [place for place in range(len(tokens) - 1, NGRAM - 1, -1) if match_length(tokens, place) >= NGRAM][: drafters._MOST_CANDIDATES]
    best = max(places, key=lambda place: match_length(tokens, place), default=len(tokens))
    return [tokens[best + i % (len(tokens) - best)] for i in range(most)] if best < len(tokens) else []


def test_it_finds_what_a_plain_search_finds() -> None:
    rng = random.Random(0)
    found = 0
    for row in range(40):
        drafter = NgramDrafter(vocab_size=1 << 20, max_rows=40)
        drafter.assign(row)
        size = rng.choice([2, 3, 10])
        tokens: list[int] = []
        while len(tokens) < 150:
            tokens += [rng.randrange(size) + (1 << 19) for _ in range(rng.choice([1, 1, 1, 2, 30]))]
            drafts = drafter.propose(row, np.array(tokens, np.int32), 5).token_ids.tolist()
            assert drafts == plain(tokens, 5)
            found += bool(drafts)
    assert found > 500


def test_a_row_that_is_assigned_again_forgets() -> None:
    drafter = NgramDrafter(vocab_size=100, max_rows=1)
    drafter.assign(0)
    assert drafter.propose(0, np.array([1, 2, 3, 4, 1, 2, 3], np.int32), 2).token_ids.tolist() == [4, 1]
    drafter.assign(0)
    assert drafter.propose(0, np.array([7, 8, 9, 1, 2, 3], np.int32), 2).token_ids.tolist() == []


def test_a_long_prompt_is_indexed_in_parts() -> None:
    drafter = NgramDrafter(vocab_size=1000, max_rows=1)
    drafter.assign(0)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 1000, 3 * drafters._MOST_NEW).astype(np.int32)
    tokens = np.concatenate((text, text[-100:-90]))
    found = [drafter.propose(0, tokens, 4).token_ids.tolist() for _ in range(4)]
    assert found == [[], [], text[-90:-86].tolist(), text[-90:-86].tolist()]
