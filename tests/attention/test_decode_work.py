"""How decode work is divided: every key of every row once, within bounds, evenly, and prefixes once for several rows."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from slow_cases import slow_but

from aengine.attention import StepLayout, as_decodes, build_layout
from aengine.attention.decode_work import DecodeWork, WorkBounds, plan_decodes
from aengine.kernels.paged_cache import Span

HEADS, PROCESSORS = 8, 132  # KV heads of Qwen3-8B; of an H100
H100 = WorkBounds.of(programs_per_item=HEADS, processors=PROCESSORS, rows_per_item=16, least_keys=256, key_block=64)
ALL = Span(None)
FINE = WorkBounds(splits=7, rows_per_item=3, least_keys=8, key_block=4)


def layout_of(table: np.ndarray, lengths: list[int], page_size: int = 16) -> StepLayout:
    """One decode row for each length, whose pages are in `table` [groups, rows, columns]."""
    seq_lens = np.array(lengths, dtype=np.int32)
    return build_layout(np.arange(len(lengths), dtype=np.int32), len(lengths), seq_lens - 1, np.ones_like(seq_lens), table, page_size)


def own_pages(num_rows: int, columns: int, groups: int = 1) -> np.ndarray:
    return (1 + np.arange(groups * num_rows * columns, dtype=np.int32)).reshape(groups, num_rows, columns)


def check(work: DecodeWork, layout: StepLayout, group: int, span: Span, bounds: WorkBounds) -> None:
    """Every row gets every key that it sees once, from its own pages, and each of its partial results has a place of its own."""
    num_rows, pages = layout.num_rows, layout.kv_indices[group]
    members, places, partials, lengths = work.rows
    assert (lengths == layout.seq_lens).all()
    assert work.items.dtype == work.rows.dtype == np.int32
    assert len(work.items) <= bounds.max_items(num_rows)
    assert work.num_partials <= bounds.max_partials(num_rows, span.window)
    assert sorted(members) == list(range(num_rows))
    keys: list[list[int]] = [[] for _ in range(num_rows)]
    splits: list[list[int]] = [[] for _ in range(num_rows)]
    for at, begin, end, first, count, split in work.items:
        assert begin < end
        assert 1 <= count <= bounds.rows_per_item
        read = [pages[at + key // layout.page_size] for key in range(begin, end)]
        for row in members[first : first + count]:
            assert [pages[layout.kv_indptr[row] + key // layout.page_size] for key in range(begin, end)] == read
            keys[row] += range(begin, end)
            splits[row].append(split)
    taken = set()
    for row, length in enumerate(layout.seq_lens):
        window = span.window or length
        begin = (length - 1) // window * window if span.chunked else max(0, length - window)
        assert sorted(keys[row]) == list(range(begin, length))
        assert sorted(splits[row]) == list(range(partials[row]))
        assert (places[row] >= 0) == (partials[row] > 1)
        mine = set(range(places[row], places[row] + partials[row])) if partials[row] > 1 else set()
        assert not taken & mine
        taken |= mine
    assert taken == set(range(work.num_partials))
    assert (np.diff(work.items[:, 2] - work.items[:, 1]) <= 0).all()


@pytest.mark.parametrize("seed", slow_but(range(12), range(60)))
def test_every_key_once(seed: int) -> None:
    """Rows that fork from one another at random places, over several groups of layers, with and without windows."""
    rng = np.random.default_rng(seed)
    num_rows, page_size = int(rng.integers(1, 30)), int(rng.choice([1, 4, 16]))
    lengths = rng.integers(1, rng.choice([20, 200]), num_rows)
    table = own_pages(num_rows, 200 // page_size + 1, groups=2)
    for row in range(1, num_rows):
        if rng.random() < 0.7:
            parent = int(rng.integers(row))
            shared = int(rng.integers(lengths[parent] // page_size + 1))
            table[:, row, :shared] = table[:, parent, :shared]
            lengths[row] = max(lengths[row], shared * page_size + 1)
    layout = layout_of(table, list(lengths), page_size)
    for bounds in (FINE, WorkBounds(splits=1, rows_per_item=1, least_keys=4, key_block=4), H100):
        for span in (ALL, Span(1), Span(7), Span(50), Span(7, True), Span(50, True)):
            for group in range(2):
                check(plan_decodes(layout, num_rows, group, span, bounds), layout, group, span, bounds)


def loads(work: DecodeWork) -> np.ndarray:
    """Keys of KV heads that each multiprocessor reads, where each program goes to the one that has least, in the order of the grid."""
    busy = [(0, processor) for processor in range(PROCESSORS)]
    for keys in np.repeat(work.items[:, 2] - work.items[:, 1], HEADS):
        load, processor = busy[0]
        heapq.heapreplace(busy, (load + int(keys), processor))
    return np.array([load for load, _ in busy])


@pytest.mark.parametrize(
    "lengths",
    [[512] * 63 + [32768], [32768], [1024] * 32, [1024] * 256, [8192] * 3, list(range(100, 20000, 300))],
    ids=["one long", "alone", "32 x 1k", "256 x 1k", "3 x 8k", "all lengths"],
)
def test_it_is_even(lengths: list[int]) -> None:
    """An even share of the ragged case, 63 rows of 512 keys and one of 32k, is 3,941 keys of a head: 2 MB of the 266 MB of a layer, which
    takes 89 us at 3 TB/s. Without splits the long row alone would be 8.3 shares."""
    layout = layout_of(own_pages(len(lengths), max(lengths) // 16 + 1), lengths)
    work = plan_decodes(layout, len(lengths), 0, ALL, H100)
    check(work, layout, 0, ALL, H100) if len(lengths) < 5 else None
    share = sum(lengths) * HEADS / PROCESSORS
    assert loads(work).max() <= 1.3 * share
    assert len(work.items) <= len(lengths) + H100.splits


def test_short_rows_are_whole() -> None:
    layout = layout_of(own_pages(40, 17), [256] * 40)
    work = plan_decodes(layout, 40, 0, ALL, H100)
    assert len(work.items) == 40
    assert work.num_partials == 0
    assert (work.rows[1] == -1).all()


def read_keys(work: DecodeWork) -> int:
    return int((work.items[:, 2] - work.items[:, 1]).sum())


def test_a_common_prompt_is_read_once_for_several_rows() -> None:
    table = own_pages(100, 320)
    table[0, :, :250] = table[0, 0, :250]
    work = plan_decodes(layout_of(table, [5000] * 100), 100, 0, ALL, H100)
    assert read_keys(work) == 7 * 4000 + 100 * 1000
    assert loads(work).max() <= 1.3 * read_keys(work) * HEADS / PROCESSORS


def test_what_is_shared_most_is_chosen() -> None:
    """Pairs that share a little more than all rows do stay with the others; groups that share much more do not."""
    table = own_pages(64, 320)
    table[0, :, :250] = table[0, 0, :250]
    for row in range(0, 64, 2):
        table[0, row : row + 2, :270] = table[0, row, :270]
    assert read_keys(plan_decodes(layout_of(table, [5000] * 64), 64, 0, ALL, H100)) == 4 * 4000 + 64 * 1000
    for row in range(0, 64, 16):
        table[0, row : row + 16, :310] = table[0, row, :310]
    assert read_keys(plan_decodes(layout_of(table, [5000] * 64), 64, 0, ALL, H100)) == 4 * 4960 + 64 * 40


def test_groups_of_other_lengths_and_the_rest() -> None:
    table = own_pages(23, 640)
    table[0, :10, :600] = table[0, 0, :600]
    table[0, 10:14, :20] = table[0, 10, :20]
    table[0, 14:16, :15] = table[0, 14, :15]  # less than 256 keys
    layout = layout_of(table, [9700] * 10 + [400] * 13)
    work = plan_decodes(layout, 23, 0, ALL, H100)
    check(work, layout, 0, ALL, H100)
    assert read_keys(work) == 9600 + 10 * 100 + 320 + 4 * 80 + 9 * 400


def test_drafts_read_their_sequence_once() -> None:
    """A chunk with drafts is decode rows of the same pages, to the last one."""
    starts = np.array([3000, 700], dtype=np.int32)
    chunks = build_layout(np.arange(2, dtype=np.int32), 0, starts, np.full(2, 5, dtype=np.int32), own_pages(2, 200), 16)
    layout = as_decodes(chunks)
    work = plan_decodes(layout, 10, 0, ALL, H100)
    check(work, layout, 0, ALL, H100)
    assert read_keys(work) == 3001 + 701 + 2 * (1 + 2 + 3 + 4)


def test_what_is_behind_a_window_is_not_shared() -> None:
    """The pages there are all the reserved one."""
    table = own_pages(8, 100)
    table[0, :, :50] = 0
    layout = layout_of(table, [1300] * 8)
    work = plan_decodes(layout, 8, 0, Span(500), H100)
    check(work, layout, 0, Span(500), H100)
    assert read_keys(work) == 8 * 500


def test_padding_rows() -> None:
    """One key each, of the reserved page; with pages that are longer than what must be shared at least."""
    layout = layout_of(np.zeros((1, 30, 1), dtype=np.int32), [1] * 30, page_size=256)
    work = plan_decodes(layout, 30, 0, ALL, H100)
    check(work, layout, 0, ALL, H100)
    assert len(work.items) == 30


def test_windows_that_split_no_row_have_no_partial_results() -> None:
    assert H100.max_partials(256, 256) == 0
    layout = layout_of(own_pages(3, 100), [1500] * 3)
    assert plan_decodes(layout, 3, 0, Span(256), H100).num_partials == 0
    assert plan_decodes(layout, 3, 0, Span(257), H100).num_partials == 6
