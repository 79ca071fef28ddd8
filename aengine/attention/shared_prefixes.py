"""Which rows of a step begin with the same pages, so that these are read once for several rows.

Owns the choice of such groups, with numpy on the host. Knows nothing of where pages come from: rows share what their page ids say, and
every page of a prefix is compared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.attention.metadata import StepLayout

IntArray = NDArray[np.int32]
_ROUNDS = 3  # the most choices of a length; rows that are in no group then are read one by one
_NO_GROUPS = np.zeros(0, dtype=np.int64)


class Prefixes(NamedTuple):
    """Groups of rows that begin with the same keys. Group g has the rows `members[first[g]:first[g] + count[g]]`."""

    members: NDArray[np.int64]  # all rows, those of a group one after another
    first: NDArray[np.int64]
    count: NDArray[np.int64]  # at least 2
    keys: NDArray[np.int64]  # common to all rows of a group


def shared_prefixes(layout: StepLayout, rows: NDArray[np.int64], group: int, least_keys: int, rows_per_read: int) -> Prefixes:
    """Groups among `rows` (ascending) of a layout that share at least `least_keys` keys in layer group `group`, where one read of keys
    serves up to `rows_per_read` rows.

    A group is not always as large as it could be: groups are chosen to save many reads, first among prefixes of about one length.
    """
    chosen: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
    left = rows
    for _ in range(_ROUNDS if rows_per_read > 1 else 0):
        runs = _best_runs(layout, left, group, least_keys, rows_per_read)
        if runs is None:
            break
        members, counts, keys = _groups(layout, *runs, group, rows_per_read)
        enough = keys >= least_keys
        members, counts, keys = members[np.repeat(enough, counts)], counts[enough], keys[enough]
        if not len(counts):
            break
        chosen.append((members, counts, keys))
        left = np.setdiff1d(left, members, assume_unique=True)
    if not chosen:
        return Prefixes(rows, _NO_GROUPS, _NO_GROUPS, _NO_GROUPS)
    members, counts, keys = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
    return Prefixes(np.concatenate((members, left)), np.cumsum(counts) - counts, counts, keys)


def _best_runs(
    layout: StepLayout, rows: NDArray[np.int64], group: int, least_keys: int, rows_per_read: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Rows with the same page in a column, one run after another, and the length of each run (1 or more); of the columns tried the one
    where most is saved. Columns double, because lengths matter by their ratio. None: there are no such rows."""
    pages = layout.kv_indices[group]
    num_pages = layout.kv_indptr[rows + 1] - layout.kv_indptr[rows]
    best, runs = 0, None
    column = -(-least_keys // layout.page_size) - 1
    while True:
        reached = rows[num_pages > column]
        if len(reached) < 2:
            return runs
        ids = pages.take(layout.kv_indptr[reached] + column)
        order = np.argsort(ids, kind="stable")
        lengths = _run_lengths(ids[order])
        saved = int((lengths - -(-lengths // rows_per_read)).sum()) * (column + 1)
        if not saved:
            return runs
        if saved > best:
            best, runs = saved, (reached[order], lengths)
        column = 2 * column + 1


def _groups(
    layout: StepLayout, rows: NDArray[np.int64], lengths: NDArray[np.int64], group: int, rows_per_read: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The group of each run that saves most: its rows, how many they are, and how many keys they share. Some runs have none."""
    begins = np.cumsum(lengths) - lengths
    run = np.repeat(np.arange(len(lengths)), lengths)
    leaders = rows[begins[run]]
    keys = _common_pages(layout, rows, leaders, group) * layout.page_size
    keys = np.minimum(keys, np.minimum(layout.seq_lens[rows], layout.seq_lens[leaders]))
    order = np.lexsort((-keys, run))  # the longest prefixes of each run first
    rows, keys = rows[order], keys[order]
    size = np.arange(len(rows)) - begins[run] + 1
    saved = (size - -(-size // rows_per_read)) * keys
    best = np.maximum.reduceat(saved, begins)
    ends = np.flatnonzero((saved == best[run]) & (saved > 0))
    ends = ends[np.unique(run[ends], return_index=True)[1]]  # the smallest group that saves as much
    counts = np.zeros(len(lengths), dtype=np.int64)
    counts[run[ends]] = size[ends]
    return rows[size <= counts[run]], size[ends], keys[ends]


def _common_pages(layout: StepLayout, rows: NDArray[np.int64], leaders: NDArray[np.int64], group: int) -> NDArray[np.int64]:
    """How many pages each row has in common with its leader, from the first on."""
    pages, indptr = layout.kv_indices[group], layout.kv_indptr.astype(np.int64)
    limits = np.minimum(indptr[rows + 1] - indptr[rows], indptr[leaders + 1] - indptr[leaders])
    common = np.zeros(len(rows), dtype=np.int64)
    active, begin, width = np.arange(len(rows)), 0, 16
    while len(active):
        columns = begin + np.arange(width)
        ours, theirs = (pages.take(indptr[each[active], None] + columns, mode="clip") for each in (rows, leaders))
        same = (ours == theirs) & (columns < limits[active, None])
        equal = np.where(same.all(axis=1), width, same.argmin(axis=1))
        common[active] += equal
        active = active[equal == width]
        begin, width = begin + width, 2 * width
    return common


def _run_lengths(ids: IntArray) -> NDArray[np.int64]:
    """The lengths of runs of equal numbers."""
    begins = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1], [True])))
    return begins[1:] - begins[:-1]
