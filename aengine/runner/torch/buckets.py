"""Sizes of captured steps, and how a decode step is padded to one of them.

Owns the choice of a size, the padding, and the places of a padded step's arrays in one int32 array, so that a step is one upload.
Knows nothing of devices, models or graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.attention import StepLayout, StepStates
from aengine.runner.contract import IntArray

ArrayT = TypeVar("ArrayT", IntArray, Tensor)
_VERIFIED_TOKENS = 128
_MOST_PLAIN = 64  # rows, from which on the launches that adapters add are a small part of a step
_ALIGNMENT = 32  # int32 numbers: 128 bytes, the alignment that kernels may rely on


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes of steps for which graphs are recorded. All ascending; all but `rows` may be empty."""

    rows: tuple[int, ...]  # of decode steps, and of those that verify drafts
    tokens: tuple[int, ...]  # of steps with prompt tokens
    uneven: tuple[int, ...] = ()  # as `rows`, of steps whose lengths differ much, where the attention backend has other kernels for them
    plain: tuple[int, ...] = ()  # as `rows`, of steps without adapters, where the model has some

    @classmethod
    def of(
        cls,
        graph_sizes: tuple[int, ...] | None,
        graph_tokens: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        most_drafts: int = 0,
        adapters: bool = False,
    ) -> GraphSizes:
        """From the fields of an `EngineConfig`. `adapters`: whether the model has some. In a step that verifies drafts each token is a row:
        there are graphs of up to `_VERIFIED_TOKENS` of them, since drafts do not pay in wider steps."""
        most = max(max_num_seqs, min(max_num_seqs * (1 + most_drafts), _VERIFIED_TOKENS, max_num_batched_tokens))
        rows = tuple(sorted(set(graph_sizes))) if graph_sizes is not None else decode_sizes(most)
        plain = tuple(size for size in rows if size <= _MOST_PLAIN) if adapters else ()
        return cls(rows, token_sizes(min(graph_tokens, max_num_batched_tokens)), uneven_sizes(rows[-1]), plain)

    def largest_two(self) -> GraphSizes:
        """The largest two of each kind."""
        return GraphSizes(*(sizes[-2:] for sizes in self.kinds))

    @property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of each kind, in the order of those of `GraphBytes`."""
        return self.rows, self.tokens, self.uneven, self.plain


def decode_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8th up to 256, then eight per doubling; `most` is always the last."""
    sizes = [1, 2, 4, *range(8, 257, 8)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 4)))
    return (*(size for size in sizes if size < most), most)


def token_sizes(most: int) -> tuple[int, ...]:
    """16, 32, 64, 96, 128, 192, 256, every 128th up to 2,048, then every 256th; `most` is the last. None for 0.

    Products of so many tokens take what arithmetic takes, in tiles of 128 or 256 tokens, so that this padding is hardly seen.
    """
    if most == 0:
        return ()
    sizes = (16, 32, 64, 96, 128, 192, *range(256, 2048, 128), *range(2048, most, 256))
    return (*(size for size in sizes if size < most), most)


def uneven_sizes(most: int) -> tuple[int, ...]:
    """Powers of two from 64 on; `most` is the last. None below 32, where rows are split over all multiprocessors anyway."""
    return (*(1 << power for power in range(6, (most - 1).bit_length())), most) if most >= 32 else ()


def fitting(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `count`."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """What graphs and their buffers took of a device, in bytes."""

    buffers: int
    rows: tuple[int, ...]  # by graph of decodes, largest first; those after the first use its memory again
    tokens: tuple[int, ...]  # by graph of steps with prompt tokens, in the same way
    uneven: tuple[int, ...] = ()  # by graph of uneven decodes; none where the attention backend has no other kernels for them
    plain: tuple[int, ...] = ()  # by graph of decodes without adapters

    def __add__(self, other: GraphBytes) -> GraphBytes:
        """The sum of what graphs of two models take, which have the same sizes."""
        pairs = zip(self._kinds, other._kinds, strict=True)
        return GraphBytes(self.buffers + other.buffers, *(tuple(map(sum, zip_longest(*pair, fillvalue=0))) for pair in pairs))

    @property
    def _kinds(self) -> tuple[tuple[int, ...], ...]:
        return self.rows, self.tokens, self.uneven, self.plain

    def total(self) -> int:
        return self.buffers + sum(map(sum, self._kinds))

    def of_all(self, sizes: GraphSizes) -> int:
        """What graphs of all sizes would take, when these are of the two largest of each kind, or of all there are.

        The others take what the second of their kind took.
        """
        total = self.total()
        for taken, every in zip(self._kinds, sizes.kinds, strict=True):
            if len(taken) > 1:
                total += taken[1] * len(every[:-2])
        return total


@dataclass(frozen=True, slots=True)
class DecodeArrays(Generic[ArrayT]):
    """The arrays of a decode step padded to b rows: parts of one int32 array, which begin at the same places whatever b is."""

    rows: ArrayT  # [b], for the last tokens; the spare row where padded
    positions: ArrayT  # [b]
    last_page_len: ArrayT  # [b]
    seq_lens: ArrayT  # [b]
    kv_indptr: ArrayT  # [b+1]
    slot_mapping: ArrayT  # [groups, b]
    kv_indices: ArrayT  # [groups, page ids]


@dataclass(frozen=True, slots=True)
class DecodeFrame:
    """One int32 array for the decode steps of all sizes up to `max_rows`, which begins with all but the page ids."""

    max_rows: int
    num_groups: int

    def split(self, array: ArrayT, size: int, num_pages: int) -> DecodeArrays[ArrayT]:
        """Views of an array, on the host or on the device, for steps padded to `size` rows, with `num_pages` page ids in each group."""
        stride = aligned(self.max_rows + 1)
        rows, positions, last_page_len, seq_lens = (array[at * stride : at * stride + size] for at in range(4))
        kv_indptr = array[4 * stride : 4 * stride + size + 1]
        slot_mapping = array[5 * stride : self.begin].reshape(self.num_groups, stride)[:, :size]
        kv_indices = array[self.begin : self.length(num_pages)].reshape(self.num_groups, num_pages)
        return DecodeArrays(rows, positions, last_page_len, seq_lens, kv_indptr, slot_mapping, kv_indices)

    @property
    def begin(self) -> int:
        """The index in the array at which the page ids begin."""
        return (5 + self.num_groups) * aligned(self.max_rows + 1)

    def length(self, num_pages: int) -> int:
        """The length of an array with room for so many page ids in each group."""
        return self.begin + self.num_groups * num_pages

    def pack(
        self, layout: StepLayout, rows: IntArray, size: int, spare_row: int, out: IntArray, angles: IntArray | None = None
    ) -> StepLayout:
        """Writes a decode step, padded to `size` rows, to the beginning of `out`; returns its layout, whose arrays are parts of `out`.

        `angles` are written in place of positions, if they are given.
        A padding row has length 1, page 0, slot -1, position 0. `out` must hold `length(pages of the rows + padding rows)`.
        """
        count = layout.num_rows
        num_pages = int(layout.kv_indptr[count])
        arrays = self.split(out, size, num_pages + size - count)
        for to, values, padding in (
            (arrays.rows, rows, spare_row),
            (arrays.positions, layout.positions if angles is None else angles, 0),
            (arrays.last_page_len, layout.last_page_len, 1),
            (arrays.seq_lens, layout.seq_lens, 1),
        ):
            to[:count] = values
            to[count:] = padding
        arrays.slot_mapping[:, :count] = layout.slot_mapping
        arrays.slot_mapping[:, count:] = -1
        arrays.kv_indptr[: count + 1] = layout.kv_indptr
        arrays.kv_indptr[count + 1 :] = np.arange(num_pages + 1, num_pages + size - count + 1)
        arrays.kv_indices[:, :num_pages] = layout.kv_indices
        arrays.kv_indices[:, num_pages:] = 0
        return StepLayout(
            page_size=layout.page_size,
            num_decodes=size,
            qo_indptr=np.arange(size + 1, dtype=np.int32),
            kv_indptr=arrays.kv_indptr,
            kv_indices=arrays.kv_indices,
            last_page_len=arrays.last_page_len,
            seq_lens=arrays.seq_lens,
            positions=arrays.positions if angles is None else arrays.seq_lens - 1,
            slot_mapping=arrays.slot_mapping,
            states=None if layout.states is None else _padded(layout.states, size),
        )


def _padded(states: StepStates, size: int) -> StepStates:
    """The states of `size` rows, of which those behind the given ones have none, which page 0 stands for."""
    more = (0, size - len(states.replays))
    return replace(
        states,
        reads=np.pad(states.reads, (more, (0, 0))),
        writes=np.pad(states.writes, (more, (0, 0))),
        replays=np.pad(states.replays, more),
        drafts=np.pad(states.drafts, more),
    )


def aligned(count: int) -> int:
    """The next length that keeps what follows aligned."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT
