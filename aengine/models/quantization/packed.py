"""How formats store their codes: in the shape of the weight (compressed-tensors' FP8, W8A8 and W4A8; bitsandbytes' int8, torchao, Quanto),
packed in words (GPTQ, AWQ, MLX, pack-quantized) or bytes (HQQ, Quanto), or as numbers of a table (MXFP4, NVFP4, nf4)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.kernels.arrays import Array
from aengine.kernels.quantized import QuantizedRows
from aengine.models.config.reader import is_number
from aengine.models.quantization.scheme import (
    SCALES,
    Scheme,
    Shape,
    Stored,
    column_order,
    integer_rows,
    kept_bits,
    matrix,
    num_groups,
    num_words,
    unpacked,
)


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
    bits: int = 8  # with fewer numbers of int8 are as large as those have: with 4 from -8 to 7
    symmetric: bool | None = True  # None: where no zero points are stored
    not_read: tuple[str, ...] = (".input_scale", ".input_zero_point", ".output_scale", ".activation_scale")
    codes: str = ".weight"
    zeros: str = ".weight_zero_point"

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
            self.codes: Stored((shape,), (self.dtype,)),
            self.scale: Stored(shapes, (*SCALES, "float8_e8m0fnu"), other_name=self.other_scale),
        }
        if not self.symmetric:
            found[self.zeros] = Stored(shapes, ("int8",), optional=self.symmetric is None)
        return found | {name: Stored((), (), optional=True) for name in self.not_read}

    def rows(self, shape: Shape, tensors: Mapping[str, Array]) -> QuantizedRows:
        rows, columns = matrix(shape)
        high, wide = min(self.block_rows or rows, rows), min(self.block_columns or columns, columns)

        def by_row(blocks: Array) -> Array:
            """Repeat numbers of blocks for each row: [rows, groups] float32."""
            by_block = blocks.astype(np.float32).reshape(math.ceil(rows / high), -1)
            return np.repeat(by_block, high, 0)[:rows]

        scales = by_row(tensors[self.scale]) * self.unit
        zeros = by_row(tensors[self.zeros]) if self.zeros in tensors and bool(tensors[self.zeros].any()) else None
        codes = tensors[self.codes]
        if self.bits == 8:
            return QuantizedRows(codes, scales, wide, 8, None if zeros is None else -scales * zeros)
        half = 1 << (self.bits - 1)
        if bool(((codes < -half) | (codes >= half)).any()):
            raise ValueError(f"{self.codes} has numbers that are not from {-half} to {half - 1}")
        return integer_rows((codes + np.int8(half)).view(np.uint8), None if zeros is None else zeros + half, scales, self.bits, wide)


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

    def rows(self, shape: Shape, tensors: Mapping[str, Array]) -> QuantizedRows:
        if ".bias" in tensors and bool(tensors[".bias"].any()):
            raise ValueError(".bias is not zero, but the model has no bias there")
        codes = unpacked(tensors[".qweight"].T, self.bits)
        zeros = unpacked(tensors[".qzeros"], self.bits).T
        if self.version == 1:
            zeros = zeros + 1 & (1 << self.bits) - 1
        order = column_order(tensors[".g_idx"], self.group_size, ".g_idx") if ".g_idx" in tensors else None
        return integer_rows(codes, zeros, tensors[".scales"].T, self.bits, self.group_size, order)


@dataclass(frozen=True, slots=True)
class Awq(Scheme):
    """The format of AutoAWQ for its `gemm` kernel: words hold 8 neighbours of a row of [in_features, out_features], ordered as `_ORDER`; or
    for `gemv`: of [out_features, in_features] in order, with more columns of scales and zeros than there are groups."""

    group_size: int | None
    version: str = "gemm"

    def scale_columns(self) -> int | None:
        return self.group_size

    def tensors(self, shape: Shape) -> dict[str, Stored]:
        rows, columns = matrix(shape)
        groups, words = num_groups(columns, self.group_size), num_words(rows, 4, "rows")
        if self.version == "gemv":
            multiple = max(1, 128 // (self.group_size or columns))
            width = math.ceil(math.ceil(groups / 8) / multiple) * multiple
            return {
                ".qweight": Stored(((rows, num_words(columns, 4, "columns")),), _WORDS),
                ".qzeros": Stored(((rows, width),), _WORDS),
                ".scales": Stored(((rows, 8 * width),), SCALES),
            }
        return {
            ".qweight": Stored(((columns, words),), _WORDS),
            ".qzeros": Stored(((groups, words),), _WORDS),
            ".scales": Stored(((groups, rows),), SCALES),
        }

    def rows(self, shape: Shape, tensors: Mapping[str, Array]) -> QuantizedRows:
        if self.version == "gemv":
            groups = num_groups(shape[1], self.group_size)
            zeros = unpacked(tensors[".qzeros"], 4)[:, :groups]
            return integer_rows(unpacked(tensors[".qweight"], 4), zeros, tensors[".scales"][:, :groups], 4, self.group_size)
        codes, zeros = (_in_order(unpacked(tensors[name], 4)).T for name in (".qweight", ".qzeros"))
        return integer_rows(codes, zeros, tensors[".scales"].T, 4, self.group_size)


_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word its 8 numbers are, the lowest bits first


def _in_order(codes: Array) -> Array:
    return codes.reshape(len(codes), -1, 8)[..., _ORDER].reshape(len(codes), -1)


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

    def rows(self, shape: Shape, tensors: Mapping[str, Array]) -> QuantizedRows:
        if ".weight_shape" in tensors and tuple(tensors[".weight_shape"].tolist()) != shape:
            raise ValueError(f".weight_shape is {tensors['.weight_shape'].tolist()} instead of {list(shape)}")
        codes = unpacked(tensors[".weight_packed"], self.bits)[:, : shape[1]]
        zeros = None if self.symmetric else unpacked(tensors[".weight_zero_point"].T, self.bits).T[: shape[0]]
        order = column_order(tensors[".weight_g_idx"], self.group_size, ".weight_g_idx") if self.act_order else None
        return integer_rows(codes, zeros, tensors[".weight_scale"], self.bits, self.group_size, order)


@dataclass(frozen=True, slots=True)
class Mlx(Scheme):
    """The affine format of MLX (`mx.quantize`), value = code * scale + bias: words hold consecutive columns of a matrix."""

    bits: int
    group_size: int

    def scale_columns(self) -> int | None:
        return self.group_size

    def tensors(self, shape: Shape) -> dict[str, Stored]:
        rows, columns = matrix(shape)
        groups = num_groups(columns, self.group_size)
        words = Stored(((rows, num_words(columns, self.bits, "columns")),), ("uint32",))
        return {".weight": words, ".scales": Stored(((rows, groups),), SCALES), ".biases": Stored(((rows, groups),), SCALES)}

    def rows(self, shape: Shape, tensors: Mapping[str, Array]) -> QuantizedRows:
        scales, offsets = (np.ascontiguousarray(tensors[name], np.float32) for name in (".scales", ".biases"))
        codes = unpacked(tensors[".weight"], self.bits)
        return QuantizedRows(codes, scales, self.group_size, kept_bits(self.bits), offsets)


_BYTES = ("uint8",)


@dataclass(frozen=True, slots=True)
class Hqq(Scheme):
    """The format of HQQ (Badri and Shaji, 2023) with groups along rows, value = (code - zero) * scale: the matrix is cut into rows of a
    group each, of which those of the first part are in the highest bits of a byte, or with 3 bits of a word, and so on."""

    bits: int
    group_size: int | None

    def scale_columns(self) -> int | None:
        return self.group_size

    def tensors(self, shape: Shape) -> dict[str, Stored]:
        rows, columns = matrix(shape)
        groups = rows * num_groups(columns, self.group_size)
        parts = 10 if self.bits == 3 else 8 // self.bits
        if self.bits != 3 and groups % parts:
            raise ValueError(f"{groups} groups of {self.bits} bits do not fill bytes")
        numbers = Stored(((groups, 1),), SCALES)
        codes = Stored(((math.ceil(groups / parts), self.group_size or columns),), _WORDS if self.bits == 3 else _BYTES)
        return {".W_q": codes, ".scale": numbers, ".zero": numbers} | {name: Stored((), (), optional=True) for name in _HQQ_SETTINGS}

    def rows(self, shape: Shape, tensors: Mapping[str, Array]) -> QuantizedRows:
        rows, columns = shape
        scales, zeros = (np.ascontiguousarray(tensors[name], np.float32).reshape(rows, -1) for name in (".scale", ".zero"))
        top = 27 if self.bits == 3 else 8 - self.bits
        codes = _of_parts(tensors[".W_q"], self.bits, range(top, -1, -self.bits), shape)
        return QuantizedRows(codes, scales, self.group_size or columns, kept_bits(self.bits), -zeros * scales)


def _of_parts(packed: Array, bits: int, places: Iterable[int], shape: Shape) -> Array:
    """Codes of which those of the first part of a matrix are at the first of these places in bytes or words, and so on."""
    parts = np.concatenate([packed >> place & (1 << bits) - 1 for place in places])
    return parts.reshape(-1)[: math.prod(shape)].astype(np.uint8).reshape(shape)


_HQQ_SETTINGS = (  # that its checkpoints repeat for each module
    *(".nbits", ".group_size", ".shape", ".axis", ".packing", ".unpack_view_dtype", ".view_as_float", ".quant_scale", ".quant_zero"),
    *(".compute_dtype", ".offload_meta", ".encoded_state_dict", ".stores_quant_config", ".channel_wise", ".optimize", ".round_zero"),
)


@dataclass(frozen=True, slots=True)
class Quanto(Scheme):
    """The formats qint4 and qint2 of Optimum Quanto, value = code * scale - shift: the matrix is cut into rows of a group each, of which
    those of the first half or quarter are in the lowest bits of a byte, and so on."""

    bits: int

    def scale_columns(self) -> int:
        return 128

    def group_size(self, columns: int) -> int:
        """That which Quanto chooses, since nothing says it: of the sizes that divide the columns the largest; else all of them."""
        return next((size for size in (128, 96, 64, 32) if columns > 128 and columns % size == 0), columns)

    def tensors(self, shape: Shape) -> dict[str, Stored]:
        rows, columns = matrix(shape)
        size = self.group_size(columns)
        groups = rows * columns // size
        numbers = Stored(((groups, 1),), SCALES)
        found = {".weight._data._data": Stored(((math.ceil(groups * self.bits / 8), size),), _BYTES)}
        return found | dict.fromkeys((".weight._scale", ".weight._shift"), numbers) | _OF_ACTIVATIONS

    def rows(self, shape: Shape, tensors: Mapping[str, Array]) -> QuantizedRows:
        rows, columns = shape
        scales, shifts = (np.ascontiguousarray(tensors[f".weight.{name}"], np.float32).reshape(rows, -1) for name in ("_scale", "_shift"))
        codes = _of_parts(tensors[".weight._data._data"], self.bits, range(0, 8, self.bits), shape)
        return QuantizedRows(codes, scales, self.group_size(columns), self.bits, -shifts)


_OF_ACTIVATIONS = {name: Stored((), (), optional=True) for name in (".input_scale", ".output_scale")}
_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_E2M1 = np.array([*_HALF, *(-number for number in _HALF)], np.float32)


@dataclass(frozen=True, slots=True)
class Mxfp4(Scheme):
    """The microscaling format of the Open Compute Project (OCP MX 1.0, 2023) as GPT-OSS stores its experts, or compressed-tensors a module:
    blocks of 32 numbers E2M1 in 16 bytes, the even column in the low bits, with a scale of 2 ** (byte - 127)."""

    codes: str = "_blocks"
    scales: str = "_scales"

    def scale_columns(self) -> int:
        return 32

    def tensors(self, shape: Shape) -> dict[str, Stored]:
        *outer, columns = shape
        if columns % 32:
            raise ValueError(f"blocks of 32 do not divide its {columns} columns")
        return {
            self.codes: Stored(((*outer, columns // 32, 16), (*outer, columns // 2)), _BYTES),
            self.scales: Stored(((*outer, columns // 32),), _BYTES),
        }

    def rows(self, shape: Shape, tensors: Mapping[str, Array]) -> QuantizedRows:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        exponents = tensors[self.scales].reshape(rows, -1)
        if bool((exponents == 255).any()):
            raise ValueError(f"{self.scales} has 255, which is not a number")
        codes = unpacked(tensors[self.codes].reshape(rows, columns // 2), 4)
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
        return QuantizedRows(codes, scales, 32, 4, table=_E2M1)


@dataclass(frozen=True, slots=True)
class Nvfp4(Scheme):
    """NVIDIA's format, as compressed-tensors and ModelOpt store it: numbers E2M1, two in a byte, the even column in the low bits, with a
    scale of float8_e4m3fn for 16 of them, and a scale of the whole matrix, which divides those of compressed-tensors."""

    codes: str
    whole: str
    divides: bool

    def scale_columns(self) -> int:
        return 16

    def tensors(self, shape: Shape) -> dict[str, Stored]:
        rows, columns = matrix(shape)
        groups = num_groups(columns, 16)
        return {
            self.codes: Stored(((rows, columns // 2),), _BYTES),
            ".weight_scale": Stored(((rows, groups),), ("float8_e4m3fn",)),
            self.whole: Stored(((1,), ()), ("float32",)),
            **{name: Stored((), (), optional=True) for name in (".input_scale", ".input_global_scale")},
        }

    def rows(self, shape: Shape, tensors: Mapping[str, Array]) -> QuantizedRows:
        scales, whole = tensors[".weight_scale"].astype(np.float32), np.float32(tensors[self.whole].reshape(()))
        if not whole > 0:
            raise ValueError(f"{self.whole} is {whole}, which is not above 0")
        scales = scales / whole if self.divides else scales * whole
        return QuantizedRows(unpacked(tensors[self.codes], 4), scales, 16, 4, table=_E2M1)


_STATE = ".weight.quant_state.bitsandbytes__"


@dataclass(frozen=True, slots=True)
class BitsAndBytes4(Scheme):
    """bitsandbytes (QLoRA, Dettmers et al. 2023, section 3): two numbers per byte, the first in the high bits, in blocks over the flattened
    matrix. `double`: the scales of the blocks are quantised themselves, value = nested_quant_map[code] * nested_absmax + nested_offset."""

    kind: str  # nf4 or fp4
    double: bool

    def scale_columns(self) -> int:
        return 64  # of most checkpoints; it stands with the numbers

    def tensors(self, shape: Shape) -> dict[str, Stored]:
        rows, columns = matrix(shape)
        found = {
            ".weight": Stored(((math.ceil(rows * columns / 2), 1),), _BYTES),
            ".weight.absmax": Stored((), _BYTES if self.double else ("float32",)),
            ".weight.quant_map": Stored(((16,),), ("float32",)),
            _STATE + self.kind: Stored((), _BYTES),
        }
        if self.double:
            found[".weight.nested_absmax"] = Stored((), ("float32",))
            found[".weight.nested_quant_map"] = Stored(((256,),), ("float32",))
        return found

    def rows(self, shape: Shape, tensors: Mapping[str, Array]) -> QuantizedRows:
        rows, columns = matrix(shape)
        state = self._state(tensors[_STATE + self.kind], shape)
        block = state["blocksize"]
        absmax = _of_blocks(tensors, ".weight.absmax", rows * columns, block)
        if self.double:
            nested = _of_blocks(tensors, ".weight.nested_absmax", len(absmax), state["nested_blocksize"])
            numbers = tensors[".weight.nested_quant_map"][absmax]
            absmax = numbers * nested[np.arange(len(absmax)) // state["nested_blocksize"]] + np.float32(state["nested_offset"])
        group_size = math.gcd(block, columns)  # a block may end within a row
        starts = np.arange(0, rows * columns, group_size)
        scales = absmax[starts // block].reshape(rows, columns // group_size)
        packed = tensors[".weight"].ravel()
        codes = np.stack((packed >> 4, packed & 15), -1).ravel()[: rows * columns].reshape(rows, columns)
        return QuantizedRows(codes, scales, group_size, 4, table=tensors[".weight.quant_map"])

    def _state(self, stored: Array, shape: Shape) -> dict[str, Any]:
        """The JSON that says how the blocks are cut."""
        keys = ["blocksize", *(["nested_blocksize", "nested_offset"] if self.double else [])]
        try:
            state = json.loads(stored.tobytes())
            found = {key: state[key] for key in keys}
            stored_shape = tuple(state["shape"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{_STATE}{self.kind} is not a JSON object with shape, {', '.join(keys)}") from error
        if stored_shape != shape or state.get("quant_type", self.kind) != self.kind:
            raise ValueError(f"{_STATE}{self.kind} is of {state.get('quant_type')} and shape {list(stored_shape)} instead of {list(shape)}")
        for key in keys:
            value, is_size = found[key], key.endswith("blocksize")
            if not is_number(value) or (is_size and (not isinstance(value, int) or not 0 < value < 1 << 31)):
                raise ValueError(f"{_STATE}{self.kind} has {key} {value!r}")
        return found


def _of_blocks(tensors: Mapping[str, Array], name: str, count: int, block: int) -> Array:
    """A tensor that has one number for each block of `count` numbers."""
    found = tensors[name].ravel()
    if len(found) != math.ceil(count / block):
        raise ValueError(f"{name} has {len(found)} numbers for {math.ceil(count / block)} blocks of {block}")
    return found
