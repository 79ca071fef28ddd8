"""`TierLoads`: pages that come back from tiers into the pool, and the sequences that wait for them; and the pages that go there.

Owns the pages that are being loaded: they are held until their content is written, then published, and cached like those of a sequence that
has ended. So a sequence whose load has ended finds its prefix as any other does. Knows neither files nor devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.cache import DIGEST_BYTES, PageCache, PageChain, PageNeeds, Prefix, page_name
from aengine.scheduler.plan import IntArray
from aengine.scheduler.sequence import Sequence
from aengine.scheduler.waiting import PrefixesInFlight

_MOST_COLUMNS = 256  # of a load, so that no large part of the memory waits to be written; a long prompt has several
_MOST_WITH_STATE = 4096  # of a load that ends with a state, of which there may be few
_MOST_LOADS = 512  # of a sequence
_WAITING = 1 / 2  # of the pages that are free or cached may wait to be saved; what waits longest is far from being evicted then


@dataclass(frozen=True, slots=True, eq=False)
class PageLoad:
    """Columns that are to be loaded, one behind the other, and behind them a state, if the model has recurrent layers."""

    names: tuple[bytes, ...]
    tokens: tuple[bytes, ...]  # of each column, the bytes of its ids; of a state those of the column before it
    pages: tuple[IntArray, ...]  # of each, [groups] or [state_pages], that its content is written to; 0: it is not needed
    has_state: bool


@dataclass(frozen=True, slots=True, eq=False)
class PageSave:
    """A column or a state that was computed, or a note."""

    name: bytes
    tokens: bytes
    pages: IntArray  # [groups] or [state_pages], or none


class TierLoads:
    def __init__(
        self,
        cache: PageCache,
        needs: PageNeeds,
        prefixes: PrefixesInFlight,
        find: Callable[[list[bytes]], int],
        keeps: Callable[[bytes], bool],
        is_worth: Callable[[float, int], bool],
    ) -> None:
        """`find`: how many of the first names are in a tier; `keeps`: whether a name need not be saved; `is_worth`: whether what takes as
        much as so many columns is loaded faster than so many columns are computed."""
        self._cache, self._needs, self._prefixes = cache, needs, prefixes
        self._find, self._keeps, self._is_worth = find, keeps, is_worth
        self._begun: list[PageLoad] = []
        self._loads: set[PageLoad] = set()
        self._saves: dict[tuple[bytes, int], PageSave] = {}  # by name and number of pages, in their order
        self._save_pages = 0  # of these

    def begin(self, sequence: Sequence, prefix: Prefix, spared: int) -> bool:
        """Whether the columns behind the prefix of a waiting sequence are loaded, as many as there are and have room beside `spared` pages.
        If so, the sequence waits for them. What it waited for may be evicted before it begins, so that it waits only so often."""
        if sequence.num_loads >= _MOST_LOADS:
            return False
        load = self.begin_load(sequence.chain, sequence.cacheable, prefix, spared)
        if load is None:
            return False
        sequence.num_loads += 1
        return self._prefixes.wait(sequence, load.names[-1])

    def begin_load(self, chain: PageChain, tokens: IntArray, prefix: Prefix, spared: int) -> PageLoad | None:
        """Begin to load what is behind the prefix of these tokens, the last one left out. None: nothing is there, or has room."""
        needs, size = self._needs, self._cache.page_size
        known, start = prefix.num_columns, prefix.num_columns
        if needs.state_pages and not needs.kinds:
            start = prefix.num_found  # up to there a state alone is missing
        most = _MOST_WITH_STATE if needs.state_pages else _MOST_COLUMNS
        digests, groups = chain.digests[start : (len(tokens) - 1) // size][:most], needs.num_groups
        count = self._find(digests) if digests else 0
        count = min(count, max(self._cache.available - spared - needs.state_pages, 0) // groups)
        end = start + count
        if needs.state_pages:
            ends = range(end, max(known, end - most), -1)
            end = next((one for one in ends if self._find([page_name(chain.digests[one - 1], groups)])), known)
            count = max(end - start, 0)
        if end == known or self._cache.available < spared + needs.state_pages + count * groups:
            return None
        if not self._is_worth(count + needs.state_pages / groups, end - known):
            return None
        pages = np.zeros((count, groups), np.int32)
        pages[:, : needs.num_full] = 1
        for kind in needs.kinds:  # the token behind the columns sees the last ones
            pages[max(kind.first_column(end * size) - start, 0) :, kind.begin : kind.end] = 1
        pages[pages > 0] = self._cache.allocate(int(pages.sum()))
        columns = [*range(start, start + count), *([end - 1] if needs.state_pages else ())]
        names = digests[:count]
        held = list(pages)
        if needs.state_pages:
            names = [*names, page_name(chain.digests[end - 1], groups)]
            held.append(self._cache.allocate(needs.state_pages))
        raw = tuple(tokens[column * size : (column + 1) * size].tobytes() for column in columns)
        load = PageLoad(tuple(names), raw, tuple(held), bool(needs.state_pages))
        self._begun.append(load)
        self._loads.add(load)
        self._prefixes.claim(load, names)
        return load

    def end_load(self, load: PageLoad, num_loaded: int) -> list[Sequence]:
        """The first columns of a load have their content now, which others can use; the rest is not there. Returns the sequences that
        waited."""
        if load not in self._loads:
            return []
        self._loads.discard(load)
        columns = len(load.names) - load.has_state
        for name, tokens, pages in zip(load.names[: min(num_loaded, columns)], load.tokens, load.pages, strict=False):
            for group, page in enumerate(pages.tolist()):
                if page:
                    self._cache.index.publish_page(page, page_name(name, group), tokens)
        if columns:
            held = np.concatenate(load.pages[:columns])
            self._cache.release(held[held > 0])
        if load.has_state:
            if num_loaded > columns:
                self._cache.publish_state(load.pages[-1], load.names[-1], load.tokens[-1])
            self._cache.release_state(load.pages[-1])
        woken = self._prefixes.abandon(load)
        for sequence in woken:
            sequence.num_loaded += min(num_loaded, columns) * self._cache.page_size
        return woken

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a load."""
        return sum(self._prefixes.num_waiting_for(load) for load in self._loads)

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

    def save(self, name: bytes, tokens: bytes, pages: IntArray) -> None:
        """A column of a sequence is computed, or a state is published."""
        if not pages.all() or self._keeps(name):
            return
        before = self._saves.get((name, len(pages)))
        if before is None or not self._is_there(before):
            self._save_pages += len(pages) if before is None else 0
            self._saves[name, len(pages)] = PageSave(name, tokens, pages.copy())

    def save_note(self, name: bytes, note: bytes) -> None:
        """In place of that of the same name before."""
        self._saves.pop((name, 0), None)  # it comes behind the KV that it speaks of
        self._saves[name, 0] = PageSave(name, note, np.zeros(0, np.int32))

    def take_loads(self) -> list[PageLoad]:
        """Return the loads that have begun since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def take_saves(self, most_pages: float = math.inf) -> list[PageSave]:
        """What is to be saved and still in the pool, until the next step is planned: of so many pages, and more where too many wait. The
        rest waits, and is lost if it is evicted before."""
        taken: list[PageSave] = []
        most_waiting = _WAITING * self._cache.available
        while self._saves and (most_pages > 0 or self._save_pages > most_waiting):
            key = next(iter(self._saves))
            save = self._saves.pop(key)
            self._save_pages -= len(save.pages)
            if self._is_there(save):
                taken.append(save)
                most_pages -= len(save.pages)
        return taken

    @property
    def has_saves(self) -> bool:
        return bool(self._saves)

    def _is_there(self, save: PageSave) -> bool:
        """Whether the pages hold what they held."""
        groups, pages, index = self._needs.num_groups, save.pages.tolist(), self._cache.index
        if groups and len(pages) == groups and len(save.name) == DIGEST_BYTES:
            return all(index.name_of(page) == page_name(save.name, group) for group, page in enumerate(pages))
        return not pages or index.name_of(pages[0]) == save.name
