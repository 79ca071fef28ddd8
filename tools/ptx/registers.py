"""Registers of threads by their names, and operands read from and written to them. Knows no instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tools.ptx.numbers import FLOATS, Bits, rounded, values
from tools.ptx.program import SIZES, SPECIAL, Address, Immediate, NumberKind, Operand, PtxError, Register, Symbol, Vector

_U = np.uint64
POISON = _U(0xDEADBEEFDEADBEEF)  # of registers that were never written: compilers fill up pairs with such


def mask(type: str) -> np.uint64:
    return _U(1 if type == "pred" else 2 ** (8 * SIZES[type]) - 1)


def immediate(operand: Immediate, kind: str) -> int:
    """The bits of an immediate where a number of `kind` is expected."""
    if operand.kind is NumberKind.FLOAT64 and kind in FLOATS and kind != "f64":
        return int(rounded(values(np.array([operand.bits], _U), "f64"), kind)[0])
    return operand.bits & (2**64 - 1)


def operand_kinds(opcode: Sequence[str], count: int) -> list[str]:
    """Of the operands behind the result. Amounts of shifts, positions and predicates have types of their own."""
    name, kind = opcode[0], opcode[-1]
    kinds = [kind] * count
    if name in ("shl", "shr", "bfe"):
        kinds[1:] = ["u32"] * (count - 1)
    elif name == "bfi":
        kinds[2:] = ["u32", "u32"]
    elif name in ("selp", "setp"):
        kinds[2:] = ["pred"] * (count - 2)
    elif name == "mad" and "wide" in opcode:
        kinds[2] = kind[0] + str(2 * int(kind[1:]))
    return kinds


class Registers:
    """`named`: by name, [threads] each. `places`: where the arrays of shared memory begin. `in_place`: whether a register stays the array
    that it was, whoever else has it."""

    def __init__(self, threads: int, named: dict[str, Bits], places: Mapping[str, int], in_place: bool = False) -> None:
        self._threads, self._named, self._places, self._in_place = threads, named, places, in_place

    def read(self, operand: Operand, kind: str) -> Bits:
        match operand:
            case Register(name, type):
                if name not in self._named:
                    if name in SPECIAL:
                        raise PtxError(f"{name} is not modelled")
                    self._named[name] = np.full(self._threads, POISON & mask(type))
                return self._named[name]
            case Immediate():
                return np.full(self._threads, immediate(operand, kind), _U)
            case Symbol(name):
                if name not in self._places:
                    raise PtxError(f"{name} is no array of shared memory")
                return np.full(self._threads, self._places[name], _U)
            case Vector(parts):
                width = 8 * SIZES[kind] // len(parts)
                whole = np.zeros(self._threads, _U)
                for k, part in enumerate(parts):
                    whole |= (self.read(part, f"b{width}") & _U(2**width - 1)) << _U(k * width)
                return whole
            case Address():
                raise PtxError("an address where a number is expected")

    def read_all(self, opcode: Sequence[str], operands: Sequence[Operand]) -> list[Bits]:
        """Those behind the result."""
        return [self.read(one, of) for one, of in zip(operands, operand_kinds(opcode, len(operands)), strict=True)]

    def write(self, target: Operand, bits: Bits, doing: NDArray[np.bool_]) -> None:
        match target:
            case Register(name, type):
                old = self._named.get(name)
                bits = bits & mask(type)
                if old is not None and self._in_place:
                    np.copyto(old, bits, where=doing)
                    return
                self._named[name] = bits if doing.all() else np.where(doing, bits, POISON & mask(type) if old is None else old)
            case Vector(parts):
                types = [part.type for part in parts if isinstance(part, Register)]
                for k, part in enumerate(parts):
                    self.write(part, bits >> _U(k * 8 * SIZES[types[0]]), doing)
            case Symbol("_"):
                pass
            case _:
                raise PtxError("a result needs a register")
