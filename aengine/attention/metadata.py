"""The one attention metadata format, shared by every backend.

Owns how a step's rows and page table become ragged index arrays: `build_layout`, and `Layouts` for steps that follow one another.
`AttentionMetadata` pairs the host arrays (which some backends plan from) with the same arrays on the device. Knows nothing of models or
kernels.

Names follow FlashInfer's paged-KV convention: row i owns queries `qo_indptr[i]:qo_indptr[i+1]` and in layer group g the pages
`kv_indices[g, kv_indptr[i]:kv_indptr[i+1]]`, the last of which holds `last_page_len[i]` tokens (1..page_size). Page 0 stands for one that
no query of the row sees, because it is behind the group's window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.upload import to_device

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepStates:
    """Where the recurrent states of a step's n rows are; a state has p pages. All arrays are int32.

    A row reads the state of its tokens before the step from `reads`, unless it has none, and writes that of all its tokens to `writes`,
    which may be the same pages. Beside that, k states of some of the step's tokens are kept elsewhere.

    The matrices of a state may lack its latest tokens, of which it has the inputs: a row computes the first `replays` of these before its
    own, without outputs. Of a row with `drafts` the matrices get none of its own tokens, whose inputs are written instead.
    """

    reads: IntArray  # [n, p]
    writes: IntArray  # [n, p]
    replays: IntArray  # [n]
    drafts: IntArray  # [n], 0 or 1
    kept_rows: IntArray  # [k], each 0..n-1, ascending
    kept_lengths: IntArray  # [k]: after how many of the row's tokens, replayed ones included, ascending within a row
    kept_pages: IntArray  # [k, p]

    @classmethod
    def none(cls, num_rows: int, num_pages: int) -> StepStates:
        """The states of rows that have none, which page 0 stands for; `num_pages`: of a state."""
        pages, numbers, nothing = (np.zeros(shape, dtype=np.int32) for shape in ((num_rows, num_pages), num_rows, 0))
        return cls(pages, pages, numbers, numbers, nothing, nothing, pages[:0])


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The n rows and T tokens of a step and their pages in G layer groups, on the host. All arrays are int32.

    The first `num_decodes` rows have exactly one query each.
    """

    page_size: int
    num_decodes: int
    qo_indptr: IntArray  # [n+1]
    kv_indptr: IntArray  # [n+1], in pages
    kv_indices: IntArray  # [G, kv_indptr[n]], page ids
    last_page_len: IntArray  # [n]
    seq_lens: IntArray  # [n], tokens of a row up to its last query
    positions: IntArray  # [T]
    slot_mapping: IntArray  # [G, T], page * page_size + offset that a token's KV is written to; -1 writes nothing
    states: StepStates | None = None  # of a model with recurrent layers
    seen: IntArray | None = None  # [T], how many tokens of its row each sees, in layers that see within images; None: those up to itself

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A `StepLayout` together with its arrays on the device (int32 tensors of the same shapes)."""

    host: StepLayout
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    slot_mapping: Tensor

    @classmethod
    def of(cls, layout: StepLayout, device: torch.device) -> AttentionMetadata:
        """With each array copied to `device`; on a CPU the tensors share the arrays' memory."""
        names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")
        return cls(layout, *(to_device(getattr(layout, name), device) for name in names))


def build_layout(rows: IntArray, num_decodes: int, starts: IntArray, lengths: IntArray, page_table: IntArray, page_size: int) -> StepLayout:
    """The layout of a step in which row `rows[i]` computes positions `starts[i] .. starts[i] + lengths[i] - 1`.

    `page_table` is [groups, max rows, max pages per row]; only the columns that the rows have reached are read.
    """
    seq_lens = starts + lengths
    only_decodes = num_decodes == len(rows)
    num_pages = (seq_lens + (page_size - 1)) // page_size
    qo_indptr = np.arange(len(rows) + 1, dtype=np.int32) if only_decodes else _indptr(lengths)
    kv_indptr = _indptr(num_pages)
    columns = np.arange(kv_indptr[-1], dtype=np.int32) - np.repeat(kv_indptr[:-1], num_pages)
    positions = starts if only_decodes else np.arange(qo_indptr[-1], dtype=np.int32) - np.repeat(qo_indptr[:-1] - starts, lengths)
    # Flat indices: one take is several times faster than indexing by a (row, column) pair.
    flat_table = page_table.reshape(len(page_table), -1)
    row_offsets = rows.astype(np.int64) * page_table.shape[2]
    written_pages = flat_table.take((row_offsets if only_decodes else np.repeat(row_offsets, lengths)) + positions // page_size, axis=1)
    return StepLayout(
        page_size=page_size,
        num_decodes=num_decodes,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=flat_table.take(np.repeat(row_offsets, num_pages) + columns, axis=1),
        last_page_len=seq_lens - (num_pages - 1) * page_size,
        seq_lens=seq_lens,
        positions=positions,
        slot_mapping=written_pages * page_size + positions % page_size,
    )


def empty_layout(num_groups: int, page_size: int) -> StepLayout:
    """The layout of a step without rows."""
    nothing = np.zeros(0, dtype=np.int32)
    return build_layout(nothing, 0, nothing, nothing, np.zeros((num_groups, 1, 1), dtype=np.int32), page_size)


def as_decodes(layout: StepLayout) -> StepLayout:
    """Returns the layout in which each token of a step is a decode row of its own, which sees the positions before it and its own. The step
    stays the same: a layer writes the KV of all tokens before it attends to any."""
    lengths, seq_lens = np.diff(layout.qo_indptr), layout.positions + 1
    num_pages = (seq_lens + (layout.page_size - 1)) // layout.page_size
    kv_indptr = _indptr(num_pages)
    pages = np.arange(kv_indptr[-1], dtype=np.int32) + np.repeat(np.repeat(layout.kv_indptr[:-1], lengths) - kv_indptr[:-1], num_pages)
    return StepLayout(
        page_size=layout.page_size,
        num_decodes=layout.num_tokens,
        qo_indptr=np.arange(layout.num_tokens + 1, dtype=np.int32),
        kv_indptr=kv_indptr,
        kv_indices=layout.kv_indices.take(pages, axis=1),
        last_page_len=seq_lens - (num_pages - 1) * layout.page_size,
        seq_lens=seq_lens,
        positions=layout.positions,
        slot_mapping=layout.slot_mapping,
    )


class Layouts:
    """Layouts of steps that follow one another, as `build_layout` makes them.

    Most steps decode the rows of the step before, each within its last page: such a layout is made from the one before, in a third of the
    time.
    """

    def __init__(self, page_table: IntArray, page_size: int) -> None:
        """`page_table` is as of `build_layout`; its contents change from step to step."""
        self._page_table = page_table
        self._page_size = page_size
        self._rows: IntArray | None = None  # rows of the previous step, if it had decodes alone
        self._previous: StepLayout | None = None

    def build(self, rows: IntArray, num_decodes: int, starts: IntArray, lengths: IntArray, *, same_pages: bool) -> StepLayout:
        """The layout that `build_layout` makes. `same_pages`: the page table has not changed since the last call."""
        previous = self._previous
        if previous is not None and same_pages and num_decodes == len(rows) and self._follows(previous, rows, starts):
            layout = StepLayout(
                page_size=self._page_size,
                num_decodes=num_decodes,
                qo_indptr=previous.qo_indptr,
                kv_indptr=previous.kv_indptr,
                kv_indices=previous.kv_indices,
                last_page_len=previous.last_page_len + 1,
                seq_lens=starts + 1,
                positions=starts,
                slot_mapping=previous.slot_mapping + 1,
            )
        else:
            layout = build_layout(rows, num_decodes, starts, lengths, self._page_table, self._page_size)
        self._rows, self._previous = (rows, layout) if num_decodes == len(rows) else (None, None)
        return layout

    def _follows(self, previous: StepLayout, rows: IntArray, starts: IntArray) -> bool:
        """Whether decodes of `rows` at `starts` continue the previous step, each within its last page."""
        return (
            self._rows is not None
            and len(rows) == len(self._rows)
            and not np.count_nonzero(rows != self._rows)
            and not np.count_nonzero(starts != previous.seq_lens)
            and not np.count_nonzero(previous.last_page_len == self._page_size)
        )


def _indptr(lengths: IntArray) -> IntArray:
    indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=indptr[1:])
    return indptr
