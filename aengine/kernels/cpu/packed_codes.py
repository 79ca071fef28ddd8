"""`CodeFormat` and `pack_codes`: quantised rows in the layout of the kernels, which is in `src/abi.h` and `src/codes.h`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.cpu.library import (
    BLOCK,
    FLOAT8_CODES,
    INT4_CODES,
    INT8_CODES,
    MAX_ACTIVATION_GROUP,
    PANEL,
    SCALE_KINDS,
    CPackedLinear,
)
from aengine.kernels.quantized import QuantizedRows, common_zero_point, equal, exact_dtype

_CHUNK = 16  # panels that are packed at once


@dataclass(frozen=True)
class CodeFormat:
    """How matrices of the same columns are packed, so that they can be in one grouped product."""

    columns: int
    group_size: int
    activation_group: int
    format: int
    shift: int  # from a code to the unsigned one that is stored
    zero: int  # of the stored codes
    scale_dtype: torch.dtype  # that all scales and offsets have exactly
    with_offsets: bool
    float32: bool  # activations are not quantised
    table: Tensor | None  # [16] float32, the numbers of 4-bit codes
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
        exact = float8 or first.table is not None
        point = None if exact else common_zero_point(parts)
        numbers = [part.scales for part in parts]
        with_offsets = point is None and any(part.offsets is not None for part in parts)
        if with_offsets:
            numbers += [part.offsets for part in parts if part.offsets is not None]
        table = first.table
        zero = shift + (point or 0)
        if first.bits == 4 and float32 and table is None:
            table = torch.arange(16.0) - zero
        return cls(
            columns=columns,
            group_size=group_size,
            activation_group=_activation_group(group_size, columns),
            format=FLOAT8_CODES if float8 else INT4_CODES if first.bits == 4 else INT8_CODES,
            shift=shift,
            zero=zero,
            scale_dtype=exact_dtype(numbers),
            with_offsets=with_offsets,
            float32=float32 or exact,
            table=None if table is None else table.float().contiguous(),
            order=None if first.order is None else first.order.to(torch.int32).contiguous(),
        )

    @property
    def block_bytes(self) -> int:
        """Of a panel's scales, offsets and codes of one group."""
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


def pack_codes(parts: Sequence[QuantizedRows], how: CodeFormat, source: Tensor, out: Tensor) -> None:
    """Packs the rows of the parts one after another: `source` is the row of each packed column, -1 for padding; `out` are the panels,
    [panels, panel_bytes] uint8."""
    padded = how.num_groups * how.group_size
    scale_bytes, extras = how._scale_bytes, how.block_bytes - PANEL * how.group_size // (2 if how.format == INT4_CODES else 1)
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
    scales = torch.cat([part.scales for part in parts])
    offsets = torch.cat([torch.zeros_like(part.scales) if part.offsets is None else part.offsets for part in parts])
    for begin in range(0, len(out), _CHUNK):
        panels = out[begin : begin + _CHUNK]
        rows = source[begin * PANEL : begin * PANEL + len(panels) * PANEL]
        blocks = panels[:, : how.num_groups * how.block_bytes].view(len(panels), how.num_groups, how.block_bytes)
        taken = torch.nn.functional.pad(codes[rows.clamp(min=0)] + how.shift, (0, padded - how.columns))
        if how.format == INT4_CODES:
            eights = (taken & 15).view(-1, padded // 8, 8)
            taken = eights[..., :4] | (eights[..., 4:] << 4)
        words = taken.view(len(panels), PANEL, how.num_groups, -1, 4).permute(0, 2, 3, 1, 4)
        blocks[:, :, extras:] = words.reshape(len(panels), how.num_groups, -1)
        for first, numbers in ((0, scales), (scale_bytes, offsets))[: 1 + how.with_offsets]:
            of_groups = numbers[rows.clamp(min=0)].masked_fill(rows[:, None] < 0, 0.0).to(how.scale_dtype)
            by_group = of_groups.view(len(panels), PANEL, -1).transpose(1, 2).contiguous()
            blocks[:, :, first : first + scale_bytes] = by_group.view(torch.uint8)


def _activation_group(group_size: int, columns: int) -> int:
    """The largest size that does not cross groups of weights, a multiple of `BLOCK`."""
    if group_size >= columns:
        return MAX_ACTIVATION_GROUP
    return next(size for size in range(MAX_ACTIVATION_GROUP, 0, -BLOCK) if group_size % size == 0)
