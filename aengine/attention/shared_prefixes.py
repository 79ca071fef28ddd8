"""Which rows of a step begin with the same pages, so that these are read once for several rows.

Owns the choice of such groups, with numpy on the host. Knows nothing of where pages come from. The keys of a page follow from all tokens up
to it, so rows that have the same page in the same place have the same tokens before it: only that page need be compared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.attention.metadata import StepLayout

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
