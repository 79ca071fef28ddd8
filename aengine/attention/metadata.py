"""The one attention metadata format, shared by every backend.

Owns how a step's rows and page table become ragged index arrays: `build_layout`, and `Layouts` for steps that follow one another.
`AttentionMetadata` pairs the host arrays (which some backends plan from) with the same arrays on the device. Knows nothing of models or
kernels.

Names follow FlashInfer's paged-KV convention: row i owns queries `qo_indptr[i]:qo_indptr[i+1]` and in layer group g the pages
`kv_indices[g, kv_indptr[i]:kv_indptr[i+1]]`, the last of which holds `last_page_len[i]` tokens (1..page_size). Page 0 stands for one that
no query of the row sees, because it is behind the group's window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.kernels.arrays import to_device
from aengine.kernels.paged_cache import SCALE_BYTES, Heads, Scoring, StateLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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


class IndexShape(NamedTuple):
    """An index that chooses tokens, see `models/spec.py: SparseIndex`. A key begins with that of the index, where a query has zeros."""

    num_heads: int
    head_dim: int
    top_k: int  # 0: no sequence becomes longer than that, so all tokens are seen
    longest: int  # sequence, in tokens


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a backend must know of a model and of the page pool."""

    num_heads: int  # this and what else is said of heads: of the layer that keeps most of a token
    num_kv_heads: int
    head_dim: int  # of queries and keys
    scoring: tuple[Scoring, ...]  # by layer with attention; elsewhere here "by layer" is by place, of which those of attention come first
    page_size: int  # in tokens
    dtype: torch.dtype  # of queries, keys and values, and of the output
    device: torch.device
    kv_dtype: torch.dtype | None = None  # of the KV cache; None: the same as `dtype`
    kv_scales: tuple[tuple[float, float], ...] | None = None
    """The scales of K and V by layer: a float8 cache holds value / scale, saturated. None: all scales are 1."""
    value_dim: int = 0  # of a head's values and results; 0: head_dim, which it becomes
    places: tuple[tuple[int, int], ...] = ()
    """By layer its group and which of the places of a page it has, as in `LayerGroups`. None given: all layers are in one group."""
    parts: tuple[int, ...] = ()  # by layer, which part of its place it has, as in `LayerGroups`; none given: the first
    heads: tuple[Heads, ...] = ()  # by layer; none given: all have the same
    num_groups: int = 0  # of the whole model, where a rank has no layers of some; 0: those of `places`, which it becomes
    latent: bool = False  # a value is the last value_dim numbers of its key; a backend may store it there alone
    states: StateLayout | None = None  # of recurrent layers; None: there are none
    index: IndexShape | None = None  # what may choose some of a query's tokens
    batch_invariant: bool = False  # no order of sums may depend on which queries a step has

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)
        if not self.places:
            object.__setattr__(self, "places", tuple((0, layer) for layer in range(len(self.scoring))))
        if not self.num_groups:
            object.__setattr__(self, "num_groups", 1 + max(group for group, _ in self.places))

    @property
    def layers_per_page(self) -> int:
        return 1 + max(index for _, index in self.places)

    @property
    def heads_differ(self) -> bool:
        return len(set(self.heads)) > 1

    def heads_of(self, layer: int) -> Heads:
        return self.heads[layer] if self.heads else Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)

    @property
    def top_k(self) -> int:
        """How many tokens a query sees at most, 0: all."""
        return 0 if self.index is None else self.index.top_k

    def part_of(self, layer: int) -> int:
        """Which part of its place a layer has."""
        return self.parts[layer] if self.parts else 0

    def part_widths(self, layer: int) -> tuple[int, int]:
        """Numbers of a layer in a page, of keys and of values that are not parts of these, as they are stored."""
        heads = self.heads_of(layer)
        tokens, value_width = self.page_size * heads.num_kv_heads, 0 if self.shares_latent else self.stored_width(heads.value_dim)
        return tokens * self.stored_width(heads.key_dim), tokens * value_width

    @property
    def page_widths(self) -> tuple[int, int]:
        """Numbers of a place in a page, of keys and of values, as they are stored."""
        parts = [[(self.part_of(layer) + 1) * width for width in self.part_widths(layer)] for layer in range(len(self.places))]
        return max(keys for keys, _ in parts), max(values for _, values in parts)

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def shares_latent(self) -> bool:
        """Whether latent values are stored as parts of their keys alone. In int8 they have scales of their own."""
        return self.latent and not _is_int8(self.cache_dtype)

    def stored_width(self, width: int) -> int:
        """Numbers of a head's key or value in the cache; with its scale in int8."""
        return width + (SCALE_BYTES if _is_int8(self.cache_dtype) else 0)

    def scales(self, layer: int) -> tuple[float, float]:
        """The scales of a layer's K and V."""
        if self.kv_scales is None or self.cache_dtype.itemsize > 1:
            return 1.0, 1.0
        return (self.kv_scales[layer][0],) * 2 if self.latent else self.kv_scales[layer]


def _is_int8(dtype: torch.dtype) -> bool:
    import torch

    return dtype == torch.int8
