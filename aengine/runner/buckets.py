"""Sizes of captured steps, and how a decode step is padded to one of them.

Owns the choice of a size, the padding, and where the arrays of a padded step lie in one int32 array, so that a step is one upload.
Pure numpy: knows nothing of devices, models or graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.attention import StepLayout

IntArray = NDArray[np.int32]
_ALIGNMENT = 32  # int32 numbers: 128 bytes, what kernels like to be told of a pointer


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """For which steps there are graphs. Both ascending, either may be empty."""

    rows: tuple[int, ...]  # of decode steps
    tokens: tuple[int, ...]  # of steps with prompt tokens

    @classmethod
    def of(cls, graph_sizes: tuple[int, ...] | None, graph_tokens: int, max_num_seqs: int, max_num_batched_tokens: int) -> GraphSizes:
        """From the fields of an `EngineConfig`."""
        rows = tuple(sorted(set(graph_sizes))) if graph_sizes is not None else decode_sizes(max_num_seqs)
        return cls(rows, token_sizes(min(graph_tokens, max_num_batched_tokens)))

    def largest_two(self) -> GraphSizes:
        """Of each kind."""
        return GraphSizes(self.rows[-2:], self.tokens[-2:])


def decode_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8th up to 256, then eight per doubling; `most` is always the last."""
    sizes = [1, 2, 4, *range(8, 257, 8)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 4)))
    return (*(size for size in sizes if size < most), most)


def token_sizes(most: int) -> tuple[int, ...]:
    """16, 32, then powers of two and what is halfway between them; `most` is the last. None for 0."""
    if most == 0:
        return ()
    sizes, power = [16, 32], 64
    while sizes[-1] < most:
        sizes += [power, power + power // 2]
        power *= 2
    return (*(size for size in sizes if size < most), most)


def fitting(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `count`."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """What graphs and their buffers took of a device, in bytes."""

    buffers: int
    rows: tuple[int, ...]  # by graph of decodes, largest first; those after the first use its memory again
    tokens: tuple[int, ...]  # by graph of steps with prompt tokens, largest first

    def total(self) -> int:
        return self.buffers + sum(self.rows) + sum(self.tokens)

    def of_all(self, sizes: GraphSizes) -> int:
        """What graphs of all sizes would take, when these are of the two largest of each kind, or of all there are.

        The other decodes take what the second took; in pieces each layer keeps its tokens, so what they take goes with their number.
        """
        total = self.total()
        if len(sizes.rows) > 2:
            total += self.rows[1] * len(sizes.rows[:-2])
        if len(sizes.tokens) > 2:
            total += -(-self.tokens[1] * sum(sizes.tokens[:-2]) // sizes.tokens[-2])
        return total


class DecodeFields(NamedTuple):
    """Where the arrays of a decode step padded to b rows lie. The page ids follow, from `kv_indices` on."""

    rows: slice  # [b], of the last-token array; the spare one where padded
    positions: slice  # [b]
    slot_mapping: slice  # [b]
    last_page_len: slice  # [b]
    seq_lens: slice  # [b]
    kv_indptr: slice  # [b+1]
    kv_indices: int


@dataclass(frozen=True, slots=True)
class DecodeFrame:
    """One int32 array for the decode steps of all sizes up to `max_rows`. Fields begin at the same place whatever the size."""

    max_rows: int

    def fields(self, rows: int) -> DecodeFields:
        stride = _aligned(self.max_rows + 1)

        def field(number: int, length: int) -> slice:
            return slice(number * stride, number * stride + length)

        return DecodeFields(
            rows=field(0, rows),
            positions=field(1, rows),
            slot_mapping=field(2, rows),
            last_page_len=field(3, rows),
            seq_lens=field(4, rows),
            kv_indptr=field(5, rows + 1),
            kv_indices=6 * stride,
        )

    def length(self, num_pages: int) -> int:
        """Of an array with room for so many page ids."""
        return self.fields(0).kv_indices + num_pages

    def pack(self, layout: StepLayout, rows: IntArray, size: int, spare_row: int, out: IntArray) -> StepLayout:
        """Writes a decode step, padded to `size` rows, to the beginning of `out`; returns its layout, whose arrays are parts of `out`.

        A padding row has length 1, page 0, slot -1, position 0. `out` must hold `length(pages of the rows + padding rows)`.
        """
        fields = self.fields(size)
        count = layout.num_rows
        num_pages = int(layout.kv_indptr[count])
        padding = size - count

        def put(field: slice, values: IntArray, rest: int) -> IntArray:
            padded = out[field]
            padded[:count] = values
            padded[count:] = rest
            return padded

        put(fields.rows, rows, spare_row)
        kv_indptr = out[fields.kv_indptr]
        kv_indptr[: count + 1] = layout.kv_indptr
        kv_indptr[count + 1 :] = np.arange(num_pages + 1, num_pages + padding + 1)
        kv_indices = out[fields.kv_indices : fields.kv_indices + num_pages + padding]
        kv_indices[:num_pages] = layout.kv_indices
        kv_indices[num_pages:] = 0
        return StepLayout(
            page_size=layout.page_size,
            num_decodes=size,
            qo_indptr=np.arange(size + 1, dtype=np.int32),
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            last_page_len=put(fields.last_page_len, layout.last_page_len, 1),
            seq_lens=put(fields.seq_lens, layout.seq_lens, 1),
            positions=put(fields.positions, layout.positions, 0),
            slot_mapping=put(fields.slot_mapping, layout.slot_mapping, -1),
        )


def empty_layout(page_size: int) -> StepLayout:
    """Of a step without rows."""
    none, zero = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int32)
    return StepLayout(page_size, 0, zero, zero, none, none, none, none, none)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
