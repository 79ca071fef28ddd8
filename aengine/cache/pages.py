"""The page pool: every page is free, cached, or referenced, and never two of these.

*Referenced*: one or more sequences hold it (`refs > 0`). *Cached*: nobody holds it, but its content is published in the prefix
index and can be used again; it counts as available, least recently released first. *Free*: its content means nothing.
Page 0 is reserved: padding points at it and it is never handed out. All operations cost O(1) per page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from aengine.cache.groups import PageNeeds
from aengine.cache.prefix import PageChain, PrefixIndex, page_name

IntArray = NDArray[np.int32]


class OutOfPages(Exception):
    """More pages were asked for than are available."""


class PageCache:
    """`num_pages` pages of `page_size` tokens, the reserved page included."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages: {num_pages} leaves no page beside the reserved one")
        self.page_size = page_size
        self.num_pages = num_pages
        self.refs = np.zeros(num_pages, np.int32)
        self.marked = np.zeros(
            num_pages, np.bool_
        )  # by who uses it, for what else the page holds; not any more when it is handed out again
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # a stack, without the reserved page 0
        self._num_free = num_pages - 1
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self.index = PrefixIndex()

    @property
    def usable(self) -> int:
        """Pages that can be handed out at all."""
        return self.num_pages - 1

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return self._num_free + len(self._cached)

    @property
    def referenced(self) -> int:
        return self.usable - self.available

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV lies in pages that nobody holds."""
        return len(self._cached) * self.page_size

    def allocate(self, count: int) -> IntArray:
        """`count` pages with one reference each; free ones first, then the least recently used cached ones."""
        if count > self.available:
            raise OutOfPages(f"{count} pages asked for, {self.available} available")
        taken = min(count, self._num_free)
        pages = np.empty(count, np.int32)
        self._num_free -= taken
        pages[:taken] = self._free[self._num_free : self._num_free + taken][::-1]
        for i in range(taken, count):
            page, _ = self._cached.popitem(last=False)
            self.index.remove(page)
            pages[i] = page
        self.refs[pages] = 1
        self.marked[pages] = False
        return pages

    def release(self, pages: IntArray) -> None:
        """Give up one reference to each of a sequence's `pages`, none of them twice, first to last. The tail is evicted before the head."""
        self.refs[pages] -= 1
        dropped = pages[self.refs[pages] == 0]
        if not len(self.index):
            self._push_free(dropped)
            return
        free = []
        for page in dropped[::-1].tolist():
            if page in self.index:
                self._cached[page] = None
            else:
                free.append(page)
        self._push_free(np.array(free, np.int32))

    def _push_free(self, pages: IntArray) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def match(self, chain: PageChain, tokens: IntArray, needs: PageNeeds) -> IntArray:
        """The pages [groups, columns] that hold the longest published prefix of `tokens`, not yet referenced by the caller (see `retain`).

        0 where the first token after the prefix does not see the page, because it is behind the group's window. The last token is never
        covered: it must be computed to have logits.
        """
        size = self.page_size * tokens.itemsize
        raw = tokens.tobytes()
        length = min((len(tokens) - 1) // self.page_size, len(chain.digests))

        def find(group: int, column: int) -> int:
            return self.index.find(page_name(chain.digests[column], group), raw[column * size : (column + 1) * size])

        full: list[list[int]] = []
        for group in range(needs.num_full):
            full.append([])
            for column in range(length):
                page = find(group, column)
                if not page:
                    length = column
                    break
                full[-1].append(page)
        if not needs.kinds:
            return np.array([pages[:length] for pages in full], np.int32)
        hits = np.zeros((needs.num_groups, length), np.int32)
        for group, pages in enumerate(full):
            hits[group] = pages[:length]

        def missing() -> int | None:
            """The first column that a window lacks. Every longer prefix needs it, too."""
            for kind in needs.kinds:
                for column in range(kind.first_column(length * self.page_size), length):
                    for group in range(kind.begin, kind.end):
                        hits[group, column] = hits[group, column] or find(group, column)
                        if not hits[group, column]:
                            return column
            return None

        while (lacking := missing()) is not None:
            length = lacking
        for kind in needs.kinds:
            hits[kind.begin : kind.end, : kind.first_column(length * self.page_size)] = 0
        return hits[:, :length]

    def retain(self, pages: IntArray) -> None:
        """Take one more reference to each of these matched pages, no two of which are the same."""
        for page in pages[self.refs[pages] == 0].tolist():
            del self._cached[page]
        self.refs[pages] += 1

    def num_unreferenced(self, pages: IntArray) -> int:
        """How many of these matched pages are available now, and so would lower `available` when retained."""
        return int(np.count_nonzero(self.refs[pages] == 0))

    def publish(self, pages: Iterable[int], digest: bytes, page_tokens: bytes) -> None:
        """Offer full, computed, referenced pages of the same tokens, one in each group, to others; `page_tokens`: the bytes of their ids.

        Those whose content is published already stay private.
        """
        for group, page in enumerate(pages):
            self.index.add(page, page_name(digest, group), page_tokens)

    def flush(self) -> int:
        """Drop every cached page; referenced pages stay, unpublished. Returns the number of pages that became free."""
        flushed = list(self._cached)
        self._cached.clear()
        self.index.clear()
        self._push_free(np.array(flushed, np.int32))
        return len(flushed)
