"""Formats with 4-bit codes whose numbers stand in a table: MXFP4, and nf4 of bitsandbytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aengine.kernels.quantized import QuantizedRows
from aengine.models.config.reader import is_number
from aengine.models.quantization.scheme import Scheme, Shape, Stored, matrix, unpacked

_BYTES = ("uint8",)
_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_E2M1 = torch.tensor([*_HALF, *(-number for number in _HALF)])


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

    def rows(self, shape: Shape, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        exponents = tensors[self.scales].view(rows, -1)
        if bool((exponents == 255).any()):
            raise ValueError(f"{self.scales} has 255, which is not a number")
        codes = unpacked(tensors[self.codes].view(rows, columns // 2), 4)
        scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
        return QuantizedRows(codes, scales, 32, 4, table=_E2M1)


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

    def rows(self, shape: Shape, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        rows, columns = matrix(shape)
        state = self._state(tensors[_STATE + self.kind], shape)
        block = state["blocksize"]
        absmax = _of_blocks(tensors, ".weight.absmax", rows * columns, block)
        if self.double:
            nested = _of_blocks(tensors, ".weight.nested_absmax", len(absmax), state["nested_blocksize"])
            numbers = tensors[".weight.nested_quant_map"][absmax.long()]
            absmax = numbers * nested[torch.arange(len(absmax)) // state["nested_blocksize"]] + state["nested_offset"]
        group_size = math.gcd(block, columns)  # a block may end within a row
        starts = torch.arange(0, rows * columns, group_size)
        scales = absmax[starts // block].view(rows, columns // group_size)
        packed = tensors[".weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()[: rows * columns].view(rows, columns)
        return QuantizedRows(codes, scales, group_size, 4, table=tensors[".weight.quant_map"])

    def _state(self, stored: Tensor, shape: Shape) -> dict[str, Any]:
        """The JSON that says how the blocks are cut."""
        keys = ["blocksize", *(["nested_blocksize", "nested_offset"] if self.double else [])]
        try:
            state = json.loads(bytes(stored.flatten().tolist()))
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


def _of_blocks(tensors: Mapping[str, Tensor], name: str, count: int, block: int) -> Tensor:
    """A tensor that has one number for each block of `count` numbers."""
    found = tensors[name].flatten()
    if len(found) != math.ceil(count / block):
        raise ValueError(f"{name} has {len(found)} numbers for {math.ceil(count / block)} blocks of {block}")
    return found
