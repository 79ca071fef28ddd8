"""Sizes of captured steps, and the padding of decode steps to them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from aengine.attention import StepLayout, build_layout
from aengine.runner.torch.buckets import DecodeArrays, DecodeFrame, GraphBytes, GraphSizes, decode_sizes, fitting, token_sizes, uneven_sizes

GROUPS = 2
SPARE = 77


def test_sizes_of_decode_steps() -> None:
    assert decode_sizes(256) == (1, 2, 4, *range(8, 257, 8))
    assert len(decode_sizes(256)) == 35
    assert decode_sizes(1) == (1,)
    assert decode_sizes(3) == (1, 2, 3)
    assert decode_sizes(100) == (1, 2, 4, *range(8, 97, 8), 100)
    assert decode_sizes(600)[34:] == (256, 288, 320, 352, 384, 416, 448, 480, 512, 576, 600)
    for most in range(1, 1500, 7):
        sizes = decode_sizes(most)
        assert sizes[-1] == most
        assert list(sizes) == sorted(set(sizes))
        assert all(high - low <= max(8, low // 8) for low, high in itertools.pairwise(sizes)), "little padding"
    assert len(decode_sizes(65536)) < 110


def test_sizes_of_steps_with_prompt_tokens() -> None:
    assert token_sizes(0) == ()
    assert token_sizes(1) == (1,)
    assert token_sizes(40) == (16, 32, 40)
    assert token_sizes(512) == (16, 32, 64, 96, 128, 192, 256, 384, 512)
    assert token_sizes(600)[-3:] == (384, 512, 600)
    assert len(token_sizes(2048)) == 21
    assert token_sizes(3000)[-6:] == (1920, 2048, 2304, 2560, 2816, 3000)
    for most in range(1, 9000, 11):
        sizes = token_sizes(most)
        assert sizes[-1] == most
        assert list(sizes) == sorted(set(sizes))
        assert all(high - low <= 128 or high - low <= low // 8 for low, high in itertools.pairwise(sizes)), "little padding"


def test_sizes_of_a_configuration() -> None:
    assert GraphSizes.of(None, 512, 4, 2048) == GraphSizes((1, 2, 4), token_sizes(512))
    assert GraphSizes.of((8, 2, 8), 512, 16, 100) == GraphSizes((2, 8), token_sizes(100))
    assert GraphSizes.of((3,), 0, 16, 100) == GraphSizes((3,), ())
    assert GraphSizes.of(None, 0, 256, 2048).uneven == (64, 128, 256)
    assert GraphSizes.of(None, 0, 6, 100, most_drafts=4).rows == (1, 2, 4, 8, 16, 24, 30), "of steps that verify drafts, too"
    assert GraphSizes.of(None, 0, 100, 2048, most_drafts=4).rows[-1] == 128
    assert GraphSizes.of(None, 0, 200, 2048, most_drafts=4).rows[-1] == 200


def test_sizes_of_uneven_steps() -> None:
    assert uneven_sizes(31) == ()
    assert uneven_sizes(32) == (32,)
    assert uneven_sizes(64) == (64,)
    assert uneven_sizes(65) == (64, 65)
    assert uneven_sizes(300) == (64, 128, 256, 300)


@pytest.mark.parametrize(("count", "size"), [(1, 2), (2, 2), (3, 8), (8, 8), (9, None)])
def test_the_smallest_that_fits(count: int, size: int | None) -> None:
    assert fitting((2, 8), count) == size
    assert fitting((), count) is None


def test_bytes_of_all_graphs_from_those_of_the_largest() -> None:
    sizes = GraphSizes((1, 2, 4, 8), (16, 32, 64))
    assert sizes.largest_two() == GraphSizes((4, 8), (32, 64))
    assert GraphBytes(1000, (100, 10), (50, 7)).of_all(sizes) == 1000 + 100 + 3 * 10 + 50 + 2 * 7
    few = GraphSizes((8,), (32, 64))
    assert few.largest_two() == few
    assert GraphBytes(1000, (100,), (50, 7)).of_all(few) == GraphBytes(1000, (100,), (50, 7)).total() == 1157
    assert GraphBytes(1, (2, 3), ()) + GraphBytes(10, (20, 30), ()) == GraphBytes(11, (22, 33), ())
    assert GraphBytes(5, (2,), ()).of_all(GraphSizes((8,), ())) == 7
    uneven = GraphSizes((256,), (), (64, 128, 256))
    assert uneven.largest_two() == GraphSizes((256,), (), (128, 256))
    assert GraphBytes(5, (2,), (), (20, 3)).of_all(uneven) == 5 + 2 + 20 + 3 + 3
    assert GraphBytes(5, (2,), ()).of_all(uneven) == 7, "there are no other kernels"
    assert GraphBytes(5, (2,), (), (20, 3)) + GraphBytes(5, (2,), ()) == GraphBytes(10, (4,), (), (20, 3))


def random_decodes(rng: np.random.Generator, count: int, page_size: int) -> tuple[StepLayout, np.ndarray]:
    rows = rng.permutation(64)[:count].astype(np.int32)
    page_table = rng.integers(1, 1000, (GROUPS, 64, 40 // page_size + 1), dtype=np.int32)
    starts = rng.integers(0, 40, count, dtype=np.int32)
    return build_layout(rows, count, starts, np.ones(count, np.int32), page_table, page_size), rows


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_padded_steps(page_size: int) -> None:
    """Real rows as they were; padding rows of length 1 on page 0 that write nothing; whatever the array held before."""
    rng = np.random.default_rng(page_size)
    frame = DecodeFrame(24, GROUPS)
    for _ in range(200):
        count = int(rng.integers(0, 25))
        size = int(rng.integers(max(count, 1), 25))
        layout, rows = random_decodes(rng, count, page_size)
        num_pages = layout.kv_indices.shape[1]
        out = rng.integers(-(2**31), 2**31 - 1, frame.length(num_pages + size - count) + 5, dtype=np.int32)
        rest = out[-5:].copy()
        padded = frame.pack(layout, rows, size, SPARE, out)

        assert (padded.num_rows, padded.num_tokens, padded.num_decodes, padded.page_size) == (size, size, size, page_size)
        for name in ("seq_lens", "last_page_len", "positions", "slot_mapping"):
            np.testing.assert_array_equal(getattr(padded, name)[..., :count], getattr(layout, name))
        np.testing.assert_array_equal(padded.kv_indptr[: count + 1], layout.kv_indptr)
        np.testing.assert_array_equal(padded.kv_indices[:, :num_pages], layout.kv_indices)
        np.testing.assert_array_equal(padded.qo_indptr, np.arange(size + 1))

        assert (padded.seq_lens[count:] == 1).all()
        assert (padded.last_page_len[count:] == 1).all()
        assert (padded.positions[count:] == 0).all()
        assert (padded.slot_mapping[:, count:] == -1).all()
        assert (np.diff(padded.kv_indptr[count:]) == 1).all()
        assert (padded.kv_indices[:, num_pages:] == 0).all()
        assert padded.kv_indptr[-1] == padded.kv_indices.shape[1]

        arrays = frame.split(out, size, padded.kv_indices.shape[1])
        np.testing.assert_array_equal(arrays.rows, [*rows, *[SPARE] * (size - count)])
        for name in ("positions", "slot_mapping", "last_page_len", "seq_lens", "kv_indptr"):
            np.testing.assert_array_equal(getattr(arrays, name), getattr(padded, name))
        np.testing.assert_array_equal(arrays.kv_indices, padded.kv_indices)
        np.testing.assert_array_equal(out[-5:], rest)
        for name in StepLayout.__slots__[2:-2]:  # those that every step has
            assert getattr(padded, name).dtype == np.int32, name


def parts(frame: DecodeFrame, numbers: np.ndarray, size: int) -> list[np.ndarray]:
    """All arrays of one dimension."""
    arrays = frame.split(numbers, size, 5)
    return [row for name in DecodeArrays.__slots__ for row in np.atleast_2d(getattr(arrays, name))]


def test_arrays_do_not_overlap_and_do_not_move() -> None:
    """A graph of each size reads the same addresses, aligned, page ids last."""
    for max_rows in (1, 2, 31, 32, 33, 256):
        frame = DecodeFrame(max_rows, GROUPS)
        numbers = np.arange(frame.length(5), dtype=np.int32)
        whole = parts(frame, numbers, max_rows)
        assert all(array[0] % 32 == 0 for array in whole[:-1])
        assert all(before[-1] < after[0] for before, after in itertools.pairwise(whole))
        for size in range(1, max_rows):
            arrays = parts(frame, numbers, size)
            assert [array[0] for array in arrays] == [array[0] for array in whole]
            assert [len(array) for array in arrays] == [size] * 4 + [size + 1] + [size] * GROUPS + [5] * GROUPS


def test_a_step_of_padding_alone() -> None:
    frame = DecodeFrame(4, GROUPS)
    out = np.full(frame.length(4), -9, dtype=np.int32)
    none = np.zeros(0, np.int32)
    padded = frame.pack(build_layout(none, 0, none, none, np.zeros((GROUPS, 1, 1), np.int32), 16), none, 4, SPARE, out)
    assert padded.seq_lens.tolist() == [1, 1, 1, 1]
    assert padded.kv_indptr.tolist() == [0, 1, 2, 3, 4]
    assert frame.split(out, 4, 4).rows.tolist() == [SPARE] * 4
