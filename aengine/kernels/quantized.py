"""`QuantizedRows`: rows of a quantised matrix, in the one form that all formats of files become and that all kernels read.

Their numbers are arrays, as files have them, or tensors on a device. Imports no torch. Knows nothing of files or of how a kernel packs the
codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.kernels.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, Numbers, cast

LARGEST = 448.0  # of float8_e4m3fn
INT4_GROUP = 32


_DEQUANTIZED = 1 << 16  # numbers at a time, which stay in the cache


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows [rows, columns] with value[r, c] = number(codes[r, c]) * scales[r, g] + offsets[r, g], where g = c // group_size.

    The number of a code is the code itself, or `table[code]`. Groups are those of `group_size` consecutive columns; the last one may be
    shorter.
    """

    codes: Numbers  # [rows, columns] int8, uint8 or float8_e4m3fn, contiguous columns; of fewer than 8 bits: uint8 below 2 ** bits
    scales: Numbers  # [rows, groups] float32
    group_size: int  # in columns; all of them for one scale per row
    bits: int  # that a kernel keeps of a code, at least: 2, 4, 6 or 8
    offsets: Numbers | None = None  # [rows, groups] float32: -zero_point * scale, or the minimum of a group; None: 0
    table: Numbers | None = None  # [2 ** bits] float32: the numbers of the codes (nf4, mxfp4); None: the codes are the numbers
    order: Numbers | None = None
    """[columns] int64: column c of this form is column order[c] of the model's matrix (act-order of GPTQ); None: the same."""
    factors: Numbers | None = None
    """[rows, factors] float32, each of as many groups: scales are whole multiples of them, -128 to 127 (K-quants); None: not known."""
    offset_factors: Numbers | None = None
    """[rows, factors] float32: those of the offsets, in the same way; None: not known, or there are no offsets."""

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = -(-columns // self.group_size)
        for name in ("scales", "offsets"):
            numbers = getattr(self, name)
            if numbers is not None and numbers.shape != (rows, groups):
                raise ValueError(f"{name} of shape {tuple(numbers.shape)} do not match {rows} rows of {groups} groups")

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | Array) -> QuantizedRows:
        """Some of the rows: those of a slice; of arrays also the [n] int64 ones in their order."""
        return self.of_rows(lambda numbers: numbers[rows])

    def of_rows(self, change: Callable[..., Numbers], *others: QuantizedRows) -> QuantizedRows:
        """What `change` makes of the codes of these rows and of the others', of their scales, and of whatever else belongs to rows; what
        not all of them have is left out. `change` must do the same to the rows of each."""
        found: dict[str, Any] = {}
        for name in ("codes", "scales", "offsets", "factors", "offset_factors"):
            numbers = [getattr(rows, name) for rows in (self, *others)]
            found[name] = None if any(one is None for one in numbers) else change(*numbers)
        return replace(self, **found)

    def columns(self, first: int, stop: int) -> QuantizedRows:
        """Columns [first, stop) of the model's matrix, on the borders of groups. Raises ValueError for others."""
        columns, size = self.shape[1], self.group_size
        if self.order is not None:
            raise ValueError("its groups are not of consecutive columns (act-order)")
        if size < columns and (first % size or (stop % size and stop < columns)):
            raise ValueError(f"{first} to {stop} are not on the borders of its groups of {size}")
        groups = slice(first // size, -(-stop // size))
        offsets = None if self.offsets is None else self.offsets[:, groups]
        codes = self.codes[:, first:stop]
        found = replace(self, codes=codes, scales=self.scales[:, groups], group_size=min(size, stop - first), offsets=offsets)
        if self.factors is None:
            return found
        of_factor = columns // self.factors.shape[1]
        if first % of_factor or stop % of_factor:
            return replace(found, factors=None, offset_factors=None)
        cut = slice(first // of_factor, stop // of_factor)
        offset_factors = None if self.offset_factors is None else self.offset_factors[:, cut]
        return replace(found, factors=self.factors[:, cut], offset_factors=offset_factors)

    @property
    def groups_per_factor(self) -> int:
        """Groups that each factor is of; 0: there are no factors, or not of the offsets."""
        if self.factors is None or (self.offsets is not None and self.offset_factors is None):
            return 0
        return int(self.scales.shape[1] // self.factors.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel reads of them: the codes at their bits, and what belongs to the groups."""
        scales: int = sum(numbers.nbytes for numbers in (self.scales, self.offsets) if numbers is not None)
        if self.groups_per_factor:
            scales = scales // 4 + sum(numbers.nbytes for numbers in (self.factors, self.offset_factors) if numbers is not None)
        return math.prod(self.shape) * self.bits // 8 + scales

    def dequantized(self, dtype: np.dtype[Any] = FLOAT32) -> Array:
        """[rows, columns] of the dtype, in the order of the model's columns; in float32 it is what every kernel's product is compared with.
        Of arrays. Takes little more memory than the result."""
        values = np.empty(self.shape, dtype)
        step = max(1, _DEQUANTIZED // self.shape[1])
        for begin in range(0, len(self), step):
            values[begin : begin + step] = self[begin : begin + step]._numbers()
        return values

    def _numbers(self) -> Array:
        numbers: Array = self.codes.astype(np.float32) if self.table is None else self.table[self.codes]
        rows, columns = self.shape
        if columns % self.group_size:
            of_columns = np.arange(columns) // self.group_size
            numbers *= self.scales[:, of_columns]
            if self.offsets is not None:
                numbers += self.offsets[:, of_columns]
        else:
            by_group = numbers.reshape(rows, -1, self.group_size)
            by_group *= self.scales[..., None]
            if self.offsets is not None:
                by_group += self.offsets[..., None]
        if self.order is None:
            return numbers
        ordered = np.empty_like(numbers)
        ordered[:, self.order] = numbers
        return ordered


Rows: TypeAlias = Array | QuantizedRows
"""Consecutive rows of a parameter: [rows, columns], or [rows] of a bias or vector."""


def numbers_of(rows: Rows, dtype: np.dtype[Any] = FLOAT32) -> Array:
    """Rows as numbers: quantised ones of the dtype, others as they are."""
    return rows if isinstance(rows, np.ndarray) else rows.dequantized(dtype)


def int4_rows(codes: Numbers, scales: Numbers) -> QuantizedRows:
    """Codes [rows, columns] of (code - 8) * scale."""
    return QuantizedRows(codes, scales, INT4_GROUP, bits=4, offsets=-8.0 * scales)


def in_one_format(parts: Sequence[QuantizedRows]) -> Sequence[QuantizedRows]:
    """Parts of the same numbers whose codes have the bits of the widest of them, and groups of the smallest: q, k and v are often of two
    GGUF types. They are given back as they are if they have one format, or one that codes of 8 bits cannot have."""
    first = parts[0]
    if all(
        (part.bits, part.group_size, part.codes.dtype) == (first.bits, first.group_size, first.codes.dtype)
        and equal(part.table, first.table)
        for part in parts
    ):
        return parts
    known = [_integers(part) for part in parts]
    integers = [part for part in known if part is not None]
    size, columns = math.gcd(*(part.group_size for part in parts)), first.shape[1]
    if len(integers) < len(parts) or any(part.shape[1] != columns or columns % part.group_size for part in parts):
        return parts
    bits = max(part.bits for part in integers)
    return [_finer(replace(part, bits=bits), part.group_size // size) for part in integers]


def _integers(part: QuantizedRows) -> QuantizedRows | None:
    """The rows with unsigned codes that stand for themselves. None: there are no such codes of 8 bits."""
    if part.codes.dtype not in (np.uint8, np.int8):
        return None
    least, table = (-128, np.arange(-128, 128)) if part.codes.dtype == np.int8 else (0, part.table)
    if table is None:
        return part
    least = int(table.min())
    numbers = table - least
    if not 0 <= -least <= 128 or float(numbers.max()) > 255 or bool((numbers != np.rint(numbers)).any()):
        return None
    codes = numbers.astype(np.uint8)[part.codes if part.table is not None else part.codes.view(np.uint8) ^ np.uint8(128)]
    added = np.float32(least) * part.scales
    offset_factors = None if part.factors is None or part.offsets is not None else np.float32(least) * part.factors
    offsets = added if part.offsets is None else part.offsets + added
    return replace(part, codes=codes, bits=8, table=None, offsets=offsets, offset_factors=offset_factors)


def _finer(part: QuantizedRows, times: int) -> QuantizedRows:
    """The rows with so many groups in the place of each."""
    if times == 1:
        return part
    scales, offsets = (None if one is None else np.repeat(one, times, axis=1) for one in (part.scales, part.offsets))
    assert scales is not None
    return replace(part, group_size=part.group_size // times, scales=scales, offsets=offsets)


def common_zero_point(parts: Sequence[QuantizedRows]) -> int | None:
    """The integer z with offsets = -z * scales everywhere; None: there is none."""
    points: set[int] = set()
    for part in parts:
        if not len(part):
            continue
        if part.offsets is None:
            points.add(0)
            continue
        largest = abs(part.scales).argmax()
        scale, offset = float(part.scales.reshape(-1)[largest]), float(part.offsets.reshape(-1)[largest])
        ratio = -offset / scale if scale else math.nan
        if not abs(ratio) <= 255 or not equal(part.offsets, -round(ratio) * part.scales):
            return None
        points.add(round(ratio))
    return points.pop() if len(points) == 1 else None


def exact_dtype(numbers: Sequence[Numbers]) -> np.dtype[Any]:
    """The smallest dtype that has all of the float32 `numbers` exactly, as finite ones: bfloat16, float16 or float32."""
    return next(dtype for dtype in (BFLOAT16, FLOAT16, FLOAT32) if all(_fits(one, dtype) for one in numbers))


def equal(one: Numbers | None, other: Numbers | None) -> bool:
    """Whether both are None, or of the same shape and numbers."""
    if one is None or other is None or one is other:
        return one is other
    return one.shape == other.shape and bool((one == other).all())


def _fits(numbers: Numbers, dtype: np.dtype[Any]) -> bool:
    if dtype == FLOAT32:
        return True
    rounded = cast(cast(numbers, dtype), FLOAT32)
    return bool((rounded == numbers).all() and (abs(rounded) < math.inf).all())
