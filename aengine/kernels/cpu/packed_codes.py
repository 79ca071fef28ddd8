"""`CodeFormat` and `pack_codes`: quantised rows in the layout of the kernels, which is in `src/abi.h` and `src/codes.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.cpu.library import (
    BLOCK,
    ELEMENTS,
    FLOAT8_CODES,
    INT4_CODES,
    INT8_CODES,
    MAX_ACTIVATION_GROUP,
    PANEL,
    SCALE_KINDS,
    CCodesPart,
    CPackedLinear,
    CPart,
    CpuKernels,
    Workspace,
)
from aengine.kernels.quantize import INT4_GROUP, int4_rows, quantize_rows
from aengine.kernels.quantized import QuantizedRows, common_zero_point, equal, exact_dtype


@dataclass(frozen=True)
class CodeFormat:
    """How matrices of the same columns are packed, so that they can be in one grouped product."""

    columns: int
    group_size: int
    activation_group: int
    format: int
    shift: int  # from a code to the unsigned one that is stored: 0 or the highest bit, so that adding it changes that bit
    zero: int  # of the stored codes
    scale_dtype: torch.dtype  # that all scales and offsets have exactly
    with_offsets: bool
    float32: bool  # activations are not quantised
    unit: float  # what scales are multiplied with
    table: Tensor | None  # [16], what 4-bit codes stand for: float32 numbers, uint8 if activations are quantised; None: themselves
    order: Tensor | None  # [columns] int32

    @classmethod
    def of(cls, parts: Sequence[QuantizedRows], float32: bool) -> CodeFormat:
        """Raises ValueError for parts that differ, or that the kernels have no format for."""
        first = parts[0]
        columns = first.shape[1]
        for part in parts:
            same = part.shape[1] == columns and (part.group_size, part.bits, part.codes.dtype) == (
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
        float8 = first.codes.dtype == torch.float8_e4m3fn
        if first.bits not in (4, 8) or (first.bits == 4 and float8) or (first.bits == 8 and first.table is not None):
            raise ValueError(f"{first.bits}-bit codes as {first.codes.dtype}, or a table of them, are not supported")
        signed = first.codes.dtype == torch.int8
        shift = 2 ** (first.bits - 1) if signed else 0
        steps = None if first.table is None else _steps(first.table)
        float32 = float32 or float8 or (first.table is not None and steps is None)
        point = common_zero_point(parts) if first.table is None or not any(part.offsets is not None for part in parts) else None
        table, zero, unit = first.table, shift + (point or 0), 1.0
        if steps is not None and not float32:
            table, zero, unit = steps
        elif first.bits == 4 and float32 and table is None:
            table = torch.arange(16.0) - zero
        numbers = [part.scales * unit for part in parts]
        with_offsets = point is None and any(part.offsets is not None for part in parts)
        if with_offsets:
            numbers += [part.offsets for part in parts if part.offsets is not None]
        return cls(
            columns=columns,
            group_size=group_size,
            activation_group=_activation_group(group_size, columns),
            format=FLOAT8_CODES if float8 else INT4_CODES if first.bits == 4 else INT8_CODES,
            shift=shift,
            zero=zero,
            scale_dtype=exact_dtype(numbers),
            with_offsets=with_offsets,
            float32=float32,
            unit=unit,
            table=None if table is None else table.contiguous(),
            order=None if first.order is None else first.order.to(torch.int32).contiguous(),
        )

    @property
    def block_bytes(self) -> int:
        """The bytes of one group of a panel: its scales, its offsets if there are any, and its codes."""
        return self._scale_bytes * (2 if self.with_offsets else 1) + PANEL * self.group_size // (2 if self.format == INT4_CODES else 1)

    @property
    def panel_bytes(self) -> int:
        return -(-self.num_groups * self.block_bytes // (PANEL * 4)) * PANEL * 4

    @property
    def num_groups(self) -> int:
        return -(-self.columns // self.group_size)

    @property
    def _scale_bytes(self) -> int:
        return PANEL * self.scale_dtype.itemsize

    def matrix(self, words: int, out_features: int, interleaved: bool) -> CPackedLinear:
        """The struct of a matrix whose words are at an address. It points to the format's table and order."""
        return CPackedLinear(
            words=words,
            table=None if self.table is None else self.table.data_ptr(),
            order=None if self.order is None else self.order.data_ptr(),
            out_features=out_features,
            in_features=self.columns,
            group_size=self.group_size,
            activation_group=self.activation_group,
            format=self.format,
            interleaved=interleaved,
            scale_kind=SCALE_KINDS.index(self.scale_dtype),
            with_offsets=self.with_offsets,
            zero=self.zero,
            float_activations=self.float32,
        )


def pack_codes(kernels: CpuKernels, parts: Sequence[QuantizedRows], how: CodeFormat, matrix: CPackedLinear, threads: int) -> None:
    """Packs the rows of the parts one after another into the words of `matrix`, which are zeros."""
    sources, keep = [], []
    for part in parts:
        codes = part.codes if part.codes.stride(1) == 1 else part.codes.contiguous()
        scales, offsets = (part.scales * how.unit).to(how.scale_dtype).contiguous(), None
        if how.with_offsets:
            offsets = torch.zeros_like(scales) if part.offsets is None else part.offsets.to(how.scale_dtype).contiguous()
        keep.append((codes, scales, offsets))
        addresses = (codes.data_ptr(), scales.data_ptr(), None if offsets is None else offsets.data_ptr())
        sources.append(CCodesPart(*addresses, len(part), codes.stride(0)))
    kernels.pack_codes((CCodesPart * len(sources))(*sources), len(sources), how.shift, ctypes.byref(matrix), threads)


def quantize_matrix(workspace: Workspace, matrix: Tensor, quantization: str) -> QuantizedRows:
    """What `quantize_rows` makes of [rows, columns]; where the scales of a group are as good, within rounding, another of these."""
    if quantization != "int4":
        return quantize_rows(matrix, quantization)
    if matrix.dtype not in ELEMENTS or matrix.stride(1) != 1:
        matrix = matrix.float().contiguous()
    rows, columns = matrix.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, -(-columns // INT4_GROUP))
    part = CPart(matrix.data_ptr(), rows, matrix.stride(0))
    element = ELEMENTS[matrix.dtype]
    workspace.kernels.quantise(ctypes.byref(part), element, columns, codes.data_ptr(), scales.data_ptr(), workspace.threads)
    return int4_rows(codes, scales)


def _activation_group(group_size: int, columns: int) -> int:
    """The largest size that does not cross groups of weights, a multiple of `BLOCK`."""
    if group_size >= columns:
        return MAX_ACTIVATION_GROUP
    return next(size for size in range(MAX_ACTIVATION_GROUP, 0, -BLOCK) if group_size % size == 0)


def _steps(table: Tensor) -> tuple[Tensor | None, int, float] | None:
    """The numbers of 4-bit codes as (t - zero) * unit with integers t of 0 .. 255: these, which are None if they are the codes themselves,
    the zero and the unit, a power of two. None if there are no such integers."""
    for unit in (1.0, 0.5):
        steps = table / unit
        least = int(steps.min())
        if bool((steps == steps.round()).all()) and -255 <= least <= 0 and float(steps.max()) - least <= 255:
            taken = (steps - least).to(torch.uint8)
            return None if torch.equal(taken, torch.arange(16, dtype=torch.uint8)) else taken, -least, unit
    return None
