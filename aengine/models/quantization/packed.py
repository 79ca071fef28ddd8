"""Formats with codes packed in 32-bit words: GPTQ, AWQ, and pack-quantized of compressed-tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from aengine.kernels.quantized import QuantizedRows
from aengine.models.quantization.scheme import (
    SCALES,
    Scheme,
    Shape,
    Stored,
    column_order,
    integer_rows,
    matrix,
    num_groups,
    num_words,
    unpacked,
)

_WORDS = ("int32",)


@dataclass(frozen=True, slots=True)
class Gptq(Scheme):
    """The format of AutoGPTQ and GPTQModel: words hold consecutive rows of [in_features, out_features]; `g_idx`: each column's group.

    value = (code - zero) * scale. Version 1 stores zero - 1.
    """

    bits: int
    group_size: int | None
    act_order: bool  # desc_act
    version: int  # 1 or 2

    def scale_columns(self) -> int | None:
        return self.group_size

    def tensors(self, shape: Shape) -> dict[str, Stored]:
        rows, columns = matrix(shape)
        groups = num_groups(columns, self.group_size)
        return {
            ".qweight": Stored(((num_words(columns, self.bits, "columns"), rows),), _WORDS),
            ".qzeros": Stored(((groups, num_words(rows, self.bits, "rows")),), _WORDS),
            ".scales": Stored(((groups, rows),), SCALES),
            ".g_idx": Stored(((columns,),), ("int32", "int64"), optional=not self.act_order),
            ".bias": Stored(((rows,),), SCALES, optional=True),  # zeros, written for modules without a bias
        }

    def rows(self, shape: Shape, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        if ".bias" in tensors and bool(tensors[".bias"].any()):
            raise ValueError(".bias is not zero, but the model has no bias there")
        codes = unpacked(tensors[".qweight"].t(), self.bits)
        zeros = unpacked(tensors[".qzeros"], self.bits).t()
        if self.version == 1:
            zeros = zeros + 1 & (1 << self.bits) - 1
        order = column_order(tensors[".g_idx"], self.group_size, ".g_idx") if ".g_idx" in tensors else None
        return integer_rows(codes, zeros, tensors[".scales"].t(), self.bits, self.group_size, order)


@dataclass(frozen=True, slots=True)
class Awq(Scheme):
    """The format of AutoAWQ for its `gemm` kernel: words hold 8 neighbours of a row of [in_features, out_features], ordered as `_ORDER`."""

    group_size: int | None

    def scale_columns(self) -> int | None:
        return self.group_size

    def tensors(self, shape: Shape) -> dict[str, Stored]:
        rows, columns = matrix(shape)
        groups, words = num_groups(columns, self.group_size), num_words(rows, 4, "rows")
        return {
            ".qweight": Stored(((columns, words),), _WORDS),
            ".qzeros": Stored(((groups, words),), _WORDS),
            ".scales": Stored(((groups, rows),), SCALES),
        }

    def rows(self, shape: Shape, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        codes, zeros = (_in_order(unpacked(tensors[name], 4)).t() for name in (".qweight", ".qzeros"))
        return integer_rows(codes, zeros, tensors[".scales"].t(), 4, self.group_size)


_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word its 8 numbers are, the lowest bits first


def _in_order(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, 8)[..., _ORDER].flatten(1)


@dataclass(frozen=True, slots=True)
class PackQuantized(Scheme):
    """Pack-quantized of compressed-tensors: words hold consecutive columns of [out_features, in_features]; zeros are packed by rows."""

    bits: int
    group_size: int | None
    symmetric: bool
    act_order: bool  # there is a g_idx

    def scale_columns(self) -> int | None:
        return self.group_size

    def tensors(self, shape: Shape) -> dict[str, Stored]:
        rows, columns = matrix(shape)
        groups = num_groups(columns, self.group_size)
        found = {
            ".weight_packed": Stored(((rows, math.ceil(columns * self.bits / 32)),), _WORDS),
            ".weight_scale": Stored(((rows, groups),), SCALES),
            ".weight_shape": Stored(((2,),), ("int64", "int32"), optional=True),
        }
        if not self.symmetric:
            found[".weight_zero_point"] = Stored(((math.ceil(rows * self.bits / 32), groups),), _WORDS)
        if self.act_order:
            found[".weight_g_idx"] = Stored(((columns,),), ("int32", "int64"))
        return found

    def rows(self, shape: Shape, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        if ".weight_shape" in tensors and tuple(tensors[".weight_shape"].tolist()) != shape:
            raise ValueError(f".weight_shape is {tensors['.weight_shape'].tolist()} instead of {list(shape)}")
        codes = unpacked(tensors[".weight_packed"], self.bits)[:, : shape[1]]
        zeros = None if self.symmetric else unpacked(tensors[".weight_zero_point"].t(), self.bits).t()[: shape[0]]
        order = column_order(tensors[".weight_g_idx"], self.group_size, ".weight_g_idx") if self.act_order else None
        return integer_rows(codes, zeros, tensors[".weight_scale"], self.bits, self.group_size, order)
