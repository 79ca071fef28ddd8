"""The page cache against a plain model of it, and its single promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from page_invariants import check_pages

from aengine.cache import OutOfPages, PageCache, PageChain, PageNeeds, page_name

PAGE_SIZE = 2
ONE_GROUP = PageNeeds((None,), PAGE_SIZE, 8)


def tokens_of(*pages: int) -> np.ndarray:
    """Each number stands for one page of equal tokens."""
    return np.repeat(np.array(pages, np.int32), PAGE_SIZE)


def chain_of(tokens: np.ndarray, salt: str = "") -> PageChain:
    chain = PageChain(PAGE_SIZE, salt)
    chain.extend(tokens)
    return chain


def match(cache: PageCache, tokens: np.ndarray, salt: str = "") -> list[int]:
    return cache.match(chain_of(tokens, salt), tokens, ONE_GROUP).pages[0].tolist()


def store(cache: PageCache, tokens: np.ndarray, salt: str = "") -> np.ndarray:
    """A sequence that computes `tokens` and is done."""
    pages = cache.allocate(len(tokens) // PAGE_SIZE)
    for page, digest, own in zip(pages.tolist(), chain_of(tokens, salt).digests, tokens.reshape(-1, PAGE_SIZE), strict=True):
        cache.publish([page], digest, own.tobytes())
    return pages


class TestPrefix:
    def test_longest_published_prefix(self) -> None:
        cache = PageCache(20, PAGE_SIZE)
        pages = store(cache, tokens_of(1, 2, 3))
        asked = tokens_of(1, 2, 9, 3)
        assert match(cache, asked) == pages[:2].tolist()
        other = tokens_of(2, 3)
        assert match(cache, other) == []

    def test_the_last_token_is_never_covered(self) -> None:
        cache = PageCache(20, PAGE_SIZE)
        pages = store(cache, tokens_of(1, 2))
        asked = tokens_of(1, 2)
        assert match(cache, asked) == pages[:1].tolist()

    def test_salts_do_not_meet(self) -> None:
        cache = PageCache(20, PAGE_SIZE)
        store(cache, tokens_of(1, 2, 3), salt="a")
        asked = tokens_of(1, 2, 3)
        assert match(cache, asked, "b") == []
        assert match(cache, asked) == []
        assert len(match(cache, asked, "a")) == 2

    def test_a_forged_digest_does_not_serve_foreign_pages(self) -> None:
        cache = PageCache(20, PAGE_SIZE)
        store(cache, tokens_of(1, 2))
        forged = chain_of(tokens_of(1, 2))
        asked = tokens_of(7, 2, 3)
        assert cache.match(forged, asked, ONE_GROUP).pages.tolist() == [[]]

    def test_hashes_are_computed_once_and_extended(self) -> None:
        tokens = tokens_of(1, 2, 3)
        grown = PageChain(PAGE_SIZE)
        for length in range(len(tokens) + 1):
            grown.extend(tokens[:length])
        assert grown.digests == chain_of(tokens).digests
        first = grown.digests[0]
        grown.extend(tokens_of(9, 9, 9))
        assert grown.digests[0] is first

    def test_a_second_page_of_the_same_content_stays_private(self) -> None:
        cache = PageCache(20, PAGE_SIZE)
        first = store(cache, tokens_of(1, 2))
        second = store(cache, tokens_of(1, 2))
        cache.release(second)
        assert cache.cached_tokens == 0
        cache.release(first)
        assert cache.cached_tokens == 2 * PAGE_SIZE
        check_pages(cache)


class TestEviction:
    def test_pages_with_pins_are_evicted_last(self) -> None:
        cache = PageCache(5, PAGE_SIZE)
        for content in (1, 2, 3, 4):
            pages = cache.allocate(1)
            cache.publish(pages.tolist(), chain_of(tokens_of(content)).digests[0], tokens_of(content).tobytes())
            cache.release(pages)
        names = dict(cache.index._by_page)
        first, second = list(names)[:2]
        cache.pin(first)
        cache.pin(second)
        cache.pin(second)
        cache.unpin(second, names[second])
        third_and_fourth = cache.allocate(2)
        assert not {first, second} & set(third_and_fourth.tolist())
        cache.unpin(second, names[second])
        assert cache.allocate(1).tolist() == [second]
        assert cache.pinned_tokens == PAGE_SIZE
        assert cache.allocate(1).tolist() == [first], "in the end these go too"
        cache.unpin(first, names[first])
        assert cache.pinned_tokens == 0

    def test_free_pages_first_then_least_recently_used_tail_first(self) -> None:
        cache = PageCache(7, PAGE_SIZE)
        old = store(cache, tokens_of(1, 2, 3))
        new = store(cache, tokens_of(4, 5))
        cache.release(old)
        cache.release(new)
        assert cache.available == 6
        taken = [int(cache.allocate(1)[0]) for _ in range(6)]
        assert taken[0] not in {*old.tolist(), *new.tolist()}
        assert taken[1:] == [*old[::-1].tolist(), *new[::-1].tolist()]
        check_pages(cache)

    def test_use_renews(self) -> None:
        cache = PageCache(5, PAGE_SIZE)
        one, two = store(cache, tokens_of(1, 1)), store(cache, tokens_of(2, 2))
        cache.release(one)
        cache.release(two)
        cache.retain(one)
        cache.release(one)
        assert cache.allocate(2).tolist() == two[::-1].tolist()

    def test_out_of_pages(self) -> None:
        cache = PageCache(4, PAGE_SIZE)
        cache.allocate(2)
        with pytest.raises(OutOfPages, match="2 pages asked for, 1 available"):
            cache.allocate(2)
        check_pages(cache)

    def test_flush(self) -> None:
        cache = PageCache(10, PAGE_SIZE)
        kept, dropped = store(cache, tokens_of(1, 2)), store(cache, tokens_of(3, 4))
        cache.release(dropped)
        assert cache.flush() == 2
        asked = tokens_of(1, 2, 3)
        assert match(cache, asked) == []
        cache.release(kept)
        assert (cache.cached_tokens, cache.available) == (0, 9)
        check_pages(cache)

    def test_the_reserved_page_is_never_handed_out(self) -> None:
        cache = PageCache(9, PAGE_SIZE)
        assert sorted(cache.allocate(8).tolist()) == list(range(1, 9))
        with pytest.raises(ValueError, match="num_pages"):
            PageCache(1, PAGE_SIZE)


class PageCacheMachine(RuleBasedStateMachine):
    """Sequences come, share prefixes, grow, publish and go, in any order."""

    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages: int) -> None:
        self.cache = PageCache(num_pages, PAGE_SIZE)
        self.holders: list[tuple[list[int], list[int], str]] = []  # content per page, pages, salt
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}  # what each page was last written with
        self.pins: list[tuple[int, bytes]] = []

    @rule(content=st.lists(st.integers(0, 2), min_size=1, max_size=4), salt=st.sampled_from(["", "s"]), publish=st.booleans())
    def come(self, content: list[int], salt: str, publish: bool) -> None:
        tokens = tokens_of(*content)
        chain = chain_of(tokens, salt)
        found = self.cache.match(chain, tokens, ONE_GROUP).pages[0]
        hits = found.tolist()
        for i, page in enumerate(hits):
            assert self.content[page] == (salt, tuple(content[: i + 1])), "a hit holds something else"
        needed = len(content) - len(hits)
        if needed + self.cache.num_unreferenced(found) > self.cache.available:
            return
        before = self.cache.available
        taken = self.cache.num_unreferenced(found)
        self.cache.retain(found)
        assert self.cache.available == before - taken
        fresh = self.cache.allocate(needed).tolist()
        held = {page for _, pages, _ in self.holders for page in pages}
        assert not held & set(fresh), "a page in use was handed out"
        for i, page in enumerate(fresh, len(hits)):
            self.content[page] = (salt, tuple(content[: i + 1]))
            if publish:
                self.cache.publish([page], chain.digests[i], tokens_of(content[i]).tobytes())
        self.holders.append((content, hits + fresh, salt))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        _, pages, _ = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.cache.release(np.array(pages, np.int32))

    @precondition(lambda self: self.cache.index._by_page)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.cache.index._by_page)))
        self.cache.pin(page)
        self.pins.append((page, self.cache.index._by_page[page]))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.cache.unpin(*self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @rule()
    def flush(self) -> None:
        self.cache.flush()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_pages(self.cache)
        refs = np.zeros_like(self.cache.refs)
        for _, pages, _ in self.holders:
            np.add.at(refs, pages, 1)
        assert np.array_equal(refs, self.cache.refs)


TestPageCacheMachine = PageCacheMachine.TestCase
TestPageCacheMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


class TestStates:
    NEEDS = PageNeeds((None,), 4, 16, state_pages=3)

    @staticmethod
    def chain(tokens: np.ndarray) -> PageChain:
        chain = PageChain(4)
        chain.extend(tokens)
        return chain

    def published(self, cache: PageCache, tokens: np.ndarray, *columns: int) -> dict[int, np.ndarray]:
        """A sequence of full pages, with states at the ends of some of its columns; all of it is released."""
        chain = self.chain(tokens)
        pages = cache.allocate(len(chain.digests))
        states = {}
        for column, page in enumerate(pages.tolist()):
            raw = tokens[4 * column : 4 * column + 4].tobytes()
            cache.publish([page], chain.digests[column], raw)
            if column in columns:
                states[column] = cache.allocate(3)
                cache.publish_state(states[column], page_name(chain.digests[column], 1), raw)
                cache.release_state(states[column])
        cache.release(pages)
        check_pages(cache)
        return states

    def test_a_prefix_ends_where_there_is_a_state(self) -> None:
        cache, tokens = PageCache(40, 4), np.arange(21, dtype=np.int32)
        states = self.published(cache, tokens, 1, 3)
        found = cache.match(self.chain(tokens), tokens, self.NEEDS)
        assert (found.num_columns, found.num_found) == (4, 5)
        assert found.state.tolist() == states[3].tolist()
        assert cache.num_unreferenced(found.held) == 7
        shorter = cache.match(self.chain(tokens[:16]), tokens[:16], self.NEEDS)  # its last token is computed
        assert (shorter.num_columns, shorter.num_found) == (2, 3)
        assert shorter.state.tolist() == states[1].tolist()

    def test_all_pages_of_a_state_are_evicted_together(self) -> None:
        cache, tokens = PageCache(11, 4), np.arange(17, dtype=np.int32)
        self.published(cache, tokens, 0, 2)
        assert cache.available == 10
        cache.allocate(1)
        check_pages(cache)
        found = cache.match(self.chain(tokens), tokens, self.NEEDS)
        assert (found.num_columns, found.num_found) == (3, 4)
        cache.retain(found.held)
        check_pages(cache)
        assert cache.available == 10 - 1 - 6
        cache.release_state(found.state)
        cache.release(found.pages[0])
        check_pages(cache)
        assert cache.flush() > 0
        assert cache.available == 9
