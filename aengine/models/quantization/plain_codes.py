"""Formats with a matrix of codes in the shape of the weight: FP8, W8A8 and W4A8 of compressed-tensors, and int8 of bitsandbytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.quantized import QuantizedRows
from aengine.models.quantization.scheme import SCALES, Scheme, Shape, Stored, integer_rows, matrix


@dataclass(frozen=True, slots=True)
class PlainCodes(Scheme):
    """Codes are numbers of int8 or float8_e4m3fn, with one scale for each block of the matrix. value = (code - zero) * scale.

    Scales of activations are for products in 8 bits; they are not read, since activations are scaled as they come.
    """

    dtype: str  # of the codes
    block_rows: int | None  # None: all of them
    block_columns: int | None
    scale: str = ".weight_scale"
    other_scale: str | None = None  # what some checkpoints call the scales
    unit: float = 1.0  # of the scales
    bits: int = 8  # 4: each number of int8 is from -8 to 7
    symmetric: bool = True
    not_read: tuple[str, ...] = (".input_scale", ".input_zero_point", ".output_scale", ".activation_scale")

    def scale_columns(self) -> int | None:
        return self.block_columns

    def tensors(self, shape: Shape) -> dict[str, Stored]:
        rows, columns = matrix(shape)
        blocks = (math.ceil(rows / (self.block_rows or rows)), math.ceil(columns / (self.block_columns or columns)))
        shapes: tuple[Shape, ...] = (blocks,)
        if blocks[1] == 1:
            shapes += ((blocks[0],),)
        if blocks == (1, 1):
            shapes += ((),)
        found = {
            ".weight": Stored((shape,), (self.dtype,)),
            self.scale: Stored(shapes, (*SCALES, "float8_e8m0fnu"), other_name=self.other_scale),
        }
        if not self.symmetric:
            found[".weight_zero_point"] = Stored(shapes, ("int8",))
        return found | {name: Stored((), (), optional=True) for name in self.not_read}

    def rows(self, shape: Shape, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        rows, columns = matrix(shape)

        high, wide = min(self.block_rows or rows, rows), min(self.block_columns or columns, columns)

        def by_row(blocks: Tensor) -> Tensor:
            """Repeat numbers of blocks for each row: [rows, groups] float32."""
            by_block = blocks.float().reshape(math.ceil(rows / high), -1)
            return by_block.repeat_interleave(high, 0)[:rows].contiguous()

        scales = by_row(tensors[self.scale]) * self.unit
        zeros = None if self.symmetric else by_row(tensors[".weight_zero_point"])
        codes = tensors[".weight"]
        if self.bits == 8:
            return QuantizedRows(codes, scales, wide, 8, None if zeros is None else -scales * zeros)
        if bool(((codes < -8) | (codes > 7)).any()):
            raise ValueError(".weight has numbers that are not from -8 to 7")
        return integer_rows((codes + 8).view(torch.uint8), None if zeros is None else zeros + 8, scales, 4, wide)
