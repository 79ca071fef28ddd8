"""What each instruction computes of registers alone: bits to bits, for many threads at once. The reference of the executors, in NumPy.

Owns arithmetic, comparisons, conversions and shuffling of bits, as NVIDIA's PTX ISA (9.7.1 to 9.7.9) defines them. Knows nothing of
memory, warps or matrices. Results that hardware only approximates (ex2, lg2, rsqrt, tanh, div.approx) are the nearest numbers; on hardware
they may be 1 to 2 units in the last place away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tools.ptx.numbers import FLOATS, WIDTHS, Bits, Floats, flushed, fused, rounded, values
from tools.ptx.program import SIZES, PtxError

_U = np.uint64
_SHIFTS = {"shl", "shr"}


def evaluate(opcode: Sequence[str], operands: Sequence[Bits]) -> Bits:
    """The result of an instruction. `operands` are uint64, [threads] each, of which as many low bits count as the type has; predicates are
    0 or 1. The result of a signed type has its sign in all 64 bits. Raises PtxError for an instruction that is not known."""
    name, parts = opcode[0], tuple(opcode[1:])
    if name == "cvt":
        return _convert(parts, operands)
    kind = parts[-1]
    if kind in ("bf16x2", "f16x2"):
        halves = [evaluate((name, *parts[:-1], kind[:-2]), [_U(0xFFFF) & (one >> _U(at)) for one in operands]) for at in (0, 16)]
        return halves[0] | (halves[1] << _U(16))
    if name == "setp":
        return _compare(parts, operands)
    if name == "selp":
        return _cut(np.where(operands[2] & _U(1) != 0, operands[0], operands[1]), kind)
    if name in _BITWISE:
        return _cut(_BITWISE[name](*operands), kind)
    if name in ("prmt", "lop3", "bfe", "bfi"):
        return {"prmt": _permute, "lop3": _logic, "bfe": _extract, "bfi": _insert}[name](parts, operands)
    if kind in FLOATS:
        return _float(name, parts, operands)
    if kind not in SIZES:
        raise PtxError(f"{'.'.join(opcode)} is no instruction of registers")
    return _integer(name, parts, operands)


_BITWISE: dict[str, Callable[..., Bits]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": lambda x: x ^ _U(2**64 - 1),
    "mov": lambda x: x,
}


def _bits(kind: str) -> int:
    return 1 if kind == "pred" else 8 * SIZES[kind]


def _cut(x: Bits, kind: str) -> Bits:
    """The low bits alone, with the sign in all others if the type has one."""
    bits = _bits(kind)
    if kind[0] == "s" and bits < 64:
        return ((x << _U(64 - bits)).view(np.int64) >> np.int64(64 - bits)).view(_U)
    return x & _U(2**bits - 1)


def _integer(name: str, parts: tuple[str, ...], operands: Sequence[Bits]) -> Bits:
    kind, signed = parts[-1], parts[-1][0] == "s"
    bits = _bits(kind)
    if name in _SHIFTS:
        return _shift(name, kind, operands[0], operands[1] & _U(0xFFFFFFFF))
    if name in ("popc", "clz", "brev"):
        return _count(name, _cut(operands[0], kind), bits)
    x = [_cut(one, kind) for one in operands]
    if name in ("mul", "mad"):
        if "wide" in parts:
            product = x[0] * x[1]  # of 32 bits with their signs: exact modulo 2**64
            return _cut(product + (operands[2] if name == "mad" else _U(0)), kind[0] + str(2 * bits))
        product = _high(x[0], x[1], kind) if "hi" in parts else x[0] * x[1]
        return _cut(product + (x[2] if name == "mad" else _U(0)), kind)
    ordered = [one.view(np.int64) for one in x] if signed else x
    if name in ("div", "rem"):
        return _cut(_divide(name, ordered), kind)
    simple: dict[str, Callable[[], Bits]] = {
        "add": lambda: x[0] + x[1],
        "sub": lambda: x[0] - x[1],
        "neg": lambda: _U(0) - x[0],
        "abs": lambda: np.abs(x[0].view(np.int64)).view(_U),
        "min": lambda: np.minimum(ordered[0], ordered[1]).view(_U),
        "max": lambda: np.maximum(ordered[0], ordered[1]).view(_U),
    }
    if name not in simple:
        raise PtxError(f"{name}.{'.'.join(parts)} is no instruction of registers")
    with np.errstate(over="ignore"):
        return _cut(simple[name](), kind)


def _shift(name: str, kind: str, x: Bits, amount: Bits) -> Bits:
    """By as much as there are bits and more, nothing is left but the sign."""
    bits = _bits(kind)
    if name == "shl":
        return np.where(amount >= bits, _U(0), _cut(x << np.minimum(amount, _U(63)), kind))
    if kind[0] == "s":
        return _shifted(_cut(x, kind), np.minimum(amount, _U(bits - 1)), kind)
    return np.where(amount >= bits, _U(0), _cut(x, kind) >> np.minimum(amount, _U(63)))


def _high(x: Bits, y: Bits, kind: str) -> Bits:
    bits = _bits(kind)
    if bits < 64:
        product = x * y
        return _shifted(product, np.full_like(product, bits), kind)
    low = _U(2**32 - 1)
    middle = ((x & low) * (y & low) >> _U(32)) + (x >> _U(32)) * (y & low)
    other = (middle & low) + (x & low) * (y >> _U(32))
    high: Bits = (x >> _U(32)) * (y >> _U(32)) + (middle >> _U(32)) + (other >> _U(32))
    if kind[0] == "s":  # of negative numbers as if they were large ones
        high = high - np.where(x >> _U(63) != 0, y, _U(0)) - np.where(y >> _U(63) != 0, x, _U(0))
    return high


def _divide(name: str, x: Sequence[np.typing.NDArray[np.int64] | Bits]) -> Bits:
    """Towards zero. By zero hardware gives what it likes: here all bits set, and the dividend as the rest."""
    none = x[1] == 0
    with np.errstate(all="ignore"):
        divisor = np.where(none, x[1].dtype.type(1), x[1])
        rest = np.fmod(x[0], divisor)
        quotient = (x[0] - rest) // divisor
    return np.where(none, _U(2**64 - 1), quotient.view(_U)) if name == "div" else np.where(none, x[0].view(_U), rest.view(_U))


def _count(name: str, x: Bits, bits: int) -> Bits:
    each = (x[:, None] >> np.arange(bits, dtype=_U)) & _U(1)  # [threads, bits], the lowest first
    if name in ("popc", "brev"):
        sums: Bits = (each if name == "popc" else each[:, ::-1] << np.arange(bits, dtype=_U)).sum(1, dtype=_U)
        return sums
    return np.where(each.any(1), each[:, ::-1].argmax(1), bits).astype(_U)


def _permute(parts: tuple[str, ...], operands: Sequence[Bits]) -> Bits:
    if parts != ("b32",):
        raise PtxError(f"prmt.{'.'.join(parts)} is no instruction of registers")
    word = _U(0xFFFFFFFF)
    both, out = (operands[0] & word) | ((operands[1] & word) << _U(32)), np.zeros_like(operands[0])
    for at in range(4):
        selector = (operands[2] >> _U(4 * at)) & _U(15)
        byte = (both >> ((selector & _U(7)) * _U(8))) & _U(255)
        byte = np.where(selector & _U(8) != 0, (byte >> _U(7)) * _U(255), byte)  # bit 3: the sign of the byte, repeated
        out = out | (byte << _U(8 * at))
    return out


def _logic(parts: tuple[str, ...], operands: Sequence[Bits]) -> Bits:
    """The table says what is given for each of the eight combinations of a bit of each operand."""
    out = np.zeros_like(operands[0])
    for combination in range(8):
        chosen = [one if combination >> (2 - at) & 1 else ~one for at, one in enumerate(operands[:3])]
        out = out | np.where((operands[3] >> _U(combination)) & _U(1) != 0, chosen[0] & chosen[1] & chosen[2], _U(0))
    return out & _U(0xFFFFFFFF)


def _extract(parts: tuple[str, ...], operands: Sequence[Bits]) -> Bits:
    kind = parts[-1]
    bits = _bits(kind)
    x, at, length = _cut(operands[0], kind), operands[1] & _U(255), operands[2] & _U(255)
    field = _U(2**64 - 1) >> (_U(64) - np.clip(length, _U(1), _U(64)))
    out = np.where(length == 0, _U(0), _shifted(x, at, kind) & field)
    if kind[0] == "u":
        return out
    last = np.minimum(at + length - _U(1), _U(bits - 1))  # the sign is that of the field's last bit, or of the number's
    sign = (length != 0) & ((x >> last) & _U(1) != 0)
    return _cut(np.where(sign, out | ~field, out), kind)


def _shifted(x: Bits, at: Bits, kind: str) -> Bits:
    if kind[0] == "s":
        return (x.view(np.int64) >> np.minimum(at, _U(63)).astype(np.int64)).view(_U)
    return np.where(at > _U(63), _U(0), x >> np.minimum(at, _U(63)))


def _insert(parts: tuple[str, ...], operands: Sequence[Bits]) -> Bits:
    kind = parts[-1]
    bits = _bits(kind)
    at, length = operands[2] & _U(255), np.minimum(operands[3] & _U(255), _U(bits))
    ones = np.where(length == 0, _U(0), _U(2**64 - 1) >> (_U(64) - np.maximum(length, _U(1))))
    field = np.where(at >= bits, _U(0), ones << np.minimum(at, _U(63)))
    return _cut((operands[1] & ~field) | ((operands[0] << np.minimum(at, _U(63))) & field), kind)


_FLOAT_TESTS: dict[str, Callable[[Floats, Floats], np.typing.NDArray[np.bool_]]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED_TESTS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _compare(parts: tuple[str, ...], operands: Sequence[Bits]) -> Bits:
    """A test of floats is false if either is NaN, unless it ends in u. `.and`, `.or`, `.xor`: with the third operand."""
    test, kind = parts[0], parts[-1]
    if kind in FLOATS:
        x, y = (values(one, kind) for one in operands[:2])
        if "ftz" in parts:
            x, y = flushed(x), flushed(y)
        unordered = np.isnan(x) | np.isnan(y)
        if test in ("num", "nan"):
            found = unordered ^ (test == "num")
        elif test in _FLOAT_TESTS:
            found = _FLOAT_TESTS[test](x, y) & ~unordered
        else:
            found = _FLOAT_TESTS[test.removesuffix("u")](x, y) | unordered
    else:
        cut = [_cut(one, kind) for one in operands[:2]]
        left, right = (one.view(np.int64) for one in cut) if kind[0] == "s" else cut
        found = _FLOAT_TESTS[_UNSIGNED_TESTS.get(test, test)](left, right)  # type: ignore[arg-type]
    combined = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    for part in parts[1:-1]:
        if part in combined:
            found = combined[part](found, operands[2] & _U(1) != 0)
    return found.astype(_U)


def _float(name: str, parts: tuple[str, ...], operands: Sequence[Bits]) -> Bits:
    kind = parts[-1]
    if name in ("neg", "abs") and "ftz" not in parts:  # of the bits, NaN's too
        sign = _U(1 << (WIDTHS[kind] - 1))
        return _cut(operands[0], "b" + str(WIDTHS[kind])) ^ sign if name == "neg" else operands[0] & (sign - _U(1))
    flush = flushed if "ftz" in parts else lambda x: x
    x = [flush(values(one, kind)) for one in operands]
    if name in ("add", "sub", "mul", "fma"):
        return rounded(flush(values(rounded(_sum(name, kind, x), kind), kind)), kind)
    if name in ("min", "max"):
        return rounded(_extreme(name, "NaN" in parts, x[0], x[1]), kind)
    if name not in _FUNCTIONS:
        raise PtxError(f"{name}.{'.'.join(parts)} is no instruction of registers")
    with np.errstate(all="ignore"):
        return rounded(flush(values(rounded(_FUNCTIONS[name](*x), kind), kind)), kind)


def _sum(name: str, kind: str, x: Sequence[Floats]) -> Floats:
    with np.errstate(all="ignore"):
        if kind == "f64":
            if name == "fma":
                raise PtxError("fma.f64 is no instruction of registers")
            return {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name](x[0], x[1])
        if name == "mul":
            return x[0] * x[1]
        if name == "fma":
            return fused(x[0], x[1], x[2])
        return fused(x[0], np.ones_like(x[0]), x[1] if name == "add" else -x[1])


def _extreme(name: str, spread: bool, x: Floats, y: Floats) -> Floats:
    """Of a number and NaN the number, unless NaN spreads. -0 is below +0."""
    best = (np.fmin if name == "min" else np.fmax)(x, y)
    negative = np.signbit(x) | np.signbit(y) if name == "min" else np.signbit(x) & np.signbit(y)
    best = np.where((x == 0) & (y == 0), np.where(negative, -0.0, 0.0), best)
    return np.where(np.isnan(x) | np.isnan(y), np.nan, best) if spread else best


_FUNCTIONS: dict[str, Callable[..., Floats]] = {
    "neg": np.negative,
    "abs": np.abs,
    "div": np.divide,
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}
_TO_INTEGERS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _convert(parts: tuple[str, ...], operands: Sequence[Bits]) -> Bits:
    """Of pairs the first operand is the upper half."""
    to, source = parts[-2], parts[-1]
    if len(operands) == 2:
        upper, lower = (_convert((*parts[:-2], to.removesuffix("x2"), source), [one]) for one in operands)
        return lower | (upper << _U(WIDTHS[to.removesuffix("x2")]))
    if source.endswith("x2"):
        width, target = WIDTHS[source[:-2]], to[:-2]
        halves = [_convert((*parts[:-2], target, source[:-2]), [operands[0] >> _U(at) & _U(2**width - 1)]) for at in (0, width)]
        return halves[0] | (halves[1] << _U(WIDTHS[target]))
    whole = next((part for part in parts if part in _TO_INTEGERS), None)
    if source not in FLOATS:
        x = _cut(operands[0], source)
        if to not in FLOATS:
            return _cut(_saturated(x, source, to) if "sat" in parts else x, to)
        return _from_integer(x, source, to)
    value = values(operands[0], source)
    if "ftz" in parts:
        value = flushed(value)
    if to not in FLOATS:
        return _to_integer(_TO_INTEGERS[whole or "rzi"](value), to)
    with np.errstate(all="ignore"):
        value = value if whole is None else _TO_INTEGERS[whole](value)
    if "relu" in parts:
        value = np.where(value > 0, value, np.where(np.isnan(value), value, 0.0))
    if "sat" in parts:
        value = np.where(np.isnan(value), 0.0, np.clip(value, 0.0, 1.0))
    bits = rounded(value, to, towards_zero="rz" in parts)
    return rounded(flushed(values(bits, to)), to) if "ftz" in parts and to == "f32" else bits


def _saturated(x: Bits, source: str, to: str) -> Bits:
    signed, bits = to[0] == "s", _bits(to)
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if source[0] == "s":
        least, most = max(least, -(2**63)), min(most, 2**63 - 1)
        return np.clip(x.view(np.int64), least, most).view(_U)
    return np.minimum(x, _U(most))


def _from_integer(x: Bits, source: str, to: str) -> Bits:
    """To the nearest float, in one rounding."""
    number = x.view(np.int64) if source[0] == "s" else x
    if to == "f64":
        return number.astype(np.float64).view(_U)
    if to == "f32":
        return number.astype(np.float32).view(np.uint32).astype(_U)
    if _bits(source) > 32:
        raise PtxError(f"cvt.{to}.{source} is no instruction of registers")
    return rounded(number.astype(np.float64), to)  # 32 bits are exact in float64


def _to_integer(x: Floats, to: str) -> Bits:
    """Beyond the range the last number in it; of NaN 0."""
    signed, bits = to[0] == "s", _bits(to)
    least, most = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if signed else (0.0, 2.0**bits)
    inside = (x >= least) & (x < most)
    safe = np.where(inside, x, 0.0)
    exact = safe.astype(np.int64).view(_U) if signed else safe.astype(_U)
    limit = np.where(x >= most, _U(int(most) - 1), _U(int(least) & (2**64 - 1)))
    return _cut(np.where(np.isnan(x), _U(0), np.where(inside, exact, limit)), to)
