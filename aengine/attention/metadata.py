"""The one attention metadata format, shared by every backend.

Owns how a step's rows and page table become ragged index arrays. Pure numpy in, numpy out; `AttentionMetadata` pairs the
host arrays (which some backends plan from) with the same arrays on the device. Knows nothing of models, layouts or kernels.

Names follow FlashInfer's paged-KV convention: row i owns queries `qo_indptr[i]:qo_indptr[i+1]` and the pages
`kv_indices[kv_indptr[i]:kv_indptr[i+1]]`, the last of which holds `last_page_len[i]` tokens (1..page_size).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the n rows and T tokens of a step lie, on the host. All arrays int32.

    The first `num_decodes` rows have exactly one query each.
    """

    page_size: int
    num_decodes: int
    qo_indptr: IntArray  # [n+1]
    kv_indptr: IntArray  # [n+1], in pages
    kv_indices: IntArray  # [kv_indptr[n]], page ids
    last_page_len: IntArray  # [n]
    seq_lens: IntArray  # [n], tokens that a row's last query attends to
    positions: IntArray  # [T]
    slot_mapping: IntArray  # [T], page * page_size + offset that a token's KV is written to; -1 writes nothing

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


def build_layout(rows: IntArray, num_decodes: int, starts: IntArray, lengths: IntArray, page_table: IntArray, page_size: int) -> StepLayout:
    """The layout of a step in which row `rows[i]` computes positions `starts[i] .. starts[i] + lengths[i] - 1`.

    `page_table` is [max rows, max pages per row]; only the columns that the rows have reached are read.
    """
    seq_lens = starts + lengths
    only_decodes = num_decodes == len(rows)
    num_pages = (seq_lens + (page_size - 1)) // page_size
    qo_indptr = np.arange(len(rows) + 1, dtype=np.int32) if only_decodes else _indptr(lengths)
    kv_indptr = _indptr(num_pages)
    columns = np.arange(kv_indptr[-1], dtype=np.int32) - np.repeat(kv_indptr[:-1], num_pages)
    positions = starts if only_decodes else np.arange(qo_indptr[-1], dtype=np.int32) - np.repeat(qo_indptr[:-1] - starts, lengths)
    # Flat indices: one 1-D take is several times faster than indexing by a (row, column) pair.
    flat_table = page_table.reshape(-1)
    row_offsets = rows.astype(np.int64) * page_table.shape[1]
    written_pages = flat_table.take((row_offsets if only_decodes else np.repeat(row_offsets, lengths)) + positions // page_size)
    return StepLayout(
        page_size=page_size,
        num_decodes=num_decodes,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=flat_table.take(np.repeat(row_offsets, num_pages) + columns),
        last_page_len=seq_lens - (num_pages - 1) * page_size,
        seq_lens=seq_lens,
        positions=positions,
        slot_mapping=written_pages * page_size + positions % page_size,
    )


def _indptr(lengths: IntArray) -> IntArray:
    indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=indptr[1:])
    return indptr
