"""`TierLoads`: what is loaded of what there is, and what is saved."""

from __future__ import annotations

import numpy as np
import pytest

from aengine.cache import PageCache, PageChain, PageNeeds, page_name
from aengine.scheduler.tier_loads import TierLoads
from aengine.scheduler.waiting import PrefixesInFlight

TOKENS = np.arange(41, dtype=np.int32)


class Tiers:
    """Two groups of pages of 4 tokens, and states of 3 pages; a tier has the first columns, and states at the ends of some."""

    def __init__(self, num_pages: int = 60, columns: int = 0, states: tuple[int, ...] = ()) -> None:
        self.cache, needs = PageCache(num_pages, 4), PageNeeds((None, None), 4, 64, 3)
        self.needs, self.chain = needs, PageChain(4, "", 0, 0)
        self.chain.extend(TOKENS)
        names = {*self.chain.digests[:columns], *(page_name(self.chain.digests[end - 1], 2) for end in states)}
        self.asked: list[tuple[float, int]] = []

        def find(wanted: list[bytes]) -> int:
            return next((count for count, name in enumerate(wanted) if name not in names), len(wanted))

        def is_worth(loaded: float, computed: int) -> bool:
            self.asked.append((loaded, computed))
            return True

        self.loads = TierLoads(self.cache, needs, PrefixesInFlight(), find, lambda name: False, is_worth)

    def begin(self, spared: int = 0) -> tuple[int, int] | None:
        """How many columns are loaded, and where the state is; None: nothing."""
        load = self.loads.begin_load(self.chain, TOKENS, self.cache.match(self.chain, TOKENS, self.needs), spared)
        if load is None:
            return None
        assert load.has_state
        assert [len(pages) for pages in load.pages] == [2] * (len(load.names) - 1) + [3]
        ends = [page_name(digest, 2) for digest in self.chain.digests]
        self.loads.end_load(load, len(load.names))
        return len(load.names) - 1, ends.index(load.names[-1]) + 1


@pytest.mark.parametrize(
    ("columns", "states", "expected"),
    [(9, (3, 7), (7, 7)), (9, (), None), (5, (3, 7), (3, 3)), (0, (3,), None), (10, (10,), (10, 10))],
)
def test_columns_come_with_a_state(columns: int, states: tuple[int, ...], expected: tuple[int, int] | None) -> None:
    tiers = Tiers(columns=columns, states=states)
    assert tiers.begin() == expected
    found = tiers.cache.match(tiers.chain, TOKENS, tiers.needs)
    assert found.num_columns == (0 if expected is None else expected[1])
    if expected is not None:
        assert tiers.asked == [(expected[0] + 1.5, expected[1])]


def test_what_is_in_the_pool_is_not_loaded() -> None:
    tiers = Tiers(columns=9, states=(3, 7))
    pages = tiers.cache.allocate(16)
    for column in range(8):
        tokens = TOKENS[column * 4 : column * 4 + 4].tobytes()
        tiers.cache.publish(pages[2 * column : 2 * column + 2].tolist(), tiers.chain.digests[column], tokens)
    assert tiers.begin() == (0, 7)
    assert tiers.asked == [(1.5, 7)]
    assert tiers.cache.match(tiers.chain, TOKENS, tiers.needs).num_columns == 7
    assert tiers.begin() is None


def test_no_more_than_there_is_room_for() -> None:
    assert Tiers(num_pages=14, columns=9, states=(3, 5, 7)).begin() == (5, 5)
    assert Tiers(num_pages=14, columns=9, states=(3, 5, 7)).begin(spared=3) == (3, 3)
    assert Tiers(num_pages=14, columns=9, states=(7,)).begin() is None


def test_a_state_whose_pages_were_given_away_is_not_saved() -> None:
    tiers = Tiers(num_pages=10)
    name = page_name(tiers.chain.digests[1], 2)
    for allocated, expected in ((5, 1), (7, 0)):
        pages = tiers.cache.allocate(3)
        tiers.cache.publish_state(pages, name, b"tokens")
        tiers.cache.release_state(pages)
        tiers.loads.save(name, b"tokens", pages)
        held = tiers.cache.allocate(allocated)
        assert len(tiers.loads.take_saves()) == expected
        tiers.cache.release(held)
        tiers.cache.flush()


def test_saves_wait_in_the_pool_until_they_are_asked_for_or_many() -> None:
    tiers = Tiers(num_pages=21)

    def compute(column: int) -> None:
        pages = tiers.cache.allocate(2)
        tiers.cache.publish(pages.tolist(), tiers.chain.digests[column], b"tokens")
        tiers.loads.save(tiers.chain.digests[column], b"tokens", pages)
        tiers.cache.release(pages)

    for column in range(6):
        compute(column)
    assert [save.name for save in tiers.loads.take_saves(0)] == list(tiers.chain.digests[:1]), "of 20 pages 10 may wait"
    assert [save.name for save in tiers.loads.take_saves(3)] == list(tiers.chain.digests[1:3])
    tiers.cache.flush()
    compute(5)
    assert [save.name for save in tiers.loads.take_saves()] == [tiers.chain.digests[5]], "what is not there any more is left out"
    assert not tiers.loads.has_saves
