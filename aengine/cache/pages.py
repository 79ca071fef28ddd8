"""The page pool: every page is free, cached, or referenced, and never two of these.

*Referenced*: one or more sequences hold it (`refs > 0`). *Cached*: nobody holds it, but its content is published in the prefix
index and can be used again; it counts as available, least recently released first, and those that are pinned behind all others.
*Free*: its content means nothing.
Page 0 is reserved: padding points at it and it is never handed out. All operations cost O(1) per page.

Layer groups: which layers of a model share pages, and how many pages a sequence needs in each group.

All pages of a pool have the same size: `page_size` tokens of K and V of `layers_per_page` layers, or where layers keep less of a token than
others, of several such in the place of one. A group is that many layers, which keep the same tokens: all of them, or those of one sliding
window, which a convolution has, too. A sequence has a list of pages for each group. Every page can serve any group, so there is one pool.
(Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, has one group.)

States: what recurrent layers have of a sequence takes the same number of whole pages, however long the sequence is. A state that was kept
as it was at the end of a column is named like a page of a further group; its pages are referenced, cached and evicted together."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.cache.prefix import PageChain, PrefixIndex, page_name

IntArray = NDArray[np.int32]
NO_PAGES: IntArray = np.zeros(0, np.int32)


class OutOfPages(Exception):
    """More pages were asked for than are available."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Pages of tokens that need not be computed, not yet referenced by who asked for them (see `retain`)."""

    pages: IntArray  # [groups, columns]; 0 where the first token behind the prefix does not see the page, because of the group's window
    state: IntArray  # [state_pages], what recurrent layers have of the prefix; empty where there is none, or no prefix
    num_found: int  # columns whose pages were found; those behind the prefix are of no use without a state

    @property
    def num_columns(self) -> int:
        return int(self.pages.shape[1])

    @property
    def held(self) -> IntArray:
        """All of the pages, each once."""
        pages = self.pages[self.pages > 0]
        return np.concatenate((pages, self.state)) if len(self.state) else pages


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
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first; of a state its first page
        self._pinned: OrderedDict[int, None] = OrderedDict()  # the same for those with pins, which are evicted when no other is left
        self._pins: dict[int, int] = {}  # how many pins a published page has, of a state its first page
        self._num_pinned_states = 0
        self._num_cached = 0  # pages, with all of states
        self._num_cached_of_states = 0
        self._states: dict[int, IntArray] = {}  # by its first page: all pages of a published state
        self.index = PrefixIndex()

    @property
    def usable(self) -> int:
        """Pages that can be handed out at all."""
        return self.num_pages - 1

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return self._num_free + self._num_cached

    @property
    def referenced(self) -> int:
        return self.usable - self.available

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV lies in pages that nobody holds."""
        return (self._num_cached - self._num_cached_of_states) * self.page_size

    def allocate(self, count: int) -> IntArray:
        """`count` pages with one reference each; free ones first, then the least recently used cached ones."""
        if count > self.available:
            raise OutOfPages(f"{count} pages asked for, {self.available} available")
        while self._num_free < count and self._states:
            self._evict(next(iter(self._cached or self._pinned)))
        taken = min(count, self._num_free)
        pages = np.empty(count, np.int32)
        self._num_free -= taken
        pages[:taken] = self._free[self._num_free : self._num_free + taken][::-1]
        for i in range(taken, count):
            page, _ = (self._cached or self._pinned).popitem(last=False)
            self.index.remove(page)
            self._drop_pins(page)
            pages[i] = page
        self._num_cached -= count - taken
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
                self._cached_with(page)[page] = None
                self._num_cached += 1
            else:
                free.append(page)
        self._push_free(np.array(free, np.int32))

    def release_state(self, pages: IntArray) -> None:
        """Give up one reference to all pages of a state."""
        self.refs[pages] -= 1
        if self.refs[pages[0]]:
            return
        if (first := int(pages[0])) in self.index:
            self._cached_with(first)[first] = None
            self._num_cached += len(pages)
            self._num_cached_of_states += len(pages)
        else:
            self._push_free(pages)

    def state_at(self, first_page: int, name: bytes) -> IntArray:
        """The pages of the state of that name, if it is there; else none."""
        return self._states.get(first_page, NO_PAGES) if self.index.name_of(first_page) == name else NO_PAGES

    def use_again(self, first_page: int, name: bytes) -> None:
        """If the state of that name is cached there, it is evicted as late as if it had been released now."""
        if self._is_cached(first_page, name):
            self._cached_with(first_page).move_to_end(first_page)

    def drop_state(self, first_page: int, name: bytes) -> None:
        """If the state of that name is cached there, it becomes free."""
        if self._is_cached(first_page, name):
            self._evict(first_page)

    def pin(self, page: int) -> None:
        """Have a published page, or the state that it is the first page of, evicted when no page without a pin is left. Each pin counts."""
        was_cached = self._cached.pop(page, page) is None
        if page not in self._pins and page in self._states:
            self._num_pinned_states += 1
        self._pins[page] = self._pins.get(page, 0) + 1
        if was_cached:
            self._pinned[page] = None

    def unpin(self, page: int, name: bytes) -> None:
        """Take one pin from the page that was published under that name; does nothing if it was evicted since."""
        if self.index.name_of(page) != name or page not in self._pins:
            return
        self._pins[page] -= 1
        if not self._pins[page]:
            self._drop_pins(page)
            if self._pinned.pop(page, page) is None:
                self._cached[page] = None

    @property
    def pinned_tokens(self) -> int:
        """Tokens whose KV lies in pages that have pins, whoever holds them."""
        return (len(self._pins) - self._num_pinned_states) * self.page_size

    def _drop_pins(self, page: int) -> None:
        if self._pins.pop(page, None) is not None and page in self._states:
            self._num_pinned_states -= 1

    def _cached_with(self, page: int) -> OrderedDict[int, None]:
        """The cached pages that a page is one of, or would be."""
        return self._pinned if page in self._pins else self._cached

    def _is_cached(self, first_page: int, name: bytes) -> bool:
        return first_page in self._cached_with(first_page) and self.index.name_of(first_page) == name

    def _evict(self, page: int) -> None:
        """A cached page, or the state that it is the first page of, becomes free."""
        self._take_out(page)
        self.index.remove(page)
        self._drop_pins(page)
        self._push_free(self._states.pop(page, np.array([page], np.int32)))

    def _take_out(self, page: int) -> None:
        """Take a page, or the state that it is the first page of, from those that are cached."""
        del self._cached_with(page)[page]
        state = self._states.get(page, NO_PAGES)
        self._num_cached -= len(state) or 1
        self._num_cached_of_states -= len(state)

    def _push_free(self, pages: IntArray) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def match(self, chain: PageChain, tokens: IntArray, needs: PageNeeds) -> Prefix:
        """The longest published prefix of `tokens`. The last token is never covered: it must be computed to have logits."""
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
        num_found = length
        if not needs.kinds and not needs.state_pages:
            return Prefix(np.array([pages[:length] for pages in full], np.int32), NO_PAGES, num_found)
        hits = np.zeros((needs.num_groups, length), np.int32)
        for group, pages in enumerate(full):
            hits[group] = pages[:length]

        def missing() -> int | None:
            """The first column that a window or the state lacks. Every longer prefix needs that of a window, too."""
            for kind in needs.kinds:
                for column in range(kind.first_column(length * self.page_size), length):
                    for group in range(kind.begin, kind.end):
                        hits[group, column] = hits[group, column] or find(group, column)
                        if not hits[group, column]:
                            return column
            if length and needs.state_pages and not find(needs.num_groups, length - 1):
                return length - 1
            return None

        while (lacking := missing()) is not None:
            length = lacking
        for kind in needs.kinds:
            hits[kind.begin : kind.end, : kind.first_column(length * self.page_size)] = 0
        state = self._states[find(needs.num_groups, length - 1)] if length and needs.state_pages else NO_PAGES
        return Prefix(hits[:, :length], state, num_found)

    def retain(self, pages: IntArray) -> None:
        """Take one more reference to each of these matched pages, no two of which are the same."""
        for page in pages[self.refs[pages] == 0].tolist():
            if page in self._cached_with(page):  # of a state all pages go with the first
                self._take_out(page)
        self.refs[pages] += 1

    def num_unreferenced(self, pages: IntArray) -> int:
        """How many of these matched pages are available now, and so would lower `available` when retained."""
        return int(np.count_nonzero(self.refs[pages] == 0))

    def publish(self, pages: Iterable[int], digest: bytes, page_tokens: bytes) -> None:
        """Offer full, computed, referenced pages of the same tokens, one in each group, to others; `page_tokens`: the bytes of their ids.

        Those whose content is published already stay private.
        """
        for group, page in enumerate(pages):
            self.index.publish_page(page, page_name(digest, group), page_tokens)

    def publish_state(self, pages: IntArray, name: bytes, page_tokens: bytes) -> None:
        """Offer to others what recurrent layers have of the tokens up to the end of a column, whose pages `publish` has or had."""
        first = int(pages[0])
        self.index.publish_page(first, name, page_tokens)
        if first in self.index:
            self._states[first] = pages

    def flush(self) -> int:
        """Drop every cached page; referenced pages stay, unpublished. Returns the number of pages that became free."""
        cached = (*self._cached, *self._pinned)
        flushed = np.concatenate([NO_PAGES, *(self._states.get(page, np.array([page], np.int32)) for page in cached)])
        self._cached.clear()
        self._pinned.clear()
        self._pins.clear()
        self._num_pinned_states = 0
        self._num_cached = self._num_cached_of_states = 0
        self._states.clear()
        self.index.clear()
        self._push_free(flushed)
        return len(flushed)


IntT = TypeVar("IntT", int, NDArray[np.int32])
Windows = tuple[int | None, ...]
"""By group, the positions that a query attends to, its own included; None: all. Groups without a window come first, and equal windows stand
beside each other."""
FULL_PADDING, WINDOW_PADDING = 1 / 16, 1 / 4
"""The share of places in pages that may be of no layer, in groups without a window, which take most of the memory, and in those with one.
Fewer layers per page leave fewer places unused, but mean more groups, and more work per step."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    windows: Windows
    layers_per_page: int
    places: tuple[tuple[int, int], ...]  # by layer: its group, and which of the places of a page it has
    per_place: tuple[int, ...]  # by layer: how many such as it share a place, because they keep less of a token
    parts: tuple[int, ...]  # by layer: which of them it is

    def of_layers(self, layers: Iterable[int]) -> LayerGroups:
        """Return these groups for some of the layers alone, which are spread evenly over the groups of their window."""
        held = list(layers)
        windows, per_place = [self.windows[self.places[layer][0]] for layer in held], [self.per_place[layer] for layer in held]
        seen: Counter[int | None] = Counter()
        found = []
        for window, _ in (sharing := _sharing(windows, per_place)):
            number, place = seen[window] % self.windows.count(window), seen[window] // self.windows.count(window)
            found.append((self.windows.index(window) + number, place))
            seen[window] += 1
        return _with_parts(self.windows, 1 + max(place for _, place in found), found, sharing, per_place)


def layer_groups(windows: Sequence[int | None], per_place: Sequence[int] = ()) -> LayerGroups:
    """The groups of layers with these windows (one per layer), of which there is at least one; `per_place` as in `LayerGroups`, or empty if
    each layer has a place of its own."""
    per_place = tuple(per_place) or (1,) * len(windows)
    sharing = _sharing(windows, per_place)
    sizes = Counter(window for window, _ in sharing)

    def fits(layers_per_page: int) -> bool:
        unused = {window: -size % layers_per_page for window, size in sizes.items()}
        full, unused_full = sizes[None], unused.pop(None, 0)
        return unused_full <= FULL_PADDING * full and sum(unused.values()) <= WINDOW_PADDING * (len(sharing) - full)

    layers_per_page = next(filter(fits, range(min(sizes.values()), 0, -1)))
    begins: dict[int | None, int] = {}
    groups: list[int | None] = []
    for window in sorted(sizes, key=lambda window: window or 0):
        begins[window] = len(groups)
        groups += [window] * -(-sizes[window] // layers_per_page)
    seen: Counter[int | None] = Counter()
    places = []
    for window, _ in sharing:
        places.append((begins[window] + seen[window] // layers_per_page, seen[window] % layers_per_page))
        seen[window] += 1
    return _with_parts(tuple(groups), layers_per_page, places, sharing, per_place)


_Sharing = list[tuple[int | None, list[int]]]
"""The window of each place, and the layers that share it."""


def _sharing(windows: Sequence[int | None], per_place: Sequence[int]) -> _Sharing:
    """Each place has consecutive layers among those of a kind."""
    found: _Sharing = []
    latest: dict[tuple[int | None, int], list[int]] = {}
    for layer, kind in enumerate(zip(windows, per_place, strict=True)):
        if len(latest.get(kind, ())) % kind[1] == 0:
            latest[kind] = []
            found.append((kind[0], latest[kind]))
        latest[kind].append(layer)
    return found


def _with_parts(
    windows: Windows, layers_per_page: int, places: Sequence[tuple[int, int]], sharing: _Sharing, per_place: Sequence[int]
) -> LayerGroups:
    """The groups of layers that share `places`, one for each entry of `sharing`."""
    by_layer = {layer: (place, part) for place, (_, layers) in zip(places, sharing, strict=True) for part, layer in enumerate(layers)}
    found, parts = zip(*(by_layer[layer] for layer in range(len(by_layer))), strict=True)
    return LayerGroups(windows, layers_per_page, found, tuple(per_place), parts)


@dataclass(frozen=True, slots=True)
class WindowKind:
    """Consecutive groups with one window. Their page lists have the same columns; those behind the window are given back."""

    window: int
    begin: int  # the first of the groups
    end: int
    page_size: int
    most_columns: int  # that a sequence holds at a time, with two steps in flight

    @property
    def num_groups(self) -> int:
        return self.end - self.begin

    def first_column(self, position: IntT) -> IntT:
        """The first column of a page list that a query at `position` reads."""
        first = position - (self.window - 1)
        return first * (first > 0) // self.page_size


class PageNeeds:
    """The arithmetic of pages for groups with `windows`. A column is `page_size` consecutive tokens: one page in each group. A state takes
    `state_pages`, whatever its length."""

    def __init__(self, windows: Windows, page_size: int, max_num_batched_tokens: int, state_pages: int = 0) -> None:
        self.page_size = page_size
        self.state_pages = state_pages  # 0: the model has no recurrent layers
        self.num_groups = len(windows)
        self.num_full = windows.count(None)  # groups without a window
        kinds: list[WindowKind] = []
        begin = self.num_full
        assert windows[:begin] == (None,) * begin, "groups without a window come first"
        for window, group in groupby(windows[begin:]):
            assert window is not None
            end = begin + len(list(group))
            # From the page of the window's first position, one token earlier than needed, to that of the last token in flight.
            most_columns = (2 * max_num_batched_tokens + window - 2) // page_size + 2
            kinds.append(WindowKind(window, begin, end, page_size, most_columns))
            begin = end
        self.kinds = tuple(kinds)

    def columns(self, num_tokens: IntT) -> IntT:
        return -(-num_tokens // self.page_size)

    def pages(self, columns: int) -> int:
        """The most pages that a sequence holds at a time while it computes so many columns: its state and another one that is kept, or
        that it begins with."""
        return self.num_full * columns + self.windowed_pages(columns) + 2 * self.state_pages

    def windowed_pages(self, columns: int) -> int:
        """The most pages in groups with windows that a sequence holds at a time while it computes so many columns."""
        return sum(kind.num_groups * min(columns, kind.most_columns) for kind in self.kinds)

    def state_interval(self, tokens: int | None) -> int:
        """Return `tokens` rounded up to whole pages, or if that is None a power of two tokens, the KV of which takes twice the memory of a
        state or more; 0 if there are no states."""
        if not self.state_pages:
            return 0
        if tokens is not None:
            return self.columns(tokens) * self.page_size
        columns = 2 * self.state_pages / max(self.num_full, 1)
        return self.page_size << max(0, math.ceil(math.log2(columns)))

    def longest(self, num_pages: int, limit: int) -> int:
        """How many tokens the longest sequence has that `num_pages` pages suffice for; `limit` at most."""
        return min(limit, bisect_right(range(1, self.columns(limit) + 1), num_pages, key=self.pages) * self.page_size)
