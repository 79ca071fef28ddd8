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
        drafter.assign(row, None)
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
    drafter.assign(0, None)
    assert drafter.propose(0, np.array([1, 2, 3, 4, 1, 2, 3], np.int32), 2).token_ids.tolist() == [4, 1]
    drafter.assign(0, None)
    assert drafter.propose(0, np.array([7, 8, 9, 1, 2, 3], np.int32), 2).token_ids.tolist() == []


def test_a_long_prompt_is_indexed_in_parts() -> None:
    drafter = NgramDrafter(vocab_size=1000, max_rows=1)
    drafter.assign(0, None)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 1000, 3 * drafters._MOST_NEW).astype(np.int32)
    tokens = np.concatenate((text, text[-100:-90]))
    found = [drafter.propose(0, tokens, 4).token_ids.tolist() for _ in range(4)]
    assert found == [[], [], text[-90:-86].tolist(), text[-90:-86].tolist()]


def ints(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_what_ended_sequences_of_its_group_had_is_found() -> None:
    drafter = NgramDrafter(vocab_size=1000, max_rows=3)
    text = np.random.default_rng(0).permutation(1000)[:200].astype(np.int32)
    memory = text.copy()
    drafter.assign(0, "a")
    drafter.propose(0, memory[:100], 1)
    drafter.release(0, memory)
    memory[:] = 0  # another sequence has the row
    drafter.assign(0, "a")
    drafter.assign(1, "b")
    assert drafter.propose(0, text[:150][100:], 4).token_ids.tolist() == text[150:154].tolist()
    assert drafter.propose(0, text[100:198], 4).token_ids.tolist() == text[198:].tolist(), "no more than it had"
    assert drafter.propose(1, text[100:150], 4).token_ids.tolist() == [], "another group"


def test_its_context_is_looked_up_before_what_ended_sequences_had() -> None:
    drafter = NgramDrafter(vocab_size=100, max_rows=2)
    drafter.assign(0, None)
    drafter.release(0, ints(1, 2, 3, 60, 61))
    drafter.assign(1, None, ints(1, 2, 3, 70, 71))
    assert drafter.propose(1, ints(9, 1, 2, 3), 2).token_ids.tolist() == [70, 71]
    drafter.assign(0, None)
    assert drafter.propose(0, ints(9, 1, 2, 3), 2).token_ids.tolist() == [60, 61], "another's context"
    drafter.assign(1, None)
    assert drafter.propose(1, ints(9, 1, 2, 3), 2).token_ids.tolist() == [60, 61], "that of the sequence before"


def test_its_own_tokens_come_first_unless_another_match_is_longer() -> None:
    drafter = NgramDrafter(vocab_size=100, max_rows=2)
    drafter.assign(0, None)
    drafter.release(0, ints(5, 1, 2, 3, 60, 61, 9, 9, 9))
    drafter.assign(1, None)
    assert drafter.propose(1, ints(1, 2, 3, 50, 51, 8, 1, 2, 3), 2).token_ids.tolist() == [50, 51], "as long"
    drafter.assign(1, None)
    assert drafter.propose(1, ints(1, 2, 3, 50, 51, 5, 1, 2, 3), 2).token_ids.tolist() == [60, 61]


def test_the_latest_of_them_are_remembered() -> None:
    vocab_size, size = 1 << 17, drafters._MOST_PAST // 8
    drafter = NgramDrafter(vocab_size, max_rows=1)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, vocab_size, size).astype(np.int32) for _ in range(20)]
    long = rng.integers(0, vocab_size, 3 * drafters._MOST_PAST).astype(np.int32)

    def is_known(text: np.ndarray) -> bool:
        return drafter.propose(0, text[:50], 4).token_ids.tolist() == text[50:54].tolist()

    for text in texts:
        drafter.assign(0, "a")
        drafter.propose(0, text[:10], 1)
        drafter.release(0, text)
        drafter.assign(0, "a")
        assert is_known(text)
    assert [is_known(text) for text in texts] == [False] * 8 + [True] * 12
    drafter.release(0, long)
    drafter.assign(0, "a")
    for _ in range(8):  # they are indexed in parts
        drafter.propose(0, long[:10], 1)
    assert is_known(long[-drafters._MOST_PAST // 2 :])
    for group in range(drafters._MOST_GROUPS):
        drafter.assign(0, group)
        drafter.release(0, texts[group])
    drafter.assign(0, "a")
    assert not is_known(texts[-1])
