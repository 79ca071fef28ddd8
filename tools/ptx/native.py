"""Executes kernels in C++ (`core/`), 10 to 100 times as fast as `executor.py`, which is its reference.

Owns how a kernel is written down for the core: registers, immediates and parameters are numbered registers, and each instruction is an
`Op`. What the core does not know is computed by `arithmetic.py` when the core comes to it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tools.ptx.arithmetic import evaluate
from tools.ptx.executor import Launch, check_limits, fault_of, reduced, shared_layout
from tools.ptx.matrices import GroupShape
from tools.ptx.memory import DeviceMemory
from tools.ptx.numbers import Bits
from tools.ptx.program import (
    SIZES,
    SPECIAL,
    Address,
    Immediate,
    Instruction,
    Kernel,
    NumberKind,
    Operand,
    PtxError,
    Register,
    Symbol,
    Vector,
)
from tools.ptx.registers import Registers, immediate, mask, operand_kinds

_KINDS = tuple("pred b8 u8 s8 b16 u16 s16 f16 bf16 b32 u32 s32 f32 b64 u64 s64 f64 e4m3 e5m2 tf32".split())  # noqa: SIM905
_CODE_NAMES = """mov add sub mul mul.wide mad mad.wide fma neg abs min max div rem rcp sqrt rsqrt ex2 lg2 and or xor not shl shr setp selp
    prmt lop3 cvt fallback bra exit barrier nothing fence load store param copy commit wait mma wgmma wgmma.commit wgmma.wait atomic shuffle
    vote ldmatrix stmatrix"""
_CODES = _CODE_NAMES.split()  # as in arithmetic.h
FALLBACK = _CODES.index("fallback")
_TESTS = {name: at for at, name in enumerate(("eq", "ne", "lt", "le", "gt", "ge"))} | {"lo": 2, "ls": 3, "hi": 4, "hs": 5}
_FTZ, _NAN, _UNORDERED, _TOWARDS_ZERO, _PAIR = 1, 2, 4, 8, 128
_WITH = {"and": 16, "or": 32, "xor": 64}
_WHOLE = {"rni": 1, "rzi": 2, "rmi": 3, "rpi": 4}
_ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas")
_NOTHING = ("membar", "fence", "prefetch", "nanosleep", "griddepcontrol")
_FLOAT_CODES = ("add", "sub", "mul", "fma", "min", "max", "neg", "abs", "div", "rcp", "sqrt", "rsqrt", "ex2", "lg2")
_INTEGER_CODES = ("add", "sub", "mul", "mad", "neg", "abs", "min", "max", "div", "rem", "shl", "shr")
_FIELDS = ("code", "kind", "source_kind", "flags", "extra", "guard", "negated", "first", "count", "unused")
_OP = np.dtype([*((name, np.int32) for name in _FIELDS), ("offset", np.int64)])
_ENDED, _NEEDS_CALLER = 0, 1
_MODELLED = (*(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"), "%laneid", "%warpid")
_NOT_OF_REGISTERS = {"bar", "barrier", "ld", "st", "cp", "mma", "wgmma", "atom", "red", "shfl", "vote", "ldmatrix", "stmatrix"}


class _NotKnown(Exception):
    """The core has no such instruction."""


@dataclass
class _Form:
    code: str
    operands: list[int]
    kind: int = 0
    source_kind: int = 0
    flags: int = 0
    extra: int = 0
    offset: int = 0


@dataclass
class Encoded:
    """A kernel as the core has it. `constants`: the bits of registers that never change, by register. `numbers`: of registers by name."""

    kernel: Kernel
    places: dict[str, int]
    numbers: dict[str, int] = field(default_factory=dict)
    types: list[str] = field(default_factory=list)
    constants: dict[int, int] = field(default_factory=dict)
    parameters: dict[tuple[str, int, int], int] = field(default_factory=dict)  # name, offset and bytes, to the register
    num_kept: int = 0

    def __post_init__(self) -> None:
        self._by_bits: dict[int, int] = {}
        for name in _MODELLED:
            self._register(name, "u64")
        for one in self.kernel.instructions:  # constants first, so that those behind them are what a block begins anew
            self._form_or_none(one)
        self.num_kept = len(self.types)
        for one in self.kernel.instructions:
            for name, type in _named(one):
                if name not in self.numbers and name not in SPECIAL:
                    self._register(name, type)
        self._settled = True
        forms = [self._form_or_none(one) or _Form("fallback", []) for one in self.kernel.instructions]
        self.operands = np.array([number for form in forms for number in form.operands] or [0], np.int32)
        self.ops = np.zeros(len(forms), _OP)
        first = 0
        for op, form, one in zip(self.ops, forms, self.kernel.instructions, strict=True):
            guard = (-1, 0) if one.guard is None else (self.numbers[one.guard.register.name], int(one.guard.negated))
            op["code"], op["kind"], op["source_kind"] = _CODES.index(form.code), form.kind, form.source_kind
            op["flags"], op["extra"], op["offset"], op["first"], op["count"] = (
                form.flags,
                form.extra,
                form.offset,
                first,
                len(form.operands),
            )
            op["guard"], op["negated"] = guard
            first += len(form.operands)
        self.masks = np.array([mask(type) for type in self.types], np.uint64)
        self.is_target = np.zeros(len(forms) + 1, np.uint8)
        self.is_target[list(self.kernel.labels.values())] = 1

    _settled = False

    def _register(self, name: str, type: str) -> int:
        self.numbers[name] = len(self.types)
        self.types.append(type)
        return self.numbers[name]

    def _constant(self, bits: int) -> int:
        if bits not in self._by_bits:
            self._by_bits[bits] = len(self.types)
            self.types.append("u64")
            self.constants[self._by_bits[bits]] = bits
        return self._by_bits[bits]

    def _parameter(self, name: str, offset: int, size: int) -> int:
        key = name, offset, size
        if key not in self.parameters:
            self.parameters[key] = len(self.types)
            self.types.append("u64")
        return self.parameters[key]

    def number(self, operand: Operand, kind: str) -> int:
        """The register of an operand; before all constants are known, 0 for one of the kernel's."""
        match operand:
            case Register(name, _):
                if name in SPECIAL and name not in _MODELLED:
                    raise _NotKnown
                if name in SPECIAL:
                    return self.numbers[name]
                return self.numbers[name] if self._settled else 0
            case Immediate():
                return self._constant(immediate(operand, kind))
            case Symbol("_"):
                return -1
            case Symbol(name) if name in self.places:
                return self._constant(self.places[name])
        raise _NotKnown

    def _form_or_none(self, one: Instruction) -> _Form | None:
        try:
            return _form(self, one)
        except _NotKnown:
            return None


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


def _parts(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


def _int(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise _NotKnown
    return operand.bits


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
            if tuple(rest) not in (("sync",), ("sync", "aligned")) or operands != (Immediate(0, NumberKind.INTEGER),):
                raise _NotKnown
            return _Form("barrier", [])
        case ("bar" | "barrier", *_):
            return _Form("nothing", [])
        case ("fence", *rest) if "proxy" in rest:
            return _Form("fence", [])
    if name in _NOTHING:
        return _Form("nothing", [])
    if name == "ld" and "param" in opcode:
        place, targets, size = operands[1], _parts(operands[0]), SIZES[kind]
        assert isinstance(place, Address)
        assert isinstance(place.base, Symbol)
        base = place.base.name
        sources = [encoded._parameter(base, place.offset + at * size, size) for at in range(len(targets))]
        return _Form("param", [*numbers(targets, kind), *sources], _kind(kind))
    if name in ("ld", "st"):
        base_number, offset = address(operands[name == "ld"])
        return _Form(
            "load" if name == "ld" else "store",
            [base_number, *numbers(_parts(operands[name == "st"]), kind)],
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
            return _Form("wait", [], extra=_int(operands[0]))
        (to, offset), (source, source_offset) = address(operands[0]), address(operands[1])
        if source < 0:
            raise _NotKnown
        given = [number(operands[3], "u32")] if len(operands) > 3 else []
        return _Form("copy", [to, source, *given], _int(operands[2]), extra=source_offset, offset=offset)
    if name == "mma":
        kinds = {"f16": "f16", "bf16": "bf16", "tf32": "f32", "e4m3": "e4m3", "e5m2": "e5m2"}
        if not opcode[3].startswith("m16n8k") or (opcode[-4], kind) != ("f32", "f32") or opcode[-3] not in kinds:
            raise _NotKnown
        parts = [_parts(operand) for operand in operands]
        if opcode[4:6] != ("row", "col") or opcode[-3] != opcode[-2]:
            raise _NotKnown
        flat = [number(part) for several in parts for part in several]
        return _Form("mma", flat, _kind(kinds[opcode[-3]]), extra=len(parts[1]))
    if name == "wgmma":
        if "commit_group" in opcode:
            return _Form("wgmma.commit", [])
        if "wait_group" in opcode:
            return _Form("wgmma.wait", [], extra=_int(operands[0]))
        if opcode[1] != "mma_async":
            return _Form("nothing", [])
        held = isinstance(operands[1], Vector)
        shape = GroupShape.of(opcode, [_int(operand) for operand in operands[4:]], held)
        left = numbers(_parts(operands[1]), "b32" if held else "b64")
        flags = int(shape.turned[0]) + 2 * int(shape.turned[1]) + 4 * int(held)
        flat = [number(operands[3], "pred"), number(operands[2], "b64"), *left, *numbers(_parts(operands[0]), "f32")]
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
        target, *there = _parts(operands[0])
        flat = [number(target), number(there[0]) if there else -1, *numbers(operands[1:4], "b32")]
        return _Form("shuffle", flat, extra=("up", "down", "bfly", "idx").index(opcode[2]))
    if name == "vote":
        which = next((at for at, part in enumerate(("ballot", "all", "any")) if part in opcode), None)
        if which is None:
            raise _NotKnown
        return _Form("vote", [number(operands[0]), number(operands[1], "pred")], extra=which)
    if name in ("ldmatrix", "stmatrix"):
        base_number, offset = address(operands[name == "ldmatrix"])
        flat = [base_number, *numbers(_parts(operands[name == "stmatrix"]), "b32")]
        return _Form(name, flat, extra=int("trans" in opcode), offset=offset)
    if not operands or isinstance(operands[0], Vector) or any(isinstance(operand, Vector) for operand in operands):
        raise _NotKnown
    return _of_registers(encoded, opcode, operands)


def _of_registers(encoded: Encoded, opcode: tuple[str, ...], operands: tuple[Operand, ...]) -> _Form:
    """An instruction that computes a result of registers alone."""
    name, parts, kind = opcode[0], opcode[1:], opcode[-1]
    flags = _FTZ * ("ftz" in parts)
    if name == "cvta":
        return _Form("mov", [encoded.number(operands[0], kind), encoded.number(operands[1], kind)], _kind("b64"))
    if name == "cvt":
        to, source = parts[-2:]
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
        if "hi" in parts:
            raise _NotKnown
        code = f"{name}.wide" if "wide" in parts else name
    elif name in ("min", "max"):
        flags |= _NAN * ("NaN" in parts)
    if kind == "f32" and name in ("add", "sub", "mul", "fma", "div", "min", "max", *_FLOAT_CODES):
        if set(parts) - {"rn", "ftz", "full", "approx", "NaN", "f32"}:
            raise _NotKnown
    elif name in ("mov", "and", "or", "xor", "not", "selp", "prmt", "lop3", "setp"):
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


def _computed(one: Instruction, registers: Registers, threads: NDArray[np.bool_]) -> Bits:
    """What the core does not know."""
    if not one.operands or one.opcode[0] in _NOT_OF_REGISTERS:
        raise PtxError(f"{one} is not modelled")
    if one.opcode[0] != "redux":
        return evaluate(one.opcode, registers.read_all(one.opcode, one.operands[1:]))
    warps = threads.reshape(-1, 32)
    if (warps.any(1) != warps.all(1)).any():
        raise PtxError("an instruction of whole warps, of which some threads are missing")
    return reduced(one.opcode, registers.read(one.operands[1], one.opcode[-1]))


@functools.cache
def library() -> ctypes.CDLL:
    """The core, compiled when it is first asked for and kept beside other temporary files."""
    folder = pathlib.Path(__file__).parent / "core"
    text = b"".join(one.read_bytes() for one in sorted(folder.iterdir()))
    target = pathlib.Path(tempfile.gettempdir()) / f"aengine-ptx-{os.getuid()}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not target.exists():
        command = ["c++", "-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", str(folder / "core.cpp")]
        with tempfile.TemporaryDirectory(dir=target.parent) as made:
            subprocess.run([*command, "-o", f"{made}/core.so"], check=True)
            os.replace(f"{made}/core.so", target)
    core = ctypes.CDLL(str(target))
    pointer, whole = ctypes.c_void_p, ctypes.c_int
    core.ptx_new.argtypes = [pointer] * 7 + [whole] * 3 + [pointer, pointer, ctypes.c_uint64]
    core.ptx_new.restype = pointer
    core.ptx_begin.argtypes = [pointer, whole, whole]
    core.ptx_begin.restype = None
    core.ptx_message.restype = ctypes.c_char_p
    for one in (core.ptx_resume, core.ptx_pc, core.ptx_message, core.ptx_delete):
        one.argtypes = [pointer]
    return core


def execute(kernel: Kernel, memory: DeviceMemory, launch: Launch, encoded: Encoded | None = None) -> NDArray[np.int64]:
    """Runs all blocks, one after another, and returns how often threads executed each instruction. Raises KernelFault. `encoded`: what
    `Encoded` has made of the kernel."""
    check_limits(kernel, launch)
    places, shared = shared_layout(kernel, launch.shared_bytes)
    encoded = encoded or Encoded(kernel, places)
    lanes = int(np.prod(launch.block))
    registers = np.zeros((len(encoded.types), lanes), np.uint64)
    for number, bits in encoded.constants.items():
        registers[number] = bits & (2**64 - 1)
    arguments = {one.name: argument for one, argument in zip(kernel.parameters, launch.arguments, strict=True)}
    for (name, offset, size), number in encoded.parameters.items():
        registers[number] = int.from_bytes(arguments[name][offset : offset + size], "little")
    named = {name: registers[number] for name, number in encoded.numbers.items()}
    thread = np.arange(lanes)
    named["%laneid"][:], named["%warpid"][:] = thread % 32, thread // 32
    for axis, size, blocks in zip("xyz", launch.block, launch.grid, strict=True):
        named[f"%tid.{axis}"][:], named[f"%ntid.{axis}"][:], named[f"%nctaid.{axis}"][:] = thread % size, size, blocks
        thread = thread // size
    by_name = Registers(lanes, named, places, in_place=True)
    doing, executed = np.zeros(lanes, np.uint8), np.zeros(len(kernel.instructions), np.int64)
    core = library()
    data, state = memory.arrays
    given = (encoded.ops, encoded.operands, encoded.is_target, encoded.masks, registers, doing, executed)
    sizes = (len(encoded.ops), len(encoded.types), lanes)
    state_of = core.ptx_new(*(one.ctypes.data for one in given), *sizes, data.ctypes.data, state.ctypes.data, data.size)
    try:
        for block in range(int(np.prod(launch.grid))):
            left = block
            for axis, blocks in zip("xyz", launch.grid, strict=True):
                named[f"%ctaid.{axis}"][:] = left % blocks
                left //= blocks
            core.ptx_begin(state_of, shared, encoded.num_kept)
            while (status := core.ptx_resume(state_of)) != _ENDED:
                one, threads = kernel.instructions[core.ptx_pc(state_of)], doing.astype(bool)
                what = None if status == _NEEDS_CALLER else core.ptx_message(state_of).decode()
                if what is None:
                    try:
                        by_name.write(one.operands[0], _computed(one, by_name, threads), threads)
                        continue
                    except PtxError as error:
                        what = str(error)
                raise fault_of(kernel, launch, one, what, block, int(threads.argmax()), int(threads.sum()))
    finally:
        core.ptx_delete(state_of)
    return executed
