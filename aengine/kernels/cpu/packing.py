"""`PackedLinear`: a matrix in the layout of the kernels, packed from checkpoint tensors; `PackedLinears`: a list of them.

Owns the allocation; the layout is in `src/abi.h` and `src/packing.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.cpu.library import BF16_PAIRS, BLOCK, ELEMENTS, F32_WORDS, INT8_QUADS, PANEL, CPackedLinear, CPart, CpuKernels
from aengine.kernels.cpu.packed_codes import CodeFormat, pack_codes
from aengine.kernels.quantized import QuantizedRows, Rows, equal
from aengine.kernels.warm_memory import Allocate, lazy_bytes

_Rows = TypeVar("_Rows", Tensor, QuantizedRows, Rows)
_PER_WORD = {BF16_PAIRS: 2, F32_WORDS: 1, INT8_QUADS: 4}
_MAX_INT8_FEATURES = 65536  # with more columns a sum of products could overflow 32 bits


class PackedLinear:
    """A matrix [out_features, in_features], with or without a bias, as the kernels read it. Can be used with any workspace.

    An `interleaved` one is a gate and an up projection of the same width, for `silu(gate) * up`.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        parts: Sequence[Rows],
        *,
        dtype: torch.dtype,
        threads: int,
        interleaved: bool = False,
        int8: bool = False,
        float32: bool = False,
        code_format: CodeFormat | None = None,
        allocate: Allocate = lazy_bytes,
    ) -> None:
        """Packs the rows of `parts` one after another: bf16 or float32 tensors of the same number of columns, columns contiguous.

        `dtype` is that of the activations, and of the weights unless they are to be `float32`, or `int8`, which quantises them with one
        scale per row. Quantised rows keep their codes and scales; activations are quantised for them, unless `float32` says not to, or
        they have a table or float8 codes: then products are those of the dequantised weights. `code_format`: theirs, if it is known.
        Raises ValueError for parts that cannot be packed into one matrix.
        """
        tensors = [part for part in parts if isinstance(part, Tensor)]
        quantized = [part for part in parts if isinstance(part, QuantizedRows)]
        if not quantized:
            _check_parts(tensors)
        elif tensors:
            raise ValueError("a matrix cannot be packed from quantised parts and others")
        self.dtype = dtype
        self.out_features = sum(len(part) for part in parts)
        self.in_features = parts[0].shape[1]
        self.interleaved = interleaved
        self.bias: Tensor | None = None
        if interleaved and self.out_features % 2:
            raise ValueError(f"an interleaved matrix of {self.out_features} rows cannot be halved")
        panels = -(-self.out_features // 2 // (PANEL // 2)) if interleaved else -(-self.out_features // PANEL)
        self.padded_features = panels * PANEL
        self.scales, self.offsets = torch.empty(0), torch.empty(0, dtype=torch.int32)
        if quantized:
            how = self._code_format = code_format or CodeFormat.of(quantized, float32)
            self.words = allocate(panels * how.panel_bytes)
            self.c = how.matrix(self.words.ctypes.data, self.out_features, interleaved)
            pack_codes(kernels, quantized, how, self.c, threads)
            return
        if int8 and self.in_features > _MAX_INT8_FEATURES:
            raise ValueError(f"int8 weights of {self.in_features} columns are not supported; the most is {_MAX_INT8_FEATURES}")
        word_format = INT8_QUADS if int8 else F32_WORDS if float32 else (BF16_PAIRS, F32_WORDS)[ELEMENTS[dtype]]
        steps = -(-self.in_features // BLOCK) * BLOCK // _PER_WORD[word_format]
        self.words = allocate(panels * steps * PANEL * 4)
        if int8:
            self.scales, self.offsets = torch.empty(self.padded_features), torch.empty(self.padded_features, dtype=torch.int32)
        self.c = CPackedLinear(
            words=self.words.ctypes.data,
            bias=None,
            scales=self.scales.data_ptr() if int8 else None,
            offsets=self.offsets.data_ptr() if int8 else None,
            out_features=self.out_features,
            in_features=self.in_features,
            format=word_format,
            interleaved=interleaved,
        )
        sources = (CPart * len(parts))(*(CPart(part.data_ptr(), len(part), part.stride(0)) for part in tensors))
        kernels.pack(sources, len(parts), ELEMENTS[tensors[0].dtype], ctypes.byref(self.c), threads)

    def set_bias(self, parts: Sequence[Tensor]) -> None:
        """Sets the bias to the parts, one after another [out_features]."""
        rows = torch.cat(tuple(parts)).float()
        if rows.shape != (self.out_features,):
            raise ValueError(f"a bias of shape {tuple(rows.shape)} does not match {self.out_features} rows")
        self.bias = self._in_packed_order(rows)
        self.c.bias = self.bias.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes + self.offsets.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def _in_packed_order(self, rows: Tensor) -> Tensor:
        """[out_features] -> [padded_features], with zeros as padding"""
        if not self.interleaved:
            return torch.nn.functional.pad(rows, (0, self.padded_features - len(rows))).contiguous()
        halves = torch.nn.functional.pad(rows.view(2, -1), (0, (self.padded_features - len(rows)) // 2))
        return halves.view(2, -1, 16).transpose(0, 1).reshape(-1).contiguous()


class PackedLinears:
    """Matrices of one shape, for a grouped product: one per expert or head. Their memory is allocated at once."""

    def __init__(
        self,
        kernels: CpuKernels,
        parts: Sequence[Rows],
        count: int,
        *,
        dtype: torch.dtype,
        threads: int,
        interleaved: bool = False,
        int8: bool = False,
        float32: bool = False,
        allocate: Allocate = lazy_bytes,
    ) -> None:
        """Packs the rows of `parts`, which are those of `count` matrices one after another, as `PackedLinear` does.

        Parts of other dtypes are converted one matrix at a time, so that a mapped file is never in memory as a whole.
        """
        rows, left = divmod(sum(len(part) for part in parts), count)
        if left or not rows:
            raise ValueError(f"{rows * count + left} rows are not those of {count} matrices")
        memory: list[NDArray[np.uint8]] = []
        self.linears: list[PackedLinear] = []

        def allocate_next(size: int) -> NDArray[np.uint8]:
            if not memory:
                memory.append(allocate(count * size))
            return memory[0][len(self.linears) * size :][:size]

        parts, self.orders = _without_orders(parts, rows)
        """Of the columns of each matrix, [count, in_features] int32, where these differ; None: the matrices have theirs."""
        quantized = [part for part in parts if isinstance(part, QuantizedRows)]
        code_format = CodeFormat.of(quantized, float32) if quantized else None
        options: dict[str, Any] = {
            "interleaved": interleaved,
            "int8": int8,
            "float32": float32,
            "code_format": code_format,
            "allocate": allocate_next,
        }
        for index in range(count):
            matrix = as_packable(_cut(parts, index * rows, (index + 1) * rows), dtype)
            self.linears.append(PackedLinear(kernels, matrix, dtype=dtype, threads=threads, **options))
        self.c = (CPackedLinear * count)(*(linear.c for linear in self.linears))

    def set_biases(self, parts: Sequence[Tensor]) -> None:
        """Sets the biases of all matrices to the parts, one after another [count * out_features]."""
        for index, linear in enumerate(self.linears):
            rows = linear.out_features
            linear.set_bias(_cut(parts, index * rows, (index + 1) * rows))
            self.c[index] = linear.c

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self.linears)


def as_packable(parts: Sequence[Rows], dtype: torch.dtype) -> Sequence[Rows]:
    """The parts: quantised ones, or tensors of `dtype` if they have several dtypes or one that the kernels do not pack."""
    dtypes = {part.dtype for part in parts if isinstance(part, Tensor)}
    if len(dtypes) <= 1 and dtypes <= ELEMENTS.keys():
        return parts
    return [part.to(dtype) if isinstance(part, Tensor) else part for part in parts]


def are_packable(parts: Sequence[Rows], count: int | None = None) -> bool:
    """Whether all parts are quantised, in a way that the kernels have a format for: as the rows of one matrix, or of `count` matrices."""
    if not all(isinstance(part, QuantizedRows) for part in parts):
        return False
    try:
        if count is not None:
            parts, _ = _without_orders(parts, sum(len(part) for part in parts) // count)
        CodeFormat.of([part for part in parts if isinstance(part, QuantizedRows)], float32=False)
    except ValueError:
        return False
    return True


def _without_orders(parts: Sequence[Rows], rows: int) -> tuple[Sequence[Rows], Tensor | None]:
    """Parts of matrices of so many rows, and None; or, if the columns of the matrices have several orders, the parts as if they had none,
    and the orders, [matrices, columns] int32. Raises ValueError for a matrix with several orders."""
    quantized = [part for part in parts if isinstance(part, QuantizedRows)]
    if not quantized or all(equal(part.order, quantized[0].order) for part in quantized):
        return parts, None
    orders = []
    for begin in range(0, sum(map(len, quantized)), rows):
        of_matrix = [part.order for part in _cut(quantized, begin, begin + rows)]
        if not all(equal(order, of_matrix[0]) for order in of_matrix):
            raise ValueError("quantised parts of one matrix differ in the order of columns")
        orders.append(torch.arange(quantized[0].shape[1]) if of_matrix[0] is None else of_matrix[0])
    return [replace(part, order=None) for part in quantized], torch.stack(orders).int()


def _cut(parts: Sequence[_Rows], begin: int, end: int) -> list[_Rows]:
    """Rows begin .. end of the parts one after another, as views."""
    found: list[_Rows] = []
    first = 0
    for part in parts:
        if begin < first + len(part) and end > first:
            found.append(part[max(begin - first, 0) : end - first])
        first += len(part)
    return found


def _check_parts(parts: Sequence[Tensor]) -> None:
    if not parts:
        raise ValueError("there are no parts to pack")
    for part in parts:
        if part.dim() != 2 or part.dtype not in ELEMENTS or part.dtype != parts[0].dtype or part.shape[1] != parts[0].shape[1]:
            raise ValueError(f"a part of shape {tuple(part.shape)} and dtype {part.dtype} is not a bf16 or float32 matrix like the first")
        if part.device.type != "cpu" or (part.shape[1] > 1 and part.stride(1) != 1):
            raise ValueError(f"a part with strides {part.stride()} on {part.device} is not a CPU tensor of contiguous columns")
