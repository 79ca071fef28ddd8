"""Layer groups: which layers of a model share pages, and how many pages a sequence needs in each group.

All pages of a pool have the same size: `page_size` tokens of K and V of `layers_per_page` layers. A group is that many layers, which keep
the same tokens: all of them, or those of one sliding window. A sequence has a list of pages for each group. Every page can serve any
group, so there is one pool. (Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, has
one group.) Layers with a state of fixed size per sequence would be a further kind of group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

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
    places: tuple[tuple[int, int], ...]  # by layer: its group, and which of the layers of a page it is

    def of_layers(self, layers: range) -> LayerGroups:
        """Return these groups for some of the layers alone, which are spread evenly over the groups of their window."""
        seen: Counter[int | None] = Counter()
        places = []
        for layer in layers:
            window = self.windows[self.places[layer][0]]
            number, place = seen[window] % self.windows.count(window), seen[window] // self.windows.count(window)
            places.append((self.windows.index(window) + number, place))
            seen[window] += 1
        return LayerGroups(self.windows, 1 + max(place for _, place in places), tuple(places))


def layer_groups(windows: Sequence[int | None]) -> LayerGroups:
    """The groups of layers with these windows (one per layer), of which there is at least one."""
    sizes = Counter(windows)

    def fits(layers_per_page: int) -> bool:
        unused = {window: -size % layers_per_page for window, size in sizes.items()}
        full, unused_full = sizes[None], unused.pop(None, 0)
        return unused_full <= FULL_PADDING * full and sum(unused.values()) <= WINDOW_PADDING * (len(windows) - full)

    layers_per_page = next(filter(fits, range(min(sizes.values()), 0, -1)))
    begins: dict[int | None, int] = {}
    groups: list[int | None] = []
    for window in sorted(sizes, key=lambda window: window or 0):
        begins[window] = len(groups)
        groups += [window] * -(-sizes[window] // layers_per_page)
    seen: Counter[int | None] = Counter()
    places = []
    for window in windows:
        places.append((begins[window] + seen[window] // layers_per_page, seen[window] % layers_per_page))
        seen[window] += 1
    return LayerGroups(tuple(groups), layers_per_page, tuple(places))


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
    """The arithmetic of pages for groups with `windows`. A column is `page_size` consecutive tokens: one page in each group."""

    def __init__(self, windows: Windows, page_size: int, max_num_batched_tokens: int) -> None:
        self.page_size = page_size
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
        """The most pages that a sequence holds at a time while it computes so many columns."""
        return self.num_full * columns + self.windowed_pages(columns)

    def windowed_pages(self, columns: int) -> int:
        """The most pages in groups with windows that a sequence holds at a time while it computes so many columns."""
        return sum(kind.num_groups * min(columns, kind.most_columns) for kind in self.kinds)

    def longest(self, num_pages: int, limit: int) -> int:
        """How many tokens the longest sequence has that `num_pages` pages suffice for; `limit` at most."""
        return min(limit, bisect_right(range(1, self.columns(limit) + 1), num_pages, key=self.pages) * self.page_size)
