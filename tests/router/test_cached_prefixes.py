"""Digests of prompts and of what a replica has cached."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.api.outputs import CachedPages
from aengine.cache import PageChain, published_digest
from aengine.router.replica_load import MAX_PAGES, CachedPrefixes, PageNaming, PagePrefix

SALT = b"salt of tests"
NAMING = PageNaming(page_size=4)


def digests_of(token_ids: list[int], cache_salt: str = "", salt: bytes = SALT, naming: PageNaming = NAMING) -> list[int]:
    return list(PagePrefix(token_ids, cache_salt, salt).digests(naming))


class TestPagePrefix:
    def test_digests_are_those_that_replicas_publish(self) -> None:
        chain = PageChain(4, "mine", adapter=3, version=7)
        chain.extend(np.arange(9, dtype=np.int32))
        expected = [published_digest(name, SALT) for name in chain.digests]
        assert digests_of(list(range(9)), "mine", naming=PageNaming(4, adapter=3, weights_version=7)) == expected

    def test_the_last_token_is_in_no_page(self) -> None:
        assert [len(digests_of(list(range(length)))) for length in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]

    @pytest.mark.parametrize(
        "other",
        [
            {"cache_salt": "mine"},
            {"salt": b"another salt"},
            {"naming": PageNaming(4, adapter=1)},
            {"naming": PageNaming(4, weights_version=1)},
            {"token_ids": [9, *range(1, 20)]},
        ],
    )
    def test_whatever_differs_makes_all_digests_differ(self, other: dict[str, object]) -> None:
        assert not set(digests_of(list(range(20)))) & set(digests_of(**{"token_ids": list(range(20)), **other}))  # type: ignore[arg-type]

    def test_equal_beginnings_have_equal_digests(self) -> None:
        assert digests_of([*range(10), 1, 2, 3])[:2] == digests_of([*range(10), 3, 2, 1])[:2]
        assert digests_of([*range(10), 1, 2, 3])[2] != digests_of([*range(10), 3, 2, 1])[2]

    def test_long_prompts_are_looked_at_up_to_a_limit(self) -> None:
        assert len(digests_of([1] * (4 * MAX_PAGES + 100))) == MAX_PAGES

    def test_digests_are_computed_once_for_each_naming(self) -> None:
        prefix = PagePrefix(list(range(20)), "", SALT)
        assert prefix.digests(NAMING) is prefix.digests(PageNaming(page_size=4))
        assert prefix.digests(NAMING) is not prefix.digests(PageNaming(page_size=8))

    def test_the_beginning_is_that_of_the_first_tokens(self) -> None:
        def beginning(token_ids: list[int], cache_salt: str = "") -> int:
            return PagePrefix(token_ids, cache_salt, SALT).beginning

        assert beginning([*range(300), 1]) == beginning([*range(300), 2])
        assert len({beginning([1]), beginning([2]), beginning([1], "mine"), beginning([1, 2])}) == 4


# Chains of digests that share beginnings: each is a path in a tree in which the number of a page tells those before it.
@st.composite
def chains(draw: st.DrawFn) -> tuple[int, ...]:
    branches = draw(st.lists(st.integers(0, 1), max_size=9))
    return tuple(int("1" + "".join(map(str, branches[: length + 1])), 2) for length in range(len(branches)))


def scanned(there: set[int], chain: tuple[int, ...]) -> int:
    """The longest prefix, one page after another."""
    return next((number for number, digest in enumerate(chain) if digest not in there), len(chain))


class TestCachedPrefixes:
    @given(st.lists(chains(), max_size=6), st.lists(chains(), max_size=6), st.lists(chains(), max_size=6), chains())
    def test_longest_equals_a_scan(
        self, first: list[tuple[int, ...]], reported: list[tuple[int, ...]], expected: list[tuple[int, ...]], looked_for: tuple[int, ...]
    ) -> None:
        prefixes = CachedPrefixes()
        before = {digest for chain in first for digest in chain}
        after = {digest for chain in reported for digest in chain}
        prefixes.apply(CachedPages(snapshot=True, added=tuple(before)))
        prefixes.apply(CachedPages(snapshot=False, added=tuple(after - before), removed=tuple(before - after)))
        for chain in expected:
            prefixes.expect(chain)
        assert prefixes.longest(looked_for) == scanned(after.union(*expected), looked_for)
        for chain in expected:
            prefixes.forget(chain)
        assert prefixes.longest(looked_for) == scanned(after, looked_for)
        assert len(prefixes) == len(after)

    def test_a_snapshot_replaces_what_was_reported(self) -> None:
        prefixes = CachedPrefixes()
        prefixes.apply(CachedPages(snapshot=True, added=(1, 2, 3)))
        prefixes.apply(CachedPages(snapshot=True, added=(7,)))
        assert (prefixes.longest((1, 2, 3)), prefixes.longest((7, 8))) == (0, 1)

    def test_what_two_requests_expect_stays_until_both_are_forgotten(self) -> None:
        prefixes = CachedPrefixes()
        prefixes.expect((1, 2))
        prefixes.expect((1,))
        prefixes.forget((1, 2))
        assert prefixes.longest((1, 2)) == 1
        prefixes.forget((1,))
        assert prefixes.longest((1, 2)) == 0

    def test_reported_digests_are_bounded(self) -> None:
        prefixes = CachedPrefixes(most=3)
        prefixes.apply(CachedPages(snapshot=True, added=(1, 2)))
        prefixes.apply(CachedPages(snapshot=False, added=(3, 4, 5)))
        assert (len(prefixes), prefixes.longest((1, 2, 3, 4, 5))) == (3, 3)
        prefixes.apply(CachedPages(snapshot=False, added=(6,), removed=(3,)))
        assert (len(prefixes), prefixes.longest((1, 2, 6))) == (3, 3)
