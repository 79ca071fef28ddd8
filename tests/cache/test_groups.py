"""Layer groups, the arithmetic of their pages, and prefixes of sequences with windows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from aengine.cache import PageCache, PageChain, PageNeeds, layer_groups

PAGE_SIZE = 2


class TestLayerGroups:
    @pytest.mark.parametrize("window", [None, 512])
    def test_layers_of_one_kind_are_one_group(self, window: int | None) -> None:
        groups = layer_groups([window] * 26)
        assert (groups.windows, groups.layers_per_page) == ((window,), 26)
        assert groups.places == tuple((0, layer) for layer in range(26))

    @pytest.mark.parametrize(
        ("windows", "layers", "layers_per_page"),
        [
            ([None] * 9, range(0, 4), 4),
            ([128, None] * 12, range(8, 16), 4),
            (([1024] * 5 + [None]) * 4, range(0, 12), 2),  # four kept wholly, in pages of four layers: half of each
            ([None] * 6 + [8] * 6, range(0, 6), 6),  # the stage has no layer with a window, and pages of that group all the same
        ],
    )
    def test_a_stage_has_the_groups_of_the_model_in_smaller_pages(
        self, windows: list[int | None], layers: range, layers_per_page: int
    ) -> None:
        whole = layer_groups(windows)
        part = whole.of_layers(layers)
        assert (part.windows, part.layers_per_page) == (whole.windows, layers_per_page)
        assert [part.windows[group] for group, _ in part.places] == [windows[layer] for layer in layers]
        assert len(set(part.places)) == len(layers)
        assert max(place for _, place in part.places) < layers_per_page

    @pytest.mark.parametrize(
        ("windows", "expected", "layers_per_page"),
        [
            ([128, None] * 12, (None, 128), 12),
            (([1024] * 5 + [None]) * 5 + [1024] * 4, (None, *[1024] * 6), 5),  # one place in groups with windows is of no layer
            (([1024] * 5 + [None]) * 10 + [1024] * 2, (None, *[1024] * 6), 10),
            ([None, None, None, 8, 8], (None, None, None, 8, 8), 1),  # two layers per page would leave a place without a window unused
            ([8] * 5 + [16] * 3, (8, 8, 16), 3),
            ([16, None, 8, None, 16, 8], (None, 8, 16), 2),
            ([None] * 28 + [4096] * 4, (*[None] * 7, 4096), 4),
        ],
    )
    def test_kinds_are_cut_into_groups_of_as_many_layers(
        self, windows: list[int | None], expected: tuple[int | None, ...], layers_per_page: int
    ) -> None:
        groups = layer_groups(windows)
        assert (groups.windows, groups.layers_per_page) == (expected, layers_per_page)
        assert len(set(groups.places)) == len(windows), "two layers have one place"
        for window, (group, index) in zip(windows, groups.places, strict=True):
            assert groups.windows[group] == window
            assert index < layers_per_page

    def test_layers_that_keep_less_share_places(self) -> None:
        """Two sliding layers in the place of a full one; of seven the last has a place for itself."""
        windows, per_place = [8, 8, None, 8, 8, None, 8, 8, 8], [2, 2, 1, 2, 2, 1, 2, 2, 2]
        groups = layer_groups(windows, per_place)
        assert (groups.windows, groups.layers_per_page) == ((None, 8, 8), 2)
        assert groups.places == ((1, 0), (1, 0), (0, 0), (1, 1), (1, 1), (0, 1), (2, 0), (2, 0), (2, 1))
        assert groups.parts == (0, 1, 0, 0, 1, 0, 0, 1, 0)
        part = groups.of_layers(range(4, 9))
        assert (part.windows, part.layers_per_page) == (groups.windows, 1)
        assert (part.places, part.parts) == (((1, 0), (0, 0), (1, 0), (2, 0), (2, 0)), (0, 0, 1, 0, 1))

    def test_layers_of_other_shares_have_other_places(self) -> None:
        """Even where they keep the same tokens."""
        groups = layer_groups([None] * 5, [2, 1, 2, 1, 2])
        assert groups.parts == (0, 0, 1, 0, 0)
        assert len(set(zip(groups.places, groups.parts, strict=True))) == 5
        assert groups.places[0] == groups.places[2]


class TestPageNeeds:
    def test_one_group_without_a_window_needs_a_page_for_each_column(self) -> None:
        needs = PageNeeds((None,), 16, 512)
        assert [needs.pages(columns) for columns in (0, 1, 100)] == [0, 1, 100]
        assert (needs.longest(9, 1000), needs.longest(9, 100), needs.longest(0, 100)) == (144, 100, 0)

    def test_a_window_bounds_what_its_groups_need(self) -> None:
        needs = PageNeeds((None, 32, 32), 16, 64)
        most = needs.kinds[0].most_columns
        assert most == (2 * 64 + 32 - 2) // 16 + 2
        assert needs.pages(most) == 3 * most
        assert needs.pages(most + 10) == 3 * most + 10
        for num_pages in range(60):
            longest = needs.longest(num_pages, 10_000)
            assert needs.pages(longest // 16) <= num_pages < needs.pages(longest // 16 + 1)

    def test_with_windows_alone_nothing_is_too_long(self) -> None:
        assert PageNeeds((32,), 16, 64).longest(11, 10_000) == 10_000
        assert PageNeeds((32,), 16, 64).longest(10, 10_000) == 160

    def test_the_first_column_that_a_query_reads(self) -> None:
        (kind,) = PageNeeds((5,), 4, 8).kinds
        assert [kind.first_column(position) for position in (0, 4, 7, 8, 11, 12)] == [0, 0, 0, 1, 1, 2]
        np.testing.assert_array_equal(kind.first_column(np.array([0, 8, 12], np.int32)), [0, 1, 2])


def test_prefixes_need_the_pages_of_their_windows_alone() -> None:
    """Against a search over all lengths, with pages published at random."""
    rng = random.Random(0)
    lengths = []
    for _ in range(300):
        windows = rng.choice([(None, 5), (None, 3, 3, 8), (6,), (None, None, 1), (4, 9)])
        needs = PageNeeds(windows, PAGE_SIZE, 4)
        cache = PageCache(100, PAGE_SIZE)
        tokens = np.arange(18, dtype=np.int32)
        chain = PageChain(PAGE_SIZE)
        chain.extend(tokens)
        published = np.zeros((len(windows), 9), np.int32)
        for column in range(9):
            published[:, column] = cache.allocate(len(windows))
            cache.publish(
                published[:, column].tolist(), chain.digests[column], tokens[column * PAGE_SIZE : (column + 1) * PAGE_SIZE].tobytes()
            )
        for lost in np.argwhere(np.array([[rng.random() < 0.1 for _ in range(9)] for _ in windows])):
            cache.index.remove(int(published[tuple(lost)]))
            published[tuple(lost)] = 0

        def needed(length: int, windows: tuple[int | None, ...] = windows) -> list[range]:
            first_read = [0 if window is None else max(0, length * PAGE_SIZE - window + 1) for window in windows]
            return [range(first // PAGE_SIZE, length) for first in first_read]

        expected = max(
            length for length in range(9) if all(published[group, list(columns)].all() for group, columns in enumerate(needed(length)))
        )
        hits = cache.match(chain, tokens, needs).pages
        assert hits.shape == (len(windows), expected)
        for group, columns in enumerate(needed(expected)):
            assert hits[group].tolist() == [published[group, column] if column in columns else 0 for column in range(expected)]
        lengths.append(expected)
    assert {0, 8} < set(lengths)
