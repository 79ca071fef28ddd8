"""`TierLoads`: pages that come back from tiers into the pool, and the sequences that wait for them; and the pages that go there.

Owns the pages that are being loaded: they are held until their content is written, then published, and cached like those of a sequence that
has ended. So a sequence whose load has ended finds its prefix as any other does. Knows neither files nor devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aengine.cache import PageCache, PageChain, PageNeeds, Prefix, page_name
from aengine.scheduler.plan import IntArray
from aengine.scheduler.sequence import Sequence
from aengine.scheduler.waiting import PrefixesInFlight

_MOST_COLUMNS = 256  # of a load, so that no large part of the memory waits to be written; a long prompt has several
_MOST_LOADS = 512  # of a sequence


@dataclass(frozen=True, slots=True, eq=False)
class PageLoad:
    """Columns that are to be loaded, one behind the other."""

    names: tuple[bytes, ...]
    tokens: tuple[bytes, ...]  # of each column, the bytes of its ids
    pages: IntArray  # [columns, groups], that its content is written to; 0: it is not needed


@dataclass(frozen=True, slots=True, eq=False)
class PageSave:
    """A column that was computed."""

    name: bytes
    tokens: bytes
    pages: IntArray  # [groups]


class TierLoads:
    def __init__(
        self,
        cache: PageCache,
        needs: PageNeeds,
        prefixes: PrefixesInFlight,
        find: Callable[[list[bytes]], int],
        keeps: Callable[[bytes], bool],
        is_worth: Callable[[int], bool],
    ) -> None:
        """`find`: how many of the first names are in a tier; `keeps`: whether a name need not be saved; `is_worth`: whether so many columns
        are loaded faster than computed."""
        self._cache, self._needs, self._prefixes = cache, needs, prefixes
        self._find, self._keeps, self._is_worth = find, keeps, is_worth
        self._begun: list[PageLoad] = []
        self._loads: set[PageLoad] = set()
        self._saves: list[PageSave] = []

    def begin(self, sequence: Sequence, prefix: Prefix, spared: int) -> bool:
        """Whether the columns behind the prefix of a waiting sequence are loaded, as many as there are and have room beside `spared` pages.
        If so, the sequence waits for them. What it waited for may be evicted before it begins, so that it waits only so often."""
        if sequence.num_loads >= _MOST_LOADS or sequence.request.adapter or sequence.request.params.needs_whole_prompt:
            return False
        load = self.begin_load(sequence.chain, sequence.tokens, prefix, spared)
        if load is None:
            return False
        sequence.num_loads += 1
        return self._prefixes.wait(sequence, load.names[-1])

    def begin_load(self, chain: PageChain, tokens: IntArray, prefix: Prefix, spared: int) -> PageLoad | None:
        """Begin to load what is behind the prefix of these tokens, the last one left out. None: nothing is there, or has room."""
        start = prefix.num_columns
        digests = chain.digests[start : (len(tokens) - 1) // self._cache.page_size]
        groups = self._needs.num_groups
        count = min(self._find(digests[:_MOST_COLUMNS]), max(self._cache.available - spared, 0) // groups) if digests else 0
        if not count or not self._is_worth(count):
            return None
        pages = np.zeros((count, groups), np.int32)
        pages[:, : self._needs.num_full] = 1
        for kind in self._needs.kinds:  # the token behind the columns sees the last ones
            pages[max(kind.first_column((start + count) * self._cache.page_size) - start, 0) :, kind.begin : kind.end] = 1
        pages[pages > 0] = self._cache.allocate(int(pages.sum()))
        size = self._cache.page_size * tokens.itemsize
        raw = tokens[start * self._cache.page_size :].tobytes()
        load = PageLoad(tuple(digests[:count]), tuple(raw[column * size : (column + 1) * size] for column in range(count)), pages)
        self._begun.append(load)
        self._loads.add(load)
        self._prefixes.claim(load, digests[:count])
        return load

    def end_load(self, load: PageLoad, num_loaded: int) -> list[Sequence]:
        """The first columns of a load have their content now, which others can use; the rest is not there. Returns the sequences that
        waited."""
        if load not in self._loads:
            return []
        self._loads.discard(load)
        for name, tokens, pages in zip(load.names[:num_loaded], load.tokens, load.pages.tolist(), strict=False):
            for group, page in enumerate(pages):
                if page:
                    self._cache.index.publish_page(page, page_name(name, group), tokens)
        self._cache.release(load.pages[load.pages > 0])
        return self._prefixes.abandon(load)

    def abandon(self) -> list[Sequence]:
        """No load that has begun counts any more. Returns the sequences that waited."""
        self._begun.clear()
        return [sequence for load in list(self._loads) for sequence in self.end_load(load, 0)]

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    def is_loading(self, load: PageLoad) -> bool:
        """Whether the pages of the load are still its own."""
        return load in self._loads

    def save(self, sequence: Sequence, name: bytes, tokens: bytes, pages: IntArray) -> None:
        """A column of a sequence is computed."""
        if not sequence.request.adapter and pages.all() and not self._keeps(name):
            self._saves.append(PageSave(name, tokens, pages.copy()))

    def take_loads(self) -> list[PageLoad]:
        """Return the loads that have begun since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def take_saves(self) -> list[PageSave]:
        """The columns that were computed since the last call. Their pages hold them until the next step is planned."""
        saves, self._saves = self._saves, []
        return saves
