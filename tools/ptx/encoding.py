"""How a kernel is written down for the core in C++ (`core/`): registers, immediates and parameters are numbered registers, and each
instruction is an `Op` of `core/arithmetic.h`, or FALLBACK where the core does not know it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tools.ptx.executor import NO_EFFECT, integer, parts_of
from tools.ptx.matrices import KINDS, GroupShape
from tools.ptx.program import (
    SIZES,
    SPECIAL,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Operand,
    PtxError,
    Register,
    Symbol,
    Vector,
)
from tools.ptx.registers import immediate, mask, operand_kinds

_KINDS = tuple("pred b8 u8 s8 b16 u16 s16 f16 bf16 b32 u32 s32 f32 b64 u64 s64 f64 e4m3 e5m2 tf32".split())  # noqa: SIM905
_CODE_NAMES = """mov add sub mul mul.wide mad mad.wide fma neg abs min max div rem rcp sqrt rsqrt ex2 lg2 and or xor not shl shr setp
    selp prmt lop3 mul.hi bfi bfe popc clz brev cvt fallback bra exit barrier nothing fence pack unpack load store param
    copy commit wait mma wgmma wgmma.commit wgmma.wait atomic shuffle vote ldmatrix stmatrix"""
_CODES = _CODE_NAMES.split()  # as in arithmetic.h
FALLBACK = _CODES.index("fallback")
_TESTS = {name: at for at, name in enumerate(("eq", "ne", "lt", "le", "gt", "ge"))} | {"lo": 2, "ls": 3, "hi": 4, "hs": 5}
_FTZ, _NAN, _UNORDERED, _TOWARDS_ZERO, _PAIR = 1, 2, 4, 8, 128
_WITH = {"and": 16, "or": 32, "xor": 64}
_WHOLE = {"rni": 1, "rzi": 2, "rmi": 3, "rpi": 4}
_ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas")
_OF_SHARED = ("load", "store", "copy", "ldmatrix", "stmatrix")  # whose flags are of what is allowed
_FLOAT_CODES = ("add", "sub", "mul", "fma", "min", "max", "neg", "abs", "div", "rcp", "sqrt", "rsqrt", "ex2", "lg2")
_INTEGER_CODES = ("add", "sub", "mul", "mad", "neg", "abs", "min", "max", "div", "rem", "shl", "shr", "bfe", "popc", "clz", "brev")
_FIELDS = ("code", "kind", "source_kind", "flags", "extra", "guard", "negated", "first", "count")
_OP = np.dtype([*((name, np.int32) for name in _FIELDS), ("offset", np.int64)], align=True)
_MODELLED = (*(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"), "%laneid", "%warpid")


class _NotKnown(Exception):
    """The core has no such instruction."""


@dataclass(frozen=True)
class _Form:
    code: str
    operands: list[int]
    kind: int = 0
    source_kind: int = 0
    flags: int = 0
    extra: int = 0
    offset: int = 0

    def row(self, one: Instruction, numbers: Mapping[str, int], first: int) -> tuple[int, ...]:
        """As the core has it. `first`: its place among the operands of all."""
        guard, negated = (-1, 0) if one.guard is None else (numbers[one.guard.register.name], int(one.guard.negated))
        code, count = _CODES.index(self.code), len(self.operands)
        return code, self.kind, self.source_kind, self.flags, self.extra, guard, negated, first, count, self.offset


class Encoded:
    """A kernel as the core has it. Registers are, in this order: special ones, those of the kernel (`own`, which a block begins anew), and
    what never changes in a launch. `numbers`: of registers by name. `constants`: the bits of registers. `parameters`: of each that is
    loaded, its name, offset and bytes, the register."""

    def __init__(self, kernel: Kernel, places: Mapping[str, int]) -> None:
        """`places`: where each array of shared memory begins."""
        self.kernel, self._places = kernel, places
        self.numbers: dict[str, int] = {}
        self.constants: dict[int, int] = {}
        self.parameters: dict[tuple[str, int, int], int] = {}
        self._types: list[str] = []
        self._by_bits: dict[int, int] = {}
        for name in _MODELLED:
            self._register(name, "u64")
        first = len(self._types)
        for one in kernel.instructions:
            for name, type in _named(one):
                if name not in self.numbers and name not in SPECIAL:
                    self._register(name, type)
        self.own = first, len(self._types)
        forms = [self._form(one) for one in kernel.instructions]
        self.operands = np.array([number for form in forms for number in form.operands] or [0], np.int32)
        firsts = np.cumsum([0, *(len(form.operands) for form in forms)])
        self.ops = np.array(
            [form.row(one, self.numbers, first) for form, one, first in zip(forms, kernel.instructions, firsts, strict=False)], _OP
        )
        self.masks = np.array([mask(type) for type in self._types], np.uint64)
        self.is_target = np.zeros(len(forms) + 1, np.uint8)
        self.is_target[list(kernel.labels.values())] = 1

    def _register(self, name: str, type: str) -> int:
        self.numbers[name] = len(self._types)
        self._types.append(type)
        return self.numbers[name]

    def _constant(self, bits: int) -> int:
        if bits not in self._by_bits:
            self._by_bits[bits] = len(self._types)
            self._types.append("u64")
            self.constants[self._by_bits[bits]] = bits
        return self._by_bits[bits]

    def parameter(self, name: str, offset: int, size: int) -> int:
        key = name, offset, size
        if key not in self.parameters:
            self.parameters[key] = len(self._types)
            self._types.append("u64")
        return self.parameters[key]

    def number(self, operand: Operand, kind: str) -> int:
        """The register of an operand."""
        match operand:
            case Register(name, _) if name in self.numbers:
                return self.numbers[name]
            case Immediate():
                return self._constant(immediate(operand, kind))
            case Symbol("_"):
                return -1
            case Symbol(name) if name in self._places:
                return self._constant(self._places[name])
        raise _NotKnown

    def _form(self, one: Instruction) -> _Form:
        try:
            form = _form(self, one)
        except (_NotKnown, PtxError):  # what is not modelled is a fault once it is executed
            return _Form("fallback", [])
        return replace(form, flags=self.kernel.allowed.flags(one)) if form.code in _OF_SHARED else form


def _named(one: Instruction) -> list[tuple[str, str]]:
    found, left = [], [*one.operands, *([one.guard.register] if one.guard else [])]
    while left:
        match left.pop():
            case Register(name, type):
                found.append((name, type))
            case Vector(parts):
                left += parts
            case Address(base, _) if base is not None:
                left.append(base)
            case _:
                pass
    return found


def _form(encoded: Encoded, one: Instruction) -> _Form:
    """How the core has an instruction. Raises _NotKnown."""
    opcode, operands = one.opcode, one.operands
    name, kind = opcode[0], opcode[-1]

    def number(operand: Operand, of: str = "b32") -> int:
        return encoded.number(operand, of)

    def numbers(several: Sequence[Operand], of: str) -> list[int]:
        return [number(operand, of) for operand in several]

    def address(operand: Operand) -> tuple[int, int]:
        if not isinstance(operand, Address):
            raise _NotKnown
        return (-1 if operand.base is None else number(operand.base, "u64")), operand.offset

    def is_shared() -> int:
        if any(part.startswith("shared") for part in opcode):
            return 1
        if "global" not in opcode:
            raise _NotKnown
        return 0

    match opcode:
        case ("bra", *_):
            (label,) = operands
            assert isinstance(label, Symbol)
            return _Form("bra", [], extra=encoded.kernel.labels[label.name])
        case ("ret" | "exit", *_):
            return _Form("exit", [])
        case ("bar" | "barrier", *rest) if "warp" not in rest:
            if "sync" not in rest and "arrive" not in rest:
                raise _NotKnown
            return _Form("barrier", numbers(operands, "u32"), extra=int("arrive" in rest))
        case ("bar" | "barrier", *_):
            return _Form("nothing", [])
        case ("fence", *rest) if "proxy" in rest:
            return _Form("fence", [])
    if name in NO_EFFECT:
        return _Form("nothing", [])
    if name == "ld" and "param" in opcode:
        place, targets, size = operands[1], parts_of(operands[0]), SIZES[kind]
        assert isinstance(place, Address)
        assert isinstance(place.base, Symbol)
        base = place.base.name
        sources = [encoded.parameter(base, place.offset + at * size, size) for at in range(len(targets))]
        return _Form("param", [*numbers(targets, kind), *sources], _kind(kind))
    if name in ("ld", "st"):
        base_number, offset = address(operands[name == "ld"])
        return _Form(
            "load" if name == "ld" else "store",
            [base_number, *numbers(parts_of(operands[name == "st"]), kind)],
            _kind(kind),
            extra=is_shared(),
            offset=offset,
        )
    if name == "cp":
        if opcode[1] != "async" or "bulk" in opcode or "wait_all" in opcode:
            raise _NotKnown
        if "commit_group" in opcode:
            return _Form("commit", [])
        if "wait_group" in opcode:
            return _Form("wait", [], extra=integer(operands[0]))
        (to, offset), (source, source_offset) = address(operands[0]), address(operands[1])
        if source < 0:
            raise _NotKnown
        given = [number(operands[3], "u32")] if len(operands) > 3 else []
        return _Form("copy", [to, source, *given], integer(operands[2]), extra=source_offset, offset=offset)
    if name == "mma":
        if not opcode[3].startswith("m16n8k") or (opcode[-4], kind) != ("f32", "f32") or opcode[-3] not in KINDS:
            raise _NotKnown
        parts = [parts_of(operand) for operand in operands]
        if opcode[4:6] != ("row", "col") or opcode[-3] != opcode[-2]:
            raise _NotKnown
        flat = [number(part) for several in parts for part in several]
        return _Form("mma", flat, _kind(KINDS[opcode[-3]]), extra=len(parts[1]))
    if name == "wgmma":
        if "commit_group" in opcode:
            return _Form("wgmma.commit", [])
        if "wait_group" in opcode:
            return _Form("wgmma.wait", [], extra=integer(operands[0]))
        if opcode[1] != "mma_async":
            return _Form("nothing", [])
        held = isinstance(operands[1], Vector)
        shape = GroupShape.of(opcode, [integer(operand) for operand in operands[4:]], held)
        left = numbers(parts_of(operands[1]), "b32" if held else "b64")
        flags = int(shape.turned[0]) + 2 * int(shape.turned[1]) + 4 * int(held)
        flat = [number(operands[3], "pred"), number(operands[2], "b64"), *left, *numbers(parts_of(operands[0]), "f32")]
        return _Form("wgmma", flat, _kind(shape.kinds[0]), _kind(shape.kinds[1]), flags, shape.rows[1])
    if name in ("atom", "red"):
        target, (place, *values) = (operands[0], operands[1:]) if name == "atom" else (Symbol("_"), operands)
        what = next(part for part in opcode if part in _ATOMICS)
        if kind in ("f16", "bf16", "f16x2", "bf16x2", "f64"):
            raise _NotKnown
        base_number, offset = address(place)
        flat = [base_number, number(target, kind), *numbers(values, kind)]
        return _Form("atomic", flat, _kind(kind), is_shared(), extra=_ATOMICS.index(what), offset=offset)
    if name == "shfl":
        target, *there = parts_of(operands[0])
        flat = [number(target), number(there[0]) if there else -1, *numbers(operands[1:4], "b32")]
        return _Form("shuffle", flat, extra=("up", "down", "bfly", "idx").index(opcode[2]))
    if name == "vote":
        which = next((at for at, part in enumerate(("ballot", "all", "any")) if part in opcode), None)
        if which is None:
            raise _NotKnown
        return _Form("vote", [number(operands[0]), number(operands[1], "pred")], extra=which)
    if name in ("ldmatrix", "stmatrix"):
        base_number, offset = address(operands[name == "ldmatrix"])
        flat = [base_number, *numbers(parts_of(operands[name == "stmatrix"]), "b32")]
        return _Form(name, flat, extra=int("trans" in opcode), offset=offset)
    if name == "mov" and len(operands) == 2 and (isinstance(operands[0], Vector) != isinstance(operands[1], Vector)):
        packs = isinstance(operands[1], Vector)
        whole, several = operands if packs else reversed(operands)
        part = f"b{8 * SIZES[kind] // len(parts_of(several))}"
        return _Form("pack" if packs else "unpack", [number(whole, kind), *numbers(parts_of(several), part)], _kind(kind))
    if not operands or any(isinstance(operand, Vector) for operand in operands):
        raise _NotKnown
    form = _of_registers(encoded, opcode, operands)
    if min(form.operands) < 0:
        raise _NotKnown  # a result that nobody wants
    return form


def _of_registers(encoded: Encoded, opcode: tuple[str, ...], operands: tuple[Operand, ...]) -> _Form:
    """An instruction that computes a result of registers alone."""
    name, parts, kind = opcode[0], opcode[1:], opcode[-1]
    flags = _FTZ * ("ftz" in parts)
    if name == "cvta":
        return _Form("mov", [encoded.number(operands[0], kind), encoded.number(operands[1], kind)], _kind("b64"))
    if name == "cvt":
        to, source = parts[-2:]
        if {to, source} == {"f64", "f32"} and set(parts[:-2]) <= {"rn", "ftz"}:
            flat = [encoded.number(operands[0], to), encoded.number(operands[1], source)]
            return _Form("cvt", flat, _kind(to), _kind(source), flags)
        known = set(parts[:-2]) <= {"rn", "rz", "ftz", *_WHOLE}
        if not known or source in ("f64", "e4m3", "e5m2") or ("rz" in parts and to != "bf16"):
            raise _NotKnown
        pair = to in ("bf16x2", "f16x2") and source == "f32"
        to = to.removesuffix("x2") if pair else to
        if to not in _KINDS or to in ("f64", "e4m3", "e5m2", "tf32") or source not in _KINDS or (len(operands) == 3) != pair:
            raise _NotKnown
        if to in ("bf16", "f16") and source in ("u64", "s64", "b64"):
            raise _NotKnown
        flags |= _PAIR * pair | _TOWARDS_ZERO * ("rz" in parts)
        whole = next((_WHOLE[part] for part in parts if part in _WHOLE), 0)
        flat = [encoded.number(operands[0], to), *(encoded.number(operand, source) for operand in operands[1:])]
        return _Form("cvt", flat, _kind(to), _kind(source), flags, whole)
    if name in ("add", "sub", "mul", "fma") and kind.removesuffix("x2") in ("f16", "bf16", "f64") and (name, kind) != ("fma", "f64"):
        if set(parts[:-1]) - {"rn"}:
            raise _NotKnown
        flat = [encoded.number(operand, kind) for operand in operands]
        return _Form(name, flat, _kind(kind.removesuffix("x2")), 0, _PAIR * kind.endswith("x2"))
    if kind not in _KINDS or kind in ("f64", "e4m3", "e5m2", "tf32"):
        raise _NotKnown
    extra, code = 0, name
    if name == "setp":
        test = parts[0]
        if kind in ("f16", "bf16") or test in ("num", "nan"):
            raise _NotKnown
        if kind == "f32" and test not in _TESTS:
            flags, test = flags | _UNORDERED, test.removesuffix("u")
        extra = _TESTS[test]
        for part in parts[1:-1]:
            flags |= _WITH.get(part, 0)
    elif name in ("mul", "mad"):
        if "hi" in parts and name == "mad":
            raise _NotKnown
        code = f"{name}.wide" if "wide" in parts else f"{name}.hi" if "hi" in parts else name
    elif name in ("min", "max"):
        flags |= _NAN * ("NaN" in parts)
    if kind == "f32" and name in _FLOAT_CODES:
        if set(parts) - {"rn", "ftz", "full", "approx", "NaN", "f32"}:
            raise _NotKnown
    elif name in ("mov", "and", "or", "xor", "not", "selp", "prmt", "lop3", "bfi", "setp"):
        if name == "prmt" and parts != ("b32",):
            raise _NotKnown
    elif name not in _INTEGER_CODES or kind in ("f16", "bf16", "f32"):
        raise _NotKnown
    kinds = operand_kinds(opcode, len(operands) - 1)
    flat = [encoded.number(operands[0], kind), *(encoded.number(operand, of) for operand, of in zip(operands[1:], kinds, strict=True))]
    return _Form(code, flat, _kind(kind), 0, flags, extra)


def _kind(name: str) -> int:
    if name not in _KINDS:
        raise _NotKnown
    return _KINDS.index(name)
