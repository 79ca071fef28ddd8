"""`PackedLinear`: a matrix in the layout of the kernels, which is in `src/abi.h` and `src/packing.h`; `PackedLinears`: a list of them.
Their arrays have the names of the fields that point to them, so that a matrix can be written to a file and read from one.

The output head and the draw of tokens as single kernels, for the steps that do not sample within `DecoderStack`; and low-rank adapters
as the kernels read them, whose layout is in `src/abi.h` and whose products are in `src/adapters.cpp`; and KV pages.

Shapes and dtypes are checked, results allocated. Activations are bf16 or float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.arrays import FLOAT32, INT4, INT8, Array, data_address
from aengine.kernels.cpu.library import (
    BLOCK,
    ELEMENTS,
    KV_SCALE_BYTES,
    PAGE_ELEMENTS,
    PANEL,
    CHeadKind,
    CLowRank,
    CPackedLinear,
    CPool,
    CStepAdapters,
    Workspace,
    address,
    address_of_params,
    check,
    stored_dim,
)
from aengine.kernels.paged_cache import Heads
from aengine.kernels.warm_memory import keep_rows, lazy_bytes

POINTERS = ("words", "bias", "scales", "offsets", "table", "order")
"""Fields of `CPackedLinear` that are addresses of arrays."""
NUMBERS = tuple(name for name, *_ in CPackedLinear._fields_ if name not in POINTERS)
"""The other fields."""


class PackedLinear:
    """A matrix [out_features, in_features], with or without a bias, as the kernels read it. Can be used with any workspace.

    An `interleaved` one is a gate and an up projection of the same width, for `silu(gate) * up`.
    """

    def __init__(self, dtype: np.dtype[Any], arrays: Mapping[str, Array], **numbers: int) -> None:
        """`dtype` is that of the activations. `arrays` by `POINTERS`, of which all but the words may be missing; `numbers` by `NUMBERS`."""
        self.dtype = dtype
        self.arrays = dict(arrays)
        pointers: dict[str, Any] = {name: data_address(array) for name, array in arrays.items()}
        self.c = CPackedLinear(**pointers, **numbers)
        self.out_features: int = self.c.out_features
        self.in_features: int = self.c.in_features
        self.interleaved = bool(self.c.interleaved)

    @property
    def padded_features(self) -> int:
        """The rows that the words have, with those that are padding."""
        return num_panels(self.out_features, self.interleaved) * PANEL

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for name, array in self.arrays.items() if name not in ("table", "order"))

    @property
    def numbers(self) -> dict[str, int]:
        """The fields of the struct that are no addresses."""
        return {name: int(getattr(self.c, name)) for name in NUMBERS}

    def copy(self) -> PackedLinear:
        """Return the matrix, in the same memory, with a bias of its own."""
        return PackedLinear(self.dtype, self.arrays, **self.numbers)

    def with_bias_of(self, replaced: PackedLinear | None) -> PackedLinear:
        """This matrix, with the bias, if there is one, of a matrix of the same shape that it replaces; None: it replaces none."""
        if replaced is not None and "bias" in replaced.arrays:
            self.arrays["bias"], self.c.bias = replaced.arrays["bias"], replaced.c.bias
        return self

    def set_bias(self, rows: NDArray[np.float32]) -> None:
        """Sets the bias [out_features]."""
        if rows.shape != (self.out_features,):
            raise ValueError(f"a bias of shape {rows.shape} does not match {self.out_features} rows")
        bias = self.arrays["bias"] = self._in_packed_order(np.asarray(rows, np.float32))
        self.c.bias = data_address(bias)

    def _in_packed_order(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """[out_features] -> [padded_features], with zeros as padding."""
        left = self.padded_features - len(rows)
        if not self.interleaved:
            return np.pad(rows, (0, left))
        halves = np.pad(rows.reshape(2, -1), ((0, 0), (0, left // 2)))
        return np.ascontiguousarray(halves.reshape(2, -1, 16).swapaxes(0, 1)).reshape(-1)


class PackedLinears:
    """Matrices of one shape, for a grouped product: one per expert or head."""

    def __init__(self, linears: Sequence[PackedLinear], orders: NDArray[np.int32] | None = None) -> None:
        """`orders`: of the columns of each matrix, [count, in_features], where these differ; None: the matrices have theirs."""
        self.linears, self.orders = list(linears), orders
        self.c = (CPackedLinear * len(linears))(*(linear.c for linear in linears))

    def with_biases_of(self, replaced: PackedLinears | None) -> PackedLinears:
        """These matrices, with the biases of those of the same shapes that they replace; None: they replace none."""
        linears = self.linears if replaced is None else map(PackedLinear.with_bias_of, self.linears, replaced.linears)
        return PackedLinears(list(linears), self.orders)

    def set_biases(self, rows: NDArray[np.float32]) -> None:
        """Sets the biases of all matrices, one after another [count * out_features]."""
        for index, linear in enumerate(self.linears):
            linear.set_bias(rows[index * linear.out_features : (index + 1) * linear.out_features])
            self.c[index] = linear.c

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self.linears)


def num_panels(out_features: int, interleaved: bool) -> int:
    """Panels of a matrix of so many rows."""
    return -(-out_features // 2 // (PANEL // 2)) if interleaved else -(-out_features // PANEL)


class PackedCpuAdapter:
    """The low-rank matrices of an adapter. Immutable; can be used by any workspace."""

    def __init__(self, memory: NDArray[np.uint8], matrices: Mapping[int, CLowRank], count: int) -> None:
        """`matrices` by number, of the `count` that the model has; they point into `memory`."""
        self._memory = memory
        self.c = (CLowRank * count)()
        for number, matrix in matrices.items():
            self.c[number] = matrix
        self.most = max((matrix.size for matrix in matrices.values()), default=0)
        """The largest `size` of a matrix."""

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes


class StepAdapters:
    """Which adapter each token of a step has, or each row of hidden states."""

    def __init__(self, adapters: Sequence[PackedCpuAdapter], of_tokens: NDArray[np.int32]) -> None:
        """`of_tokens`: [T], indices of `adapters`; -1: none. Raises ValueError for other indices."""
        self.of_tokens = np.ascontiguousarray(of_tokens, dtype=np.int32)
        if len(of_tokens) and not -1 <= int(of_tokens.min()) <= int(of_tokens.max()) < len(adapters):
            raise ValueError(f"adapters {of_tokens.min()} to {of_tokens.max()} of tokens are not among -1 to {len(adapters) - 1}")
        self.adapters = tuple(adapters)
        addresses = (ctypes.c_void_p * len(adapters))(*(ctypes.addressof(adapter.c) for adapter in adapters))
        most = max((adapter.most for adapter in adapters), default=0)
        self.c = CStepAdapters(addresses, address(self.of_tokens), len(adapters), most)

    def check(self, num_rows: int, num_matrices: int) -> None:
        """Raises ValueError for another number of rows, or for adapters of another model."""
        if len(self.of_tokens) != num_rows:
            raise ValueError(f"there are adapters of {len(self.of_tokens)} rows for {num_rows}")
        if any(len(adapter.c) != num_matrices for adapter in self.adapters):
            raise ValueError(f"an adapter is not of a model with {num_matrices} matrices")


def logits(
    workspace: Workspace, x: Array, weight: PackedLinear, soft_cap: float = 0.0, adapters: StepAdapters | None = None
) -> NDArray[np.float32]:
    """W x + b in float32, contiguous; [m, in_features] -> [m, out_features]. With a `soft_cap` c they become c * tanh(logit / c).
    `adapters`: what they add to a head is added first."""
    if weight.interleaved:
        raise ValueError("an interleaved weight is for a gated product alone")
    rows = as_rows(x, weight.in_features, weight.dtype)
    out = np.empty((len(x), weight.out_features), np.float32)
    status = workspace.kernels.logits(
        *(ELEMENTS[x.dtype], data_address(rows), row_stride(rows), len(x), ctypes.byref(weight.c)),
        *(soft_cap, None if adapters is None else adapters.c, data_address(out), workspace.handle, workspace.threads),
    )
    check(status)
    return out


def gather_ranks(workspace: Workspace, part: NDArray[np.float32], firsts: Sequence[int]) -> NDArray[np.float32] | None:
    """The columns of all ranks on the first one; None on the others. Every rank calls it, with [m, firsts[index + 1] - firsts[index]]
    contiguous float32 -> [m, firsts[-1]]. Raises ExchangeError."""
    exchange = workspace.exchange
    assert exchange is not None
    width = firsts[exchange.c.index + 1] - firsts[exchange.c.index]
    if part.dtype != FLOAT32 or not part.flags.c_contiguous or part.shape[1] != width or len(firsts) != exchange.c.size + 1:
        raise ValueError(f"a part of shape {part.shape} is not contiguous float32 of the columns {list(firsts)} of the ranks")
    out = np.empty((len(part), firsts[-1]), np.float32) if exchange.c.index == 0 else None
    c_firsts = (ctypes.c_int64 * len(firsts))(*firsts)
    where = None if out is None else data_address(out)
    status = workspace.kernels.gather_ranks(data_address(part), len(part), c_firsts, where, workspace.handle, workspace.threads)
    workspace.check(status)
    return out


def draw(workspace: Workspace, logits: NDArray[np.float32], draw_params: NDArray[np.void]) -> NDArray[np.int64]:
    """[m, vocab] float32 with contiguous rows and m of `DRAW_PARAMS` -> [m] int64 token ids."""
    count, vocab = _check_logits(logits)
    out = np.empty(count, np.int64)
    where = address_of_params(draw_params, count)
    check(workspace.kernels.draw(data_address(logits), count, vocab, where, data_address(out), workspace.handle, workspace.threads))
    return out


def log_sums(workspace: Workspace, logits: NDArray[np.float32], own: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """[m, vocab] float32 with contiguous rows -> [m, 1] float32, the log of the sum of exp of each row; and [m] int64, how many of a row
    are greater than its `own`, [m, 1]. Both depend on the row alone: sums are added up in one order for any number of rows and threads."""
    count, vocab = _check_logits(logits)
    own, out, greater = np.ascontiguousarray(own), np.empty((count, 1), np.float32), np.empty(count, np.int64)
    pointers = data_address(own), data_address(out), data_address(greater)
    check(workspace.kernels.log_sums(data_address(logits), count, vocab, *pointers, workspace.handle, workspace.threads))
    return out, greater


def _check_logits(logits: NDArray[np.float32]) -> tuple[int, int]:
    """The shape of logits. Raises ValueError for others than contiguous ones of float32."""
    count, vocab = logits.shape
    if logits.dtype != FLOAT32 or not logits.flags.c_contiguous:
        raise ValueError("logits are not contiguous float32")
    return count, vocab


def norm_weight(weight: Array) -> NDArray[np.float32]:
    """Weights of norms [..., size] as the kernels read them: float32, zeros up to a multiple of 16."""
    return np.ascontiguousarray(_padded(weight.astype(np.float32, copy=False)))


def as_rows(x: Array, width: int, dtype: np.dtype[Any]) -> Array:
    """`x` as the kernels read activations: contiguous columns, zeros up to a multiple of 16."""
    if x.ndim != 2 or x.shape[1] != width or x.dtype != dtype or dtype not in ELEMENTS:
        raise ValueError(f"activations of shape {x.shape} and dtype {x.dtype} are not [m, {width}] of {dtype}")
    if width % BLOCK:
        return _padded(x)
    return x if x.strides[1] == x.itemsize else np.ascontiguousarray(x)


def _padded(x: Array) -> Array:
    """With zeros up to a multiple of 16 in the last dimension."""
    left = -x.shape[-1] % BLOCK
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, left)]) if left else x


def row_stride(rows: Array) -> int:
    """Elements from one row of `as_rows` to the next."""
    return rows.strides[0] // rows.itemsize if len(rows) > 1 else int(rows.shape[1])


PageParts = Sequence[tuple[int, Heads]]
"""By layer with attention, which part of its place in a page it has, and its heads."""


_SMALL_PAGES = 2 << 20  # bytes of the KV of each layer, so that a first token does not commit a huge page for each


class KvPool:
    """Pages of keys and values, whose layout is in `src/abi.h`, initially zero; memory is committed when it is first written."""

    def __init__(self, layers_per_page: int, num_pages: int, page_size: int, parts: PageParts, dtype: np.dtype[Any]) -> None:
        """`page_size` is in tokens, fastest if a multiple of 16; `dtype` is that of the model, bfloat16 or
        float32; or int8 or int4: each head of a token is rounded to integers with scales of its own."""
        self.num_pages, self.parts = num_pages, parts
        of_place = place_bytes(page_size, parts, dtype)
        sizes = [num_pages * size for size in of_place]
        self._memory = [lazy_bytes(size, small=_SMALL_PAGES) for size in sizes for _ in range(layers_per_page)]
        self.pages = [memory.reshape(num_pages, -1) for memory in self._memory]
        """[num_pages, bytes of a page] of the keys of each layer, then of the values."""
        pointers = [memory.ctypes.data for memory in self._memory]
        keys, values = ((c_void_p * layers_per_page)(*part) for part in (pointers[:layers_per_page], pointers[layers_per_page:]))
        self.c = CPool(keys, values, layers_per_page, num_pages, page_size, *of_place, PAGE_ELEMENTS[dtype])

    def keep_pages(self, pages: NDArray[np.int32]) -> None:
        """Returns the memory of all other pages to the system, until they are written again."""
        for memory in self.pages:
            keep_rows(memory, pages)

    def read_pages(self, workspace: Workspace, pages: NDArray[np.int32], out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """[n, bytes of a page], in `out` if it is given, for `write_pages`. Raises ValueError for pages that are not in the pool."""
        read, page_bytes = np.ascontiguousarray(pages, dtype=np.int32), sum(memory.shape[1] for memory in self.pages)
        out = np.empty((len(read), page_bytes), np.uint8) if out is None else out
        assert out.shape == (len(read), page_bytes)
        assert out.flags.c_contiguous
        check(workspace.kernels.read_pages(ctypes.byref(self.c), read.ctypes.data, len(read), out.ctypes.data))
        return out

    def write_pages(self, pages: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        """Writes what was read of as many pages."""
        first = 0
        for memory in self.pages:
            memory[pages] = content[:, first : first + memory.shape[1]]
            first += memory.shape[1]

    def copy_pages(self, workspace: Workspace, sources: NDArray[np.int32], destinations: NDArray[np.int32]) -> None:
        """Copies page sources[i] to page destinations[i]; all sources are read before any destination is written.

        No page is twice a destination. Raises ValueError for pages that are not in the pool.
        """
        read, write = (np.ascontiguousarray(pages, dtype=np.int32) for pages in (sources, destinations))
        if read.shape != write.shape:
            raise ValueError(f"{len(read)} sources do not match {len(write)} destinations")
        status = workspace.kernels.copy_pages(
            ctypes.byref(self.c), read.ctypes.data, write.ctypes.data, len(read), workspace.handle, workspace.threads
        )
        check(status)


def head_kind(heads: Heads) -> CHeadKind:
    """The kind of layers with these heads."""
    return CHeadKind(heads.num_heads, heads.num_kv_heads, stored_dim(heads.key_dim), stored_dim(heads.value_dim))


def place_bytes(page_size: int, parts: PageParts, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Bytes of a place of a page, of keys with their scales and of values."""
    scales = KV_SCALE_BYTES if dtype in (INT8, INT4) else 0
    ends = [((part + 1) * page_size * heads.num_kv_heads, heads) for part, heads in parts]
    keys = max(tokens * (_stored_bytes(heads.key_dim, dtype) + scales) for tokens, heads in ends)
    return keys, max(tokens * _stored_bytes(heads.value_dim, dtype) for tokens, heads in ends)


def _stored_bytes(dim: int, dtype: np.dtype[Any]) -> int:
    return stored_dim(dim) // 2 if dtype == INT4 else stored_dim(dim) * dtype.itemsize
