"""`CodeFormat` and `pack_codes`: quantised rows in the layout of the kernels, which is in `src/abi.h` and `src/codes.h`.

`pack_linear` and `pack_linears`: matrices in that layout, from the arrays of a checkpoint."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.arrays import FLOAT8, INT8, Array, cast, data_address
from aengine.kernels.cpu.library import (
    BF16_PAIRS,
    BLOCK,
    ELEMENTS,
    F32_WORDS,
    FLOAT8_CODES,
    INT2_CODES,
    INT4_CODES,
    INT6_CODES,
    INT8_CODES,
    INT8_QUADS,
    MAX_ACTIVATION_GROUP,
    PANEL,
    SCALE_KINDS,
    CCodesPart,
    CPackedLinear,
    CPart,
    CpuKernels,
    Workspace,
)
from aengine.kernels.cpu.ops import PackedLinear, PackedLinears, num_panels
from aengine.kernels.quantized import INT4_GROUP, LARGEST, QuantizedRows, Rows, common_zero_point, equal, exact_dtype, int4_rows
from aengine.kernels.warm_memory import Allocate, lazy_bytes


@dataclass(frozen=True)
class CodeFormat:
    """How matrices of the same columns are packed, so that they can be in one grouped product."""

    columns: int
    group_size: int
    activation_group: int
    format: int
    shift: int  # from a code to the unsigned one that is stored: 0 or the highest bit, so that adding it changes that bit
    zero: int  # of the stored codes
    scale_dtype: np.dtype[Any]  # that all scales and offsets have exactly, or their factors
    groups_per_factor: int  # 0: scales are not kept as multiples of factors
    with_offsets: bool
    float32: bool  # activations are not quantised
    unit: float  # what scales are multiplied with
    table: Array | None  # [16], what 4-bit codes stand for: float32 numbers, uint8 if activations are quantised; None: themselves
    order: Array | None  # [columns] int32

    @classmethod
    def of(cls, parts: Sequence[QuantizedRows], float32: bool) -> CodeFormat:
        """Raises ValueError for parts that differ, or that the kernels have no format for."""
        first = parts[0]
        columns = first.shape[1]
        for part in parts:
            same = (part.shape[1], part.group_size, part.bits, part.codes.dtype) == (
                columns,
                first.group_size,
                first.bits,
                first.codes.dtype,
            )
            if not same or not equal(part.table, first.table) or not equal(part.order, first.order):
                raise ValueError("quantised parts of one matrix differ in columns, bits, group size, table or order of columns")
        padded = -(-columns // BLOCK) * BLOCK
        group_size = min(first.group_size, padded) if first.scales.shape[1] > 1 else padded
        if group_size % BLOCK:
            raise ValueError(f"groups of {first.group_size} columns are not supported; the size has to be a multiple of {BLOCK}")
        float8 = first.codes.dtype == FLOAT8
        signed = first.codes.dtype == INT8
        other_codes = {2: float8 or signed, 4: float8, 6: float8 or signed, 8: False}.get(first.bits, True)
        if other_codes or (first.bits != 4 and first.table is not None):
            raise ValueError(f"{first.bits}-bit codes as {first.codes.dtype}, or a table of them, are not supported")
        shift = 2 ** (first.bits - 1) if signed else 0
        steps = None if first.table is None else _steps(first.table)
        float32 = float32 or float8 or (first.table is not None and steps is None)
        point = common_zero_point(parts) if first.table is None or not any(part.offsets is not None for part in parts) else None
        table, zero, unit = first.table, shift + (point or 0), 1.0
        if steps is not None and not float32:
            table, zero, unit = steps
        bits = first.bits if not float32 else 4 if first.bits <= 4 else 8  # that there are kernels for
        if bits == 4 and float32 and table is None:
            table = np.arange(16, dtype=np.float32) - np.float32(zero)
        with_offsets = point is None and any(part.offsets is not None for part in parts)
        of_factors = {part.groups_per_factor for part in parts}
        groups_per_factor = of_factors.pop() if len(of_factors) == 1 else 0
        kept = [(part.factors, part.offset_factors) if groups_per_factor else (part.scales, part.offsets) for part in parts]
        numbers = [scales * unit for scales, _ in kept if scales is not None]
        if with_offsets:
            numbers += [offsets for _, offsets in kept if offsets is not None]
        return cls(
            columns=columns,
            group_size=group_size,
            activation_group=_activation_group(group_size, columns),
            format=FLOAT8_CODES if float8 else {2: INT2_CODES, 4: INT4_CODES, 6: INT6_CODES, 8: INT8_CODES}[bits],
            shift=shift,
            zero=zero,
            scale_dtype=exact_dtype(numbers),
            groups_per_factor=groups_per_factor,
            with_offsets=with_offsets,
            float32=float32,
            unit=unit,
            table=None if table is None else np.ascontiguousarray(table),
            order=None if first.order is None else first.order.astype(np.int32),
        )

    @property
    def block_bytes(self) -> int:
        """The bytes of one group of a panel: its scales, its offsets if there are any, and its codes."""
        bits = {INT2_CODES: 2, INT4_CODES: 4, INT6_CODES: 6}.get(self.format, 8)
        scale_bytes = 1 if self.groups_per_factor else self.scale_dtype.itemsize
        return PANEL * (scale_bytes * (2 if self.with_offsets else 1) + self.group_size * bits // 8)

    @property
    def _factor_bytes(self) -> int:
        """The bytes of all factors of a panel."""
        if not self.groups_per_factor:
            return 0
        return -(-self.num_groups // self.groups_per_factor) * PANEL * self.scale_dtype.itemsize * (2 if self.with_offsets else 1)

    @property
    def panel_bytes(self) -> int:
        return -(-(self.num_groups * self.block_bytes + self._factor_bytes) // (PANEL * 4)) * PANEL * 4

    @property
    def num_groups(self) -> int:
        return -(-self.columns // self.group_size)

    def arrays(self, words: NDArray[np.uint8]) -> dict[str, Array]:
        """What a matrix with these words points to."""
        found: dict[str, Array] = {"words": words}
        for name, array in (("table", self.table), ("order", self.order)):
            if array is not None:
                found[name] = array
        return found

    def numbers(self, out_features: int, interleaved: bool) -> dict[str, int]:
        """The other fields of its struct."""
        return {
            "out_features": out_features,
            "in_features": self.columns,
            "group_size": self.group_size,
            "activation_group": self.activation_group,
            "format": self.format,
            "interleaved": interleaved,
            "scale_kind": SCALE_KINDS.index(self.scale_dtype),
            "with_offsets": self.with_offsets,
            "zero": self.zero,
            "float_activations": self.float32,
            "groups_per_factor": self.groups_per_factor,
        }


def pack_codes(kernels: CpuKernels, parts: Sequence[QuantizedRows], how: CodeFormat, matrix: CPackedLinear, threads: int) -> None:
    """Packs the rows of the parts one after another into the words of `matrix`, which are zeros."""
    sources, keep = [], []
    for part in parts:
        codes = _of_rows(part.codes)
        scales, factors = _stored(part.scales, part.factors, how, how.unit)
        offsets = offset_factors = None
        if how.with_offsets and part.offsets is not None:
            offsets, offset_factors = _stored(part.offsets, part.offset_factors, how, 1.0)
        elif how.with_offsets:
            offsets, offset_factors = np.zeros_like(scales), None if factors is None else np.zeros_like(factors)
        numbers = scales, offsets, factors, offset_factors
        keep.append((codes, numbers))
        addresses = [None if one is None else data_address(one) for one in (codes, *numbers)]
        sources.append(CCodesPart(*addresses, len(part), codes.strides[0] // codes.itemsize))
    kernels.pack_codes((CCodesPart * len(sources))(*sources), len(sources), how.shift, ctypes.byref(matrix), threads)


def _stored(scales: Array, factors: Array | None, how: CodeFormat, unit: float) -> tuple[Array, Array | None]:
    """Scales as they are stored, and their factors: int8 multiples of these, or without them the scales of the format's dtype."""
    if factors is None or not how.groups_per_factor:
        return np.ascontiguousarray(cast(scales * np.float32(unit), how.scale_dtype)), None
    of_groups = np.repeat(factors, how.groups_per_factor, axis=1)
    multiples = np.rint(np.divide(scales, of_groups, out=np.zeros_like(scales), where=of_groups != 0)).astype(np.int8)
    return multiples, np.ascontiguousarray(cast(factors * np.float32(unit), how.scale_dtype))


def quantize_matrix(workspace: Workspace, matrix: Array, quantization: str) -> QuantizedRows:
    """What `quantize_rows` makes of [rows, columns], "int4" or "fp8"; of int4, where the scales of a group are as good, within rounding,
    another of these."""
    rows, columns = matrix.shape
    if quantization == "fp8":
        codes, scales = np.empty((rows, columns), FLOAT8), np.empty((rows, 1), np.float32)
        step = max(1, _FLOAT8_CHUNK // columns)
        for first in range(0, rows, step):
            wide = matrix[first : first + step].astype(np.float32)
            scale = np.abs(wide).max(-1, keepdims=True) / np.float32(LARGEST)
            wide /= np.where(scale == 0, np.float32(1), scale)
            codes[first : first + step], scales[first : first + step] = _float8(np.clip(wide, -LARGEST, LARGEST)), scale
        return QuantizedRows(codes, scales, columns, bits=8)
    matrix = _of_rows(matrix if matrix.dtype in ELEMENTS else matrix.astype(np.float32))
    codes, scales = np.empty((rows, columns), np.uint8), np.empty((rows, -(-columns // INT4_GROUP)), np.float32)
    addresses, element = (data_address(codes), data_address(scales)), ELEMENTS[matrix.dtype]
    workspace.kernels.quantise(ctypes.byref(_part(matrix)), element, columns, *addresses, workspace.threads)
    return int4_rows(codes, scales)


def _float8(numbers: NDArray[np.float32]) -> Array:
    """Rounds finite numbers up to `LARGEST` to float8_e4m3fn, to the even one where two are as near: as NumPy does, in a third of its
    time."""
    bits = numbers.view(np.int32)
    magnitudes = bits & 0x7FFF_FFFF
    codes = (magnitudes >> 20) & 1
    codes += magnitudes
    codes += 0x7FFFF - (120 << 23)  # rounds to three bits, and takes 120 from the exponent
    codes >>= 20
    subnormal = magnitudes < 0x3C80_0000  # 2 ** -6
    if subnormal.any():
        codes[subnormal] = np.rint(np.abs(numbers[subnormal]) * np.float32(512)).astype(np.int32)
    codes |= (bits >> 24) & 0x80
    return codes.astype(np.uint8).view(FLOAT8)


def _of_rows(matrix: Array) -> Array:
    """The matrix, with contiguous columns."""
    return matrix if not matrix.size or matrix.shape[1] < 2 or matrix.strides[1] == matrix.itemsize else np.ascontiguousarray(matrix)


def _part(matrix: Array) -> CPart:
    return CPart(data_address(matrix), len(matrix), matrix.strides[0] // matrix.itemsize)


def _activation_group(group_size: int, columns: int) -> int:
    """The largest size that does not cross groups of weights, a multiple of `BLOCK`."""
    if group_size >= columns:
        return MAX_ACTIVATION_GROUP
    return next(size for size in range(MAX_ACTIVATION_GROUP, 0, -BLOCK) if group_size % size == 0)


def _steps(table: Array) -> tuple[Array | None, int, float] | None:
    """The numbers of 4-bit codes as (t - zero) * unit with integers t of 0 .. 255: these, which are None if they are the codes themselves,
    the zero and the unit, a power of two. None if there are no such integers."""
    for unit in (1.0, 0.5):
        steps = table / unit
        least = int(steps.min())
        if bool((steps == np.round(steps)).all()) and -255 <= least <= 0 and float(steps.max()) - least <= 255:
            taken = (steps - least).astype(np.uint8)
            return None if np.array_equal(taken, np.arange(16)) else taken, -least, unit
    return None


_FLOAT8_CHUNK = 1 << 16  # numbers, which stay in the cache
_Rows = TypeVar("_Rows", QuantizedRows, Rows)
_PER_WORD = {BF16_PAIRS: 2, F32_WORDS: 1, INT8_QUADS: 4}
_MAX_INT8_FEATURES = 65536  # with more columns a sum of products could overflow 32 bits


def pack_linear(
    kernels: CpuKernels,
    parts: Sequence[Rows],
    *,
    dtype: np.dtype[Any],
    threads: int,
    interleaved: bool = False,
    int8: bool = False,
    float32: bool = False,
    code_format: CodeFormat | None = None,
    allocate: Allocate = lazy_bytes,
) -> PackedLinear:
    """Packs the rows of `parts` one after another: bf16 or float32 arrays of the same number of columns, columns contiguous.

    `dtype` is that of the activations, and of the weights unless they are to be `float32`, or `int8`, which quantises them with one
    scale per row. Quantised rows keep their codes and scales; activations are quantised for them, unless `float32` says not to, or
    they have a table or float8 codes: then products are those of the dequantised weights. `code_format`: theirs, if it is known.
    Raises ValueError for parts that cannot be packed into one matrix.
    """
    matrices = [part for part in parts if isinstance(part, np.ndarray)]
    quantized = [part for part in parts if isinstance(part, QuantizedRows)]
    if not quantized:
        _check_parts(matrices)
    elif matrices:
        raise ValueError("a matrix cannot be packed from quantised parts and others")
    out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
    if interleaved and out_features % 2:
        raise ValueError(f"an interleaved matrix of {out_features} rows cannot be halved")
    panels = num_panels(out_features, interleaved)
    if quantized:
        how = code_format or CodeFormat.of(quantized, float32)
        packed = PackedLinear(dtype, how.arrays(allocate(panels * how.panel_bytes)), **how.numbers(out_features, interleaved))
        pack_codes(kernels, quantized, how, packed.c, threads)
        return packed
    if int8 and in_features > _MAX_INT8_FEATURES:
        raise ValueError(f"int8 weights of {in_features} columns are not supported; the most is {_MAX_INT8_FEATURES}")
    word_format = INT8_QUADS if int8 else F32_WORDS if float32 else (BF16_PAIRS, F32_WORDS)[ELEMENTS[dtype]]
    steps = -(-in_features // BLOCK) * BLOCK // _PER_WORD[word_format]
    arrays: dict[str, Array] = {"words": allocate(panels * steps * PANEL * 4)}
    if int8:
        arrays["scales"], arrays["offsets"] = np.empty(panels * PANEL, np.float32), np.empty(panels * PANEL, np.int32)
    shape = {"out_features": out_features, "in_features": in_features}
    packed = PackedLinear(dtype, arrays, **shape, format=word_format, interleaved=interleaved)
    sources = (CPart * len(parts))(*map(_part, matrices))
    kernels.pack(sources, len(parts), ELEMENTS[matrices[0].dtype], ctypes.byref(packed.c), threads)
    return packed


def pack_linears(
    kernels: CpuKernels,
    parts: Sequence[Rows],
    count: int,
    *,
    dtype: np.dtype[Any],
    threads: int,
    interleaved: bool = False,
    int8: bool = False,
    float32: bool = False,
    allocate: Allocate = lazy_bytes,
) -> PackedLinears:
    """Packs the rows of `parts`, which are those of `count` matrices one after another, as `pack_linear` does, in memory that is allocated
    at once.

    Parts of other dtypes are converted one matrix at a time, so that a mapped file is never in memory as a whole.
    """
    rows, left = divmod(sum(len(part) for part in parts), count)
    if left or not rows:
        raise ValueError(f"{rows * count + left} rows are not those of {count} matrices")
    memory: list[NDArray[np.uint8]] = []
    linears: list[PackedLinear] = []

    def allocate_next(size: int) -> NDArray[np.uint8]:
        if not memory:
            memory.append(allocate(count * size))
        return memory[0][len(linears) * size :][:size]

    parts, orders = _without_orders(parts, rows)
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
        linears.append(pack_linear(kernels, matrix, dtype=dtype, threads=threads, **options))
    return PackedLinears(linears, orders)


def as_packable(parts: Sequence[Rows], dtype: np.dtype[Any]) -> Sequence[Rows]:
    """The parts: quantised ones, or arrays of `dtype` if they have several dtypes or one that the kernels do not pack."""
    dtypes = {part.dtype for part in parts if isinstance(part, np.ndarray)}
    if len(dtypes) <= 1 and dtypes <= ELEMENTS.keys():
        return parts
    return [part.astype(dtype) if isinstance(part, np.ndarray) else part for part in parts]


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


def _without_orders(parts: Sequence[Rows], rows: int) -> tuple[Sequence[Rows], NDArray[np.int32] | None]:
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
        orders.append(np.arange(quantized[0].shape[1]) if of_matrix[0] is None else of_matrix[0])
    return [replace(part, order=None) for part in quantized], np.stack(orders).astype(np.int32)


def _cut(parts: Sequence[_Rows], begin: int, end: int) -> list[_Rows]:
    """Rows begin .. end of the parts one after another, as views."""
    found: list[_Rows] = []
    first = 0
    for part in parts:
        if begin < first + len(part) and end > first:
            found.append(part[max(begin - first, 0) : end - first])
        first += len(part)
    return found


def _check_parts(parts: Sequence[Array]) -> None:
    if not parts:
        raise ValueError("there are no parts to pack")
    for part in parts:
        if part.ndim != 2 or part.dtype not in ELEMENTS or part.dtype != parts[0].dtype or part.shape[1] != parts[0].shape[1]:
            raise ValueError(f"a part of shape {part.shape} and dtype {part.dtype} is not a bf16 or float32 matrix like the first")
        if part.size and part.shape[1] > 1 and part.strides[1] != part.itemsize:
            raise ValueError(f"a part with strides {part.strides} is not of contiguous columns")
