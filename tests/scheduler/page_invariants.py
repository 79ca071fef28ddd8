"""Invariants of the page cache."""

from __future__ import annotations

from aengine.cache import PageCache


def check_pages(cache: PageCache) -> None:
    """Raises AssertionError unless every page is in exactly one state."""
    free = cache._free[: cache._num_free].tolist()
    assert 0 not in free, "the reserved page is in the free list"
    assert len(set(free)) == len(free), "a page is free twice"
    cached = [*cache._cached, *cache._pinned]
    assert not set(free) & set(cached), "a page is free and cached"
    assert all(cache.refs[page] == 0 for page in [*free, *cached]), "an available page is referenced"
    assert not set(cache._cached) & cache._pins.keys(), "a page with a pin is evicted as one without"
    assert cache._pinned.keys() <= cache._pins.keys(), "a page without a pin is kept as one that has some"
    assert all(page in cache.index and count > 0 for page, count in cache._pins.items()), "a page has pins that is not published"
    assert cache.pinned_tokens == sum(page not in cache._states for page in cache._pins) * cache.page_size
    num_cached = sum(len(cache._states.get(page, (page,))) for page in cached)
    assert cache._num_cached == num_cached, "cached pages are counted wrong"
    assert cache.cached_tokens == sum(page not in cache._states for page in cached) * cache.page_size
    assert int((cache.refs > 0).sum()) + len(free) + num_cached == cache.usable, "a page is lost"
    for first, pages in cache._states.items():
        assert first == pages[0]
        assert first in cache.index, "a state that is not published is kept"
        assert len(set(cache.refs[pages].tolist())) == 1, "pages of a state are referenced more often than others"
        assert not set(free) & set(pages.tolist()), "a page of a state is free"
    assert (cache.refs >= 0).all(), "a page was released more often than taken"
    assert all(page in cache.index for page in cached), "a cached page is not published"
    assert not any(page in cache.index for page in free), "a free page is published"
