"""How the decode rows of a step are divided into items of work of about equal size, one program of each KV head for each item.

An item is a range of keys of one row, or of a prefix that several rows share. So a long row among short ones is computed by many programs,
and a prefix of many rows is read once for several of them. The keys of a page follow from all tokens up to it, so rows that have the same
page in the same place have the same tokens before it: only that page need be compared. Owns the division and the choice of shared prefixes,
with numpy on the host. Knows nothing of devices, kernels, or where pages come from.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.attention.metadata import IntArray, StepLayout
from aengine.kernels.paged_cache import Span

Indices = NDArray[np.int64]
_ROUNDS = 3  # the most choices of a length; rows that are in no group then are read one by one
_NO_GROUPS = np.zeros(0, dtype=np.int64)


class Prefixes(NamedTuple):
    """Groups of rows that begin with the same keys. Group g has the rows `members[first[g]:first[g] + sizes[g]]`."""

    members: Indices  # all rows, those of a group one after another
    first: Indices
    sizes: Indices  # at least 2
    keys: Indices  # common to all rows of a group


class _Groups(NamedTuple):
    members: Indices
    sizes: Indices
    keys: Indices
    saved: int  # keys that are not read


def shared_prefixes(layout: StepLayout, rows: Indices, group: int, least_keys: int, rows_per_read: int) -> Prefixes:
    """Groups among `rows` (ascending) of a layout that share at least `least_keys` keys in layer group `group`, where one read of keys
    serves up to `rows_per_read` rows.

    Groups are chosen to save many reads, first among prefixes of about one length.
    """
    chosen: list[_Groups] = []
    left = rows
    for _ in range(_ROUNDS if rows_per_read > 1 else 0):
        runs = _runs(layout, left, group, least_keys, rows_per_read)
        # What a run shares may be nearly twice as long as what its column says.
        likely = [run for run in runs if 2 * run.saved > max(run.saved for run in runs)]
        best = max(
            (_groups(layout, run, group, least_keys, rows_per_read) for run in likely), key=lambda groups: groups.saved, default=None
        )
        if best is None or not best.saved:
            break
        chosen.append(best)
        left = np.setdiff1d(left, best.members, assume_unique=True)
    if not chosen:
        return Prefixes(rows, _NO_GROUPS, _NO_GROUPS, _NO_GROUPS)
    members, sizes, keys = (np.concatenate(parts) for parts in list(zip(*chosen, strict=True))[:3])
    return Prefixes(np.concatenate((members, left)), np.cumsum(sizes) - sizes, sizes, keys)


class _Runs(NamedTuple):
    """Rows that have the same page in a column, one run after another."""

    rows: Indices
    lengths: Indices  # of runs, at least 1
    saved: int  # at least, in keys


def _runs(layout: StepLayout, rows: Indices, group: int, least_keys: int, rows_per_read: int) -> list[_Runs]:
    """By column, where any rows have the same page. Each column is twice as far as the one before."""
    pages, first = layout.kv_indices[group], layout.kv_indptr[rows]
    num_pages = layout.kv_indptr[rows + 1] - first
    found = []
    column = -(-least_keys // layout.page_size) - 1
    while np.count_nonzero(reached := num_pages > column) > 1:
        ids = pages.take(first[reached] + column)
        order = np.argsort(ids, kind="stable")
        lengths = _run_lengths(ids[order])
        reads = int((lengths - -(-lengths // rows_per_read)).sum())
        if not reads:
            break
        found.append(_Runs(rows[reached][order], lengths, reads * (column + 1) * layout.page_size))
        column = 2 * column + 1
    return found


def _groups(layout: StepLayout, runs: _Runs, group: int, least_keys: int, rows_per_read: int) -> _Groups:
    """The group of each run that saves most. Some runs have none."""
    rows, lengths, _ = runs
    begins = np.cumsum(lengths) - lengths
    run = np.repeat(np.arange(len(lengths)), lengths)
    leaders = rows[begins[run]]
    keys = _common_pages(layout, rows, leaders, group) * layout.page_size
    keys = np.minimum(keys, np.minimum(layout.seq_lens[rows], layout.seq_lens[leaders]))
    order = np.lexsort((-keys, run))  # the longest prefixes of each run first
    rows, keys = rows[order], keys[order]
    size = np.arange(len(rows)) - begins[run] + 1
    saved = np.where(keys >= least_keys, (size - -(-size // rows_per_read)) * keys, 0)
    best = np.maximum.reduceat(saved, begins)
    ends = np.flatnonzero((saved == best[run]) & (saved > 0))
    ends = ends[np.unique(run[ends], return_index=True)[1]]  # the smallest group that saves as much
    sizes = np.zeros(len(lengths), dtype=np.int64)
    sizes[run[ends]] = size[ends]
    return _Groups(rows[size <= sizes[run]], size[ends], keys[ends], int(saved[ends].sum()))


def _common_pages(layout: StepLayout, rows: Indices, leaders: Indices, group: int) -> Indices:
    """How many pages each row has in common with its leader, from the first on: by halving what is not known."""
    pages, first, last = layout.kv_indices[group], layout.kv_indptr[:-1], layout.kv_indptr[1:]
    ours, theirs = first[rows].astype(np.int64) - 1, first[leaders].astype(np.int64) - 1
    known = np.zeros(len(rows), dtype=np.int64)
    most = np.minimum(last[rows] - first[rows], last[leaders] - first[leaders]).astype(np.int64)
    for _ in range(int(most.max()).bit_length()):
        tried = (known + most + 1) // 2
        same = pages.take(ours + tried) == pages.take(theirs + tried)
        known, most = np.where(same, tried, known), np.where(same, most, tried - 1)
    return known


def _run_lengths(ids: NDArray[np.int32]) -> Indices:
    """The lengths of runs of equal numbers."""
    begins = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1], [True])))
    return begins[1:] - begins[:-1]


ITEM_FIELDS, ROW_FIELDS = 6, 4
_ITEMS_PER_PROCESSOR = 4
"""Programs of all KV heads for each multiprocessor beyond one for each row: then no item is longer than a quarter of an even share, nor the
most loaded multiprocessor more than a quarter above it."""


class DecodeWork(NamedTuple):
    """The attention of n decode rows over a window, as items of work. A row has one or more partial results: one for each item that it is
    in, or, if there is one alone, the result."""

    items: IntArray
    """[items, ITEM_FIELDS], longest first: where in `kv_indices` its pages begin; the first key and the one after the last; where in
    `rows[0]` its rows begin, and how many they are (0: nothing to compute); which of the partial results of each of its rows it is."""
    rows: IntArray
    """[ROW_FIELDS, n]: rows in the order of items; then by row where its partial results begin, -1 for a row with one alone; how many it
    has; and its number of keys."""
    num_partials: int  # of all rows with more than one


@dataclass(frozen=True, slots=True)
class WorkBounds:
    """How finely work is divided. The number of items does not depend on lengths, so that a graph can have room for them."""

    splits: int  # items beyond one for each row or each group of rows
    rows_per_item: int  # the most rows of an item
    least_keys: int  # of an item of a row that is split, and of a shared prefix
    key_block: int  # the length of an item is a multiple of it, but for the last one of a row or prefix

    @classmethod
    def of(cls, programs_per_item: int, processors: int, rows_per_item: int, least_keys: int, key_block: int) -> WorkBounds:
        splits = -(-_ITEMS_PER_PROCESSOR * processors // programs_per_item)
        return cls(splits, rows_per_item, -(-least_keys // key_block) * key_block, key_block)

    def max_items(self, num_rows: int) -> int:
        """Each row may have an item of its own, and each two rows one of a prefix; the others are splits."""
        return num_rows + (num_rows // 2 if self.rows_per_item > 1 else 0) + self.splits

    def max_partials(self, num_rows: int, window: int | None) -> int:
        """No row has several items where a window is no longer than the shortest.

        Work is at most `splits` times as long as a full item. A row that is split is longer than one, so it has less than twice as many
        splits as it is longer. Where there are prefixes, a row has up to two parts, and rows together are up to `rows_per_item` times
        as long as the work."""
        if window is not None and window <= self.least_keys:
            return 0
        if self.rows_per_item == 1 or num_rows == 1:
            return min(num_rows, self.splits) + self.splits
        return 2 * num_rows + self.rows_per_item * self.splits


def plan_decodes(layout: StepLayout, num_rows: int, group: int, span: Span, bounds: WorkBounds) -> DecodeWork:
    """The work of the first `num_rows` rows of a layout, each with one query, in the layers of a group and span. There are at most
    `bounds.max_items(num_rows)` items and `bounds.max_partials(num_rows, span.window)` partial results."""
    lengths = layout.seq_lens[:num_rows].astype(np.int64)
    begins = span.first(lengths - 1)
    members, first, count, keys = _prefixes(layout, lengths, begins, group, bounds)
    reads = -(-count // bounds.rows_per_item)
    in_prefix = members[np.arange(count.sum()) + np.repeat(first - np.cumsum(count) + count, count)]
    begins[in_prefix] = np.repeat(keys, count)
    own = lengths - begins

    work = int(own.sum()) + int((reads * keys).sum())
    longest = max(bounds.least_keys, -(-work // bounds.splits))
    longest = -(-longest // bounds.key_block) * bounds.key_block
    own_splits, own_size = _split(own, longest, bounds.key_block)
    prefix_splits, prefix_size = _split(keys, longest, bounds.key_block)
    splits_before = np.zeros_like(lengths)
    splits_before[in_prefix] = np.repeat(prefix_splits, count)

    # Parts of work, each to be split: those of prefixes, then those of rows.
    prefix = np.repeat(np.arange(len(reads)), reads)
    read = np.arange(len(prefix)) - np.repeat(np.cumsum(reads) - reads, reads)
    of_prefixes = np.stack((
        layout.kv_indptr[members[first[prefix]]],
        np.zeros_like(prefix),
        keys[prefix],
        first[prefix] + read * bounds.rows_per_item,
        np.minimum(count[prefix] - read * bounds.rows_per_item, bounds.rows_per_item),
        np.zeros_like(prefix),
    ))  # fmt: skip
    of_rows = np.stack((
        layout.kv_indptr[members],
        begins[members],
        lengths[members],
        np.arange(num_rows),
        np.ones_like(members),
        splits_before[members],
    ))  # fmt: skip
    parts = np.concatenate((of_prefixes, of_rows), axis=1)
    splits = np.concatenate((prefix_splits[prefix], own_splits[members]))
    sizes = np.concatenate((prefix_size[prefix], own_size[members]))

    split = np.arange(splits.sum()) - np.repeat(np.cumsum(splits) - splits, splits)
    items = np.repeat(parts, splits, axis=1)
    size = np.repeat(sizes, splits)
    items[1] += split * size
    items[2] = np.minimum(items[2], items[1] + size)
    items[5] += split
    items = items[:, np.argsort(items[1] - items[2], kind="stable")]

    partials = splits_before + own_splits
    kept = np.where(partials > 1, partials, 0)
    places = np.where(partials > 1, np.cumsum(kept) - kept, -1)
    rows = np.stack((members, places, partials, lengths)).astype(np.int32)
    return DecodeWork(np.ascontiguousarray(items.T.astype(np.int32)), rows, int(kept.sum()))


def _prefixes(layout: StepLayout, lengths: Indices, begins: Indices, group: int, bounds: WorkBounds) -> Prefixes:
    """The shared prefixes among the rows that are long enough and see their first key. A read for one row alone saves nothing, so that row
    leaves its group."""
    may_share = (begins == 0) & (lengths >= bounds.least_keys)
    found = shared_prefixes(layout, np.flatnonzero(may_share), group, bounds.least_keys, bounds.rows_per_item)
    sizes = found.sizes - (found.sizes % bounds.rows_per_item == 1)
    return Prefixes(np.concatenate((found.members, np.flatnonzero(~may_share))), found.first, sizes, found.keys)


def _split(lengths: Indices, longest: int, block: int) -> tuple[Indices, Indices]:
    """Into how many splits of which even size numbers of keys are divided, so that none is longer than `longest`."""
    size = -(-lengths // np.maximum(-(-lengths // longest), 1))
    size = np.maximum(-(-size // block) * block, block)
    return -(-lengths // size), size
