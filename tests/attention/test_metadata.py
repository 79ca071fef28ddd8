"""The metadata format against the plainest way to write it down, and what it costs."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from aengine.attention import StepLayout, as_decodes, build_layout


@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
@pytest.mark.parametrize("seed", range(5))
def test_layout_equals_a_loop(page_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.permutation(2 * 50 * 40).reshape(2, 50, 40).astype(np.int32)
    count, num_decodes = 12, 7
    rows = rng.permutation(50)[:count].astype(np.int32)
    lengths = np.where(np.arange(count) < num_decodes, 1, rng.integers(1, 20, count)).astype(np.int32)
    starts = rng.integers(0, 40 * page_size - lengths + 1).astype(np.int32)
    starts[-1] = 0
    layout = build_layout(rows, num_decodes, starts, lengths, table, page_size)

    qo, kv, last, positions = [0], [0], [], []
    indices: list[list[int]] = [[], []]
    slots: list[list[int]] = [[], []]
    for row, start, length in zip(rows, starts, lengths, strict=True):
        end = start + length
        pages = -(-end // page_size)
        qo.append(qo[-1] + length)
        kv.append(kv[-1] + pages)
        for group in range(2):
            indices[group] += table[group, row, :pages].tolist()
            slots[group] += [table[group, row, at // page_size] * page_size + at % page_size for at in range(start, end)]
        last.append(end - (pages - 1) * page_size)
        positions += range(start, end)
    for name, expected in {
        "qo_indptr": qo,
        "kv_indptr": kv,
        "kv_indices": indices,
        "last_page_len": last,
        "slot_mapping": slots,
        "positions": positions,
        "seq_lens": starts + lengths,
    }.items():
        array = getattr(layout, name)
        assert array.dtype == np.int32, name
        assert array.tolist() == list(expected), name
    assert (layout.num_rows, layout.num_tokens, layout.num_decodes) == (count, len(positions), num_decodes)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_each_token_as_a_row(page_size: int) -> None:
    """The layout of as many rows with the same pages, each of which computes one of the tokens."""
    rng = np.random.default_rng(page_size)
    table = rng.permutation(2 * 10 * 40).reshape(2, 10, 40).astype(np.int32)
    rows, lengths = np.array([7, 2, 9, 0], np.int32), np.array([1, 5, 1, 3], np.int32)
    starts = np.array([0, 4, 6, 2], np.int32)
    found = as_decodes(build_layout(rows, 1, starts, lengths, table, page_size))
    each, positions = np.repeat(rows, lengths), np.concatenate([np.arange(at, at + n) for at, n in zip(starts, lengths, strict=True)])
    expected = build_layout(each, 10, positions.astype(np.int32), np.ones(10, np.int32), table, page_size)
    for name in StepLayout.__slots__:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), strict=name in StepLayout.__slots__[2:])


def test_no_call_is_made_for_each_decode_row() -> None:
    """256 rows take about 0.1 ms; a loop over rows would take several."""
    rng = np.random.default_rng(0)
    table = rng.permutation(256 * 128).reshape(1, 256, 128).astype(np.int32)
    calls: list[str] = []

    def num_calls(num_rows: int) -> int:
        rows, lengths = np.arange(num_rows, dtype=np.int32), np.ones(num_rows, dtype=np.int32)
        starts = rng.integers(100, 500, num_rows).astype(np.int32)
        calls.clear()
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            build_layout(rows, num_rows, starts, lengths, table, 16)
        finally:
            sys.setprofile(None)
        return len(calls)

    assert num_calls(256) == num_calls(8)
