"""Reads PTX: text to kernels of instructions, whose operands are resolved to registers, immediates, addresses and names.

Owns the grammar, scopes of registers and where in the source an instruction comes from. Knows no instruction: what an opcode means, and
whether there is one of that name, is for those who execute. The grammar is that of NVIDIA's PTX ISA, sections 4 and 5, as far as Triton and
nvcc write it: entries, no functions.
"""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


class PtxError(Exception):
    """PTX that cannot be read; the message names the line."""


class NumberKind(enum.Enum):
    """How an immediate is written: 5, 0f3F800000 or 1.0, 0d3FF0000000000000."""

    INTEGER = "integer"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


@dataclass(frozen=True)
class Register:
    """A register, or one of the special ones such as %tid.x. One of an inner scope has the number of the scope in its name."""

    name: str
    type: str


@dataclass(frozen=True)
class Immediate:
    """A number in an instruction. `bits`: of an integer its value, which may be negative, else the bits of the float."""

    bits: int
    kind: NumberKind


@dataclass(frozen=True)
class Symbol:
    """The name of a label, a parameter or an array."""

    name: str


@dataclass(frozen=True)
class Address:
    """`base` plus `offset` bytes. `base` is None for a bare number."""

    base: Register | Symbol | None
    offset: int


@dataclass(frozen=True)
class Vector:
    """Several operands as one: {a, b}, or the two results a|b of a shuffle or a comparison."""

    parts: tuple[Operand, ...]


Operand = Register | Immediate | Symbol | Address | Vector


@dataclass(frozen=True)
class Guard:
    """The predicate without which an instruction does nothing, or with which it does nothing if `negated`."""

    register: Register
    negated: bool


@dataclass(frozen=True)
class Source:
    """A line of the program that was compiled. `file` is its name without folders."""

    file: str
    line: int


@dataclass(frozen=True)
class Instruction:
    """`opcode`: its parts between the dots. `line`: in the PTX, from 1. `source`: None if the compiler does not tell."""

    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    source: Source | None

    def __str__(self) -> str:
        guard = "" if self.guard is None else f"@{'!' * self.guard.negated}{self.guard.register.name} "
        return guard + ".".join(self.opcode)


@dataclass(frozen=True)
class Variable:
    """A parameter, or an array in shared memory. `size`: its bytes; 0 for the array whose size a launch gives."""

    name: str
    type: str
    size: int
    align: int


@dataclass(frozen=True)
class Allowed:
    """What a library does and is no mistake of it. `races`: where its accesses of shared memory race without harm. `unwritten`: whether it
    reads shared memory that was never written, of which nothing comes; it finds no numbers there."""

    races: frozenset[Source] = frozenset()
    unwritten: bool = False

    def flags(self, instruction: Instruction) -> int:
        """As the core in C++ has it."""
        return int(instruction.source in self.races) + 2 * int(self.unwritten)


@dataclass(frozen=True)
class Kernel:
    """An entry. `labels`: the number of the instruction that follows each. `threads`: of a block, if the compiler fixed it."""

    name: str
    parameters: tuple[Variable, ...]
    shared: tuple[Variable, ...]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    threads: int | None
    allowed: Allowed = Allowed()


SPECIAL = {f"%{name}.{axis}": "u32" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"} | dict.fromkeys(
    ("%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%clock", "%dynamic_smem_size", "%total_smem_size", "%clusterid.x"), "u32"
)
SIZES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4}
SIZES |= {"f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>-?(?:0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?))(?![\w$])
    |(?P<word>[%$\w.][\w$]*(?:(?:\.|::)[\w$]+)*)
    |(?P<string>"[^"]*")
    |(?P<mark>[{}\[\](),;:@!|<>=+])
    )""",
    re.VERBOSE,
)
_ENTRY = re.compile(  # up to what follows on the level of the module
    r"^(?:\.visible |\.weak )*\.entry (?P<name>[\w$]+)\(.*?^}\s*(?=^\.(?:visible|weak|entry|file|section|global|const|extern|func)\b|\Z)",
    re.MULTILINE | re.DOTALL,
)
_BY_LINE = (".version", ".target", ".address_size", ".file", ".loc")  # directives that end with their line


def read_kernels(text: str) -> dict[str, Kernel]:
    """The kernels of a PTX module, by their names. Raises PtxError for what is not understood."""
    return _Module(text).read()


def read_kernel(text: str, name: str) -> Kernel:
    """One of many kernels of a module, of which no other is read. Raises PtxError for what is not understood, and if there is none."""
    kernels = read_kernels(_ENTRY.sub(lambda one: one[0] if one["name"] == name else "\n" * one[0].count("\n"), text))
    if name not in kernels:
        raise PtxError(f"there is no kernel {name}")
    return kernels[name]


@dataclass(frozen=True)
class _Token:
    text: str
    kind: str  # number, word, string, mark, loc
    line: int


class _Module:
    def __init__(self, text: str) -> None:
        self.files: dict[int, str] = {}
        self.shared: list[Variable] = []
        self._tokens = list(self._split(text))
        self._at = 0

    def read(self) -> dict[str, Kernel]:
        kernels = {}
        while self._at < len(self._tokens):
            words = []
            while self.peek().kind in ("word", "number") and self.peek().text not in (".entry", ".func"):
                words.append(self.next().text)
            if self.peek().text == ".entry":
                self.next()
                kernel = _Entry(self).read()
                kernels[kernel.name] = kernel
            elif ".shared" in words:
                self.shared.append(self.variable(words))
                self.skip_statement()
            elif ".global" in words or ".const" in words or self.peek().kind == "loc":
                self.skip_statement()
            else:
                raise self.error(f"{' '.join(words)} {self.peek().text} is not understood")
        return kernels

    def peek(self) -> _Token:
        if self._at == len(self._tokens):
            raise PtxError(f"line {self._tokens[-1].line if self._tokens else 1}: the text ends in the midst of a statement")
        return self._tokens[self._at]

    def next(self, *texts: str) -> _Token:
        """The next token, which must be one of `texts`, if there are any."""
        token = self.peek()
        if texts and token.text not in texts:
            raise self.error(f"{token.text} stands where {' or '.join(texts)} is expected")
        self._at += 1
        return token

    def error(self, why: str) -> PtxError:
        return PtxError(f"line {self._tokens[min(self._at, len(self._tokens) - 1)].line}: {why}")

    def skip_statement(self) -> None:
        """To behind the next semicolon; or behind one line of a directive."""
        if self.next().kind != "loc" and self._tokens[self._at - 1].text != ";":
            while self.next().text != ";":
                pass

    def variable(self, words: list[str]) -> Variable:
        """Of `.shared .align 16 .b8 name` and of `.param .u64 .ptr .global .align 1 name`, with `[8]` or `[]` behind it."""
        name, align = words[-1], int(words[words.index(".align") + 1]) if ".align" in words else 0
        type = next(word[1:] for word in words if word[1:] in SIZES)
        size = SIZES[type]
        if self.peek().text == "[":
            self.next()
            size *= int(self.next().text) if self.peek().kind == "number" else 0
            self.next("]")
        return Variable(name, type, size, align or SIZES[type])

    def words(self) -> list[str]:
        """Words and numbers, up to a mark."""
        found = []
        while self.peek().kind in ("word", "number"):
            found.append(self.next().text)
        return found

    def _split(self, text: str) -> Iterator[_Token]:
        for number, whole in enumerate(text.splitlines(), 1):
            line = whole.split("//")[0].strip()
            if line.startswith(".section"):
                return  # of debuggers, behind all code
            fields = line.split()
            if fields and fields[0] in _BY_LINE:
                if fields[0] == ".file":
                    self.files[int(fields[1])] = line.split('"')[1].split("/")[-1]
                elif fields[0] == ".loc":
                    yield _Token(" ".join(fields[1:3]), "loc", number)
                continue
            at = 0
            while at < len(line):
                match = _TOKEN.match(line, at)
                if match is None:
                    raise PtxError(f"line {number}: {line[at : at + 20].strip()} is not understood")
                kind = match.lastgroup or ""
                yield _Token(match[kind], kind, number)
                at = match.end()


class _Entry:
    """Reads one entry, from behind the word `.entry`."""

    def __init__(self, module: _Module) -> None:
        self._module = module
        self._parameters: list[Variable] = []
        self._shared = list(module.shared)
        self._scopes: list[dict[str, str]] = [{}]  # names, or what stands before their numbers, with types
        self._prefixes: list[str] = [""]
        self._instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        self._source: Source | None = None
        self._num_scopes = 0

    def read(self) -> Kernel:
        module = self._module
        name = module.next().text
        if module.peek().text == "(":
            module.next()
            while module.peek().text != ")":
                self._parameters.append(module.variable(module.words()))
                if module.peek().text == ",":
                    module.next()
            module.next(")")
        threads = None
        while module.peek().text != "{":
            word = module.next().text
            if word == ".reqntid":
                threads = self._sizes()
        self._block()
        return Kernel(name, tuple(self._parameters), tuple(self._shared), tuple(self._instructions), self._labels, threads)

    def _sizes(self) -> int:
        threads = int(self._module.next().text)
        while self._module.peek().text == ",":
            self._module.next()
            threads *= int(self._module.next().text)
        return threads

    def _block(self) -> None:
        """Of statements in braces, which is a scope of registers."""
        module = self._module
        module.next("{")
        self._scopes.append({})
        self._prefixes.append(f"{self._num_scopes}:" if self._num_scopes else "")
        self._num_scopes += 1
        while module.peek().text != "}":
            if module.peek().text == "{":
                self._block()
            else:
                self._statement()
        module.next("}")
        self._scopes.pop()
        self._prefixes.pop()

    def _statement(self) -> None:
        module = self._module
        token = module.peek()
        if token.kind == "loc":
            file, line = map(int, module.next().text.split())
            self._source = Source(module.files.get(file, "?"), line) if line else None
        elif token.text == ";":
            module.next()
        elif token.text == ".reg":
            module.next()
            self._declare(module.next().text[1:])
        elif token.text == ".shared":
            self._shared.append(module.variable(module.words()))
            module.next(";")
        elif token.text == ".pragma":
            module.skip_statement()
        elif token.text.startswith("."):
            raise module.error(f"{token.text} is not understood")
        else:
            self._instruction_or_label()

    def _declare(self, type: str) -> None:
        while True:
            name = self._module.next().text
            if self._module.peek().text == "<":
                self._module.next()
                self._module.next()
                self._module.next(">")
                name += "<>"
            self._scopes[-1][name] = type
            if self._module.next(",", ";").text == ";":
                return

    def _instruction_or_label(self) -> None:
        module, guard = self._module, None
        if module.peek().text == "@":
            module.next()
            negated = module.peek().text == "!"
            if negated:
                module.next()
            guard = Guard(self._register(module.next().text), negated)
        token = module.next()
        if module.peek().text == ":" and guard is None:
            module.next()
            self._labels[token.text] = len(self._instructions)
            return
        operands: list[Operand] = []
        while module.peek().text != ";":
            operands.append(self._operand())
            if module.peek().text == "|":
                module.next()
                operands.append(Vector((operands.pop(), self._operand())))
            if module.peek().text != ";":
                module.next(",")
        module.next(";")
        self._instructions.append(Instruction(tuple(token.text.split(".")), tuple(operands), guard, token.line, self._source))

    def _operand(self) -> Operand:
        module = self._module
        token = module.next()
        if token.text == "{":
            parts = []
            while module.peek().text != "}":
                parts.append(self._operand())
                if module.peek().text == ",":
                    module.next()
            module.next("}")
            return Vector(tuple(parts))
        if token.text == "[":
            return self._address()
        if token.kind in ("mark", "string"):
            raise module.error(f"{token.text} is no operand")
        return _number(token.text) if token.kind == "number" else self._name(token.text)

    def _address(self) -> Address:
        module = self._module
        first = self._operand()
        if isinstance(first, Vector | Address):
            raise module.error("an address begins with a register, a name or a number")
        base, offset = (None, first.bits) if isinstance(first, Immediate) else (first, 0)
        if module.peek().text == "+":
            module.next()
            offset += int(module.next().text, 0)
        module.next("]")
        return Address(base, offset)

    def _name(self, name: str) -> Register | Symbol:
        return self._register(name) if name.startswith("%") or self._declared(name) else Symbol(name)

    def _register(self, name: str) -> Register:
        if name in SPECIAL:
            return Register(name, SPECIAL[name])
        found = self._declared(name)
        if found is None:
            raise self._module.error(f"register {name} is not declared")
        return found

    def _declared(self, name: str) -> Register | None:
        family = name.rstrip("0123456789") + "<>"
        for scope, prefix in zip(reversed(self._scopes), reversed(self._prefixes), strict=True):
            type = scope.get(name) or scope.get(family)
            if type is not None:
                return Register(prefix + name, type)
        return None


def _number(text: str) -> Immediate:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    kind = digits[:2].lower()
    if kind == "0f":
        return Immediate(int(digits[2:], 16) ^ (1 << 31 if sign < 0 else 0), NumberKind.FLOAT32)
    if kind == "0d":
        return Immediate(int(digits[2:], 16) ^ (1 << 63 if sign < 0 else 0), NumberKind.FLOAT64)
    if "." in digits:
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], NumberKind.FLOAT64)
    return Immediate(sign * int(digits.rstrip("U"), 0), NumberKind.INTEGER)
