"""What instructions of PTX compute of registers, against whole numbers and fractions of Python, libm and torch: 10,000 random operands."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tools.ptx.arithmetic import evaluate
from tools.ptx.numbers import NAN, rounded, values
from tools.ptx.program import PtxError

NUMBER = 10_000
MASK = 2**64 - 1


def operands(count: int, seed: int = 0) -> list[np.ndarray]:
    """Of all sizes, with the ends of ranges and small numbers among them."""
    random = np.random.default_rng(seed)
    edges = np.array([0, 1, 2, 7, 31, 32, 33, 63, 64, 2**15, 2**31, 2**32 - 1, 2**63, MASK, MASK - 1], np.uint64)
    found = []
    for _ in range(count):
        some = random.integers(0, MASK, NUMBER, np.uint64, endpoint=True) >> random.integers(0, 64, NUMBER).astype(np.uint64)
        found.append(np.where(random.random(NUMBER) < 0.2, random.choice(edges, NUMBER), some))
    return found


def floats(kind: type[np.floating], unsigned: type[np.unsignedinteger], count: int) -> list[np.ndarray]:
    """All bit patterns, with ordinary numbers, infinities, zeros and NaN among them, as uint64."""
    random = np.random.default_rng(1)
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, 3.0, 448.0, 464.0, 65504.0, 1e-40], np.float64)
    bits = []
    for _ in range(count):
        wild = random.integers(0, np.iinfo(unsigned).max, NUMBER, unsigned, endpoint=True)
        with np.errstate(over="ignore"):
            usual, some = (random.normal(size=NUMBER) * 4).astype(kind), random.choice(special, NUMBER).astype(kind)
        which = random.random(NUMBER)
        bits.append(np.where(which < 0.4, usual.view(unsigned), np.where(which < 0.6, some.view(unsigned), wild)).astype(np.uint64))
    return bits


def signed(x: int, bits: int) -> int:
    return (x & (2**bits - 1)) - (2**bits if x >> (bits - 1) & 1 else 0)


def whole(kind: str) -> Callable[[int], int]:
    bits = int(kind[1:])
    return (lambda x: signed(x, bits)) if kind[0] == "s" else (lambda x: x & (2**bits - 1))


def towards_zero(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


WHOLE: dict[str, Callable[..., int]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul.lo": lambda x, y: x * y,
    "mad.lo": lambda x, y, z: x * y + z,
    "min": min,
    "max": max,
    "div": towards_zero,
    "rem": lambda x, y: x - y * towards_zero(x, y),
}


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", [*WHOLE, "mul.hi", "neg", "abs"])
def test_whole_numbers(name: str, kind: str) -> None:
    if name in ("neg", "abs") and kind[0] == "u":
        return
    bits, read = int(kind[1:]), whole(kind)
    function = {**WHOLE, "mul.hi": lambda x, y: x * y >> bits, "neg": lambda x: -x, "abs": abs}[name]
    given = operands({"mad.lo": 3, "neg": 1, "abs": 1}.get(name, 2))
    if name in ("div", "rem"):
        given[1] = np.where(given[1] & np.uint64(2**bits - 1) == 0, np.uint64(3), given[1])
    expected = [read(function(*(read(int(x)) for x in row))) & MASK for row in zip(*given, strict=True)]
    assert evaluate((*name.split("."), kind), given).tolist() == expected


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind: str) -> None:
    given, read, wide = operands(3), whole(kind), whole(kind[0] + str(2 * int(kind[1:])))
    pairs = list(zip(*(one.tolist() for one in given), strict=True))
    assert evaluate(("mul", "wide", kind), given[:2]).tolist() == [wide(read(x) * read(y)) & MASK for x, y, _ in pairs]
    assert evaluate(("mad", "wide", kind), given).tolist() == [wide(read(x) * read(y) + z) & MASK for x, y, z in pairs]


@pytest.mark.parametrize("kind", ["b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64"])
def test_shifts(kind: str) -> None:
    (x, amount), read = operands(2), whole(kind.replace("b", "u"))
    amount = np.where(np.arange(NUMBER) % 2, amount & np.uint64(127), amount)
    pairs = [(read(int(one)), int(by) & (2**32 - 1)) for one, by in zip(x, amount, strict=True)]
    assert evaluate(("shr", kind), [x, amount]).tolist() == [read(one >> min(by, 99)) & MASK for one, by in pairs]
    if kind[0] == "b":
        assert evaluate(("shl", kind), [x, amount]).tolist() == [read(one << by) & MASK if by < 64 else 0 for one, by in pairs]


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bits(kind: str) -> None:
    bits, (x, y, z) = int(kind[1:]), operands(3)
    rows = [tuple(int(one) & (2**bits - 1) for one in row) for row in zip(x, y, z, strict=True)]
    assert evaluate(("and", kind), [x, y]).tolist() == [one & other for one, other, _ in rows]
    assert evaluate(("or", kind), [x, y]).tolist() == [one | other for one, other, _ in rows]
    assert evaluate(("xor", kind), [x, y]).tolist() == [one ^ other for one, other, _ in rows]
    assert evaluate(("not", kind), [x]).tolist() == [one ^ (2**bits - 1) for one, _, _ in rows]
    assert evaluate(("popc", kind), [x]).tolist() == [one.bit_count() for one, _, _ in rows]
    assert evaluate(("clz", kind), [x]).tolist() == [bits - one.bit_length() for one, _, _ in rows]
    assert evaluate(("brev", kind), [x]).tolist() == [int(f"{one:0{bits}b}"[::-1], 2) for one, _, _ in rows]
    assert evaluate(("selp", kind), [x, y, z]).tolist() == [one if flag & 1 else other for one, other, flag in rows]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_fields(kind: str) -> None:
    """bfe and bfi, by the definitions of the ISA, bit by bit."""
    bits, (x, y, at, length) = int(kind[1:]), operands(4)
    at, length = (np.where(np.arange(NUMBER) % 8, one % np.uint64(70), one & np.uint64(255)) for one in (at, length))

    def extract(x: int, at: int, length: int) -> int:
        sign = 0 if kind[0] == "u" or length == 0 else x >> min(at + length - 1, bits - 1) & 1
        return sum((x >> at + i & 1 if i < length and at + i < bits else sign) << i for i in range(bits))

    def insert(x: int, y: int, at: int, length: int) -> int:
        for i in range(length):
            if at + i < bits:
                y = y & ~(1 << at + i) | (x >> i & 1) << at + i
        return y

    rows = list(zip(*((one & np.uint64(2**bits - 1)).tolist() for one in (x, y)), at.tolist(), length.tolist(), strict=True))
    read = whole(kind)
    assert evaluate(("bfe", kind), [x, at, length]).tolist() == [read(extract(one, a, n)) & MASK for one, _, a, n in rows]
    inserted = evaluate(("bfi", f"b{bits}"), [x, y, at, length]).tolist()
    assert inserted == [insert(one, other, a, n) & (2**bits - 1) for one, other, a, n in rows]


def test_bytes_and_tables() -> None:
    x, y, z = operands(3)
    table = operands(1, seed=5)[0] & np.uint64(255)

    def permute(x: int, y: int, selectors: int) -> int:
        chosen = (x & 0xFFFFFFFF | (y & 0xFFFFFFFF) << 32).to_bytes(8, "little")
        codes = [selectors >> 4 * i & 15 for i in range(4)]
        return int.from_bytes([(255 * (chosen[c & 7] >> 7)) if c & 8 else chosen[c] for c in codes], "little")

    def logic(x: int, y: int, z: int, table: int) -> int:
        return sum((table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | z >> i & 1) & 1) << i for i in range(32))

    rows = list(zip(x.tolist(), y.tolist(), z.tolist(), table.tolist(), strict=True))
    assert evaluate(("prmt", "b32"), [x, y, z]).tolist() == [permute(a, b, c) for a, b, c, _ in rows]
    assert evaluate(("lop3", "b32"), [x, y, z, table]).tolist() == [logic(*row) for row in rows]


TESTS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


@pytest.mark.parametrize("test", TESTS)
def test_comparisons(test: str) -> None:
    """Of NaN only the unordered tests are true, `ne` neither."""
    function = TESTS[test]
    bits = floats(np.float32, np.uint32, 2)
    pairs = [tuple(values(np.array([b], np.uint64), "f32")[0] for b in row) for row in zip(*bits, strict=True)]
    unordered = [math.isnan(x) or math.isnan(y) for x, y in pairs]
    found = evaluate(("setp", test, "f32"), bits).tolist()
    assert found == [int(function(x, y) and not nan) for (x, y), nan in zip(pairs, unordered, strict=True)]
    found = evaluate(("setp", test + "u", "f32"), bits).tolist()
    assert found == [int(function(x, y) or nan) for (x, y), nan in zip(pairs, unordered, strict=True)]
    assert evaluate(("setp", "nan", "f32"), bits).tolist() == unordered
    assert evaluate(("setp", "num", "f32"), bits).tolist() == [not nan for nan in unordered]
    given = operands(3)
    for kind in ("s32", "u16", "s64"):
        read = whole(kind)
        expected = [int(function(read(x), read(y)) and flag & 1) for x, y, flag in zip(*(one.tolist() for one in given), strict=True)]
        assert evaluate(("setp", test, "and", kind), given).tolist() == expected


def same(found: np.ndarray, expected: np.ndarray, kind: str) -> None:
    """Bit for bit, but for NaN, which is the canonical one."""
    nan = np.isnan(values(expected, kind))
    assert (found == np.where(nan, np.uint64(NAN[kind]), expected)).all()


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """libm's, which rounds once."""
    fma = ctypes.CDLL("libm.so.6").fmaf
    fma.restype, fma.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    return np.array([fma(*row) for row in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)], np.float32)


def test_float32() -> None:
    """Sums and products against NumPy's; fused ones against libm's, which round once."""
    bits = floats(np.float32, np.uint32, 3)
    bits[2][:3000] = (np.random.default_rng(3).integers(0, 2**23, 3000) << 1).astype(np.uint64) ^ bits[2][:3000]
    x, y, z = (one.astype(np.uint32).view(np.float32) for one in bits)
    with np.errstate(all="ignore"):
        for name, expected in (("add", x + y), ("sub", x - y), ("mul", x * y), ("div", x / y)):
            same(evaluate((name, "rn", "f32"), bits[:2]), expected.view(np.uint32).astype(np.uint64), "f32")
        same(evaluate(("sqrt", "rn", "f32"), bits[:1]), np.sqrt(x).view(np.uint32).astype(np.uint64), "f32")
    expected = fused(x, y, z)
    same(evaluate(("fma", "rn", "f32"), bits), expected.view(np.uint32).astype(np.uint64), "f32")


def test_halfway_sums() -> None:
    """In float64 alone these would be rounded twice: the product lies halfway between two float32, but for what z adds."""
    random = np.random.default_rng(4)
    x = (1 + random.integers(0, 2**11, NUMBER) * 2.0**-11 + 2.0**-12).astype(np.float32)
    y = (1 + random.integers(0, 2**11, NUMBER) * 2.0**-11 + 2.0**-12).astype(np.float32)
    z = (random.choice([-1, 1], NUMBER) * 2.0**-60).astype(np.float32)
    found = evaluate(("fma", "rn", "f32"), [one.view(np.uint32).astype(np.uint64) for one in (x, y, z)])
    expected = fused(x, y, z)
    assert (found == expected.view(np.uint32)).all()
    twice = (x.astype(np.float64) * y + z).astype(np.float32)
    assert (twice != expected).any()


@pytest.mark.parametrize("flush", [False, True])
def test_subnormal_numbers(flush: bool) -> None:
    small = np.float32(1e-40).view(np.uint32).astype(np.uint64).reshape(1)
    one, modifiers = np.float32(1).view(np.uint32).astype(np.uint64).reshape(1), ("ftz",) if flush else ()
    assert evaluate(("mul", *modifiers, "f32"), [small, one]).tolist() == [0 if flush else int(small[0])]
    half = evaluate(("mul", *modifiers, "f32"), [np.array([0x00800000], np.uint64), np.array([0x3F000000], np.uint64)])
    assert half.tolist() == [0 if flush else 0x00400000]


def test_least_and_largest() -> None:
    bits = floats(np.float32, np.uint32, 2)
    x, y = (values(one, "f32") for one in bits)
    for name, function in (("min", np.fmin), ("max", np.fmax)):
        found = values(evaluate((name, "f32"), bits), "f32")
        assert np.array_equal(found, function(x, y), equal_nan=True)
        spread = evaluate((name, "NaN", "f32"), bits)
        assert ((spread == NAN["f32"]) == (np.isnan(x) | np.isnan(y))).all()
    zeros = np.array([0, 0, 1 << 31, 1 << 31], np.uint64), np.array([0, 1 << 31, 0, 1 << 31], np.uint64)
    assert evaluate(("max", "f32"), zeros).tolist() == [0, 0, 0, 1 << 31]
    assert evaluate(("min", "f32"), zeros).tolist() == [0, 1 << 31, 1 << 31, 1 << 31]


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_half_precision(kind: str, dtype: torch.dtype) -> None:
    """Against torch, which computes in float32 and rounds; two in a register are computed like one."""
    random = np.random.default_rng(2)
    bits = [random.integers(0, 2**16, NUMBER).astype(np.uint64) for _ in range(2)]
    x, y = (torch.from_numpy(one.astype(np.uint16).view(np.int16)).view(dtype) for one in bits)
    for name, expected in (("add", x + y), ("sub", x - y), ("mul", x * y)):
        raw = expected.view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
        found = evaluate((name, "rn", kind), bits)
        same(found, raw, kind)
        pairs = evaluate((name, "rn", kind + "x2"), [one | (one[::-1] << np.uint64(16)) for one in bits])
        assert (pairs == found | (found[::-1] << np.uint64(16))).all()


def test_conversions_between_floats() -> None:
    bits = floats(np.float32, np.uint32, 1)[0]
    x = torch.from_numpy(bits.astype(np.uint32).view(np.int32)).view(torch.float32)
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        raw = x.to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
        same(evaluate(("cvt", "rn", kind, "f32"), [bits]), raw, kind)
        pair = evaluate(("cvt", "rn", kind + "x2", "f32"), [bits, bits[::-1]])
        assert (pair >> np.uint64(16) == evaluate(("cvt", "rn", kind, "f32"), [bits])).all()  # the first is the upper one
        back = evaluate(("cvt", "f32", kind), [raw])
        same(back, x.to(dtype).float().view(torch.int32).numpy().view(np.uint32).astype(np.uint64), "f32")
        cut = values(evaluate(("cvt", "rz", kind, "f32"), [bits]), kind)
        exact = values(bits, "f32")
        finite = np.isfinite(values(raw, kind))
        assert (np.abs(cut[finite]) <= np.abs(exact[finite])).all()
        near = values(raw, kind)
        assert (np.abs(near[finite] - exact[finite]) <= np.abs(cut[finite] - exact[finite])).all()


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_float8(kind: str, dtype: torch.dtype) -> None:
    """Saturated, where torch gives NaN or infinity; all 256 codes back."""
    bits = floats(np.float32, np.uint32, 1)[0]
    x = torch.from_numpy(bits.astype(np.uint32).view(np.int32)).view(torch.float32)
    largest = torch.finfo(dtype).max
    expected = x.clamp(-largest, largest).to(dtype).view(torch.uint8).numpy().astype(np.uint64)
    expected = np.where(torch.isnan(x).numpy(), np.uint64(0x7F), expected)
    found = evaluate(("cvt", "rn", "satfinite", kind + "x2", "f32"), [bits[::-1], bits])
    assert (found & np.uint64(255) == expected).all()
    assert (found >> np.uint64(8) == expected[::-1]).all()
    codes = np.arange(256, dtype=np.uint64)
    halves = evaluate(("cvt", "rn", "f16x2", kind + "x2"), [codes | (codes[::-1] << np.uint64(8))])
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).half().view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
    same(halves & np.uint64(0xFFFF), exact, "f16")
    same(halves >> np.uint64(16), exact[::-1], "f16")


def test_tf32_rounds_ties_away() -> None:
    bits = np.array([0x3F800FFF, 0x3F801000, 0x3F801001, 0xBF801000, 0x7F800000], np.uint64)
    assert [hex(one) for one in evaluate(("cvt", "rna", "tf32", "f32"), [bits])] == [
        "0x3f800000",
        "0x3f802000",
        "0x3f802000",
        "0xbf802000",
        "0x7f800000",
    ]


@pytest.mark.parametrize("kind", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_conversions_of_whole_numbers(kind: str) -> None:
    """To floats in one rounding, from floats to the last number of the range; between widths by cutting, with the sign."""
    x, read = operands(1)[0], whole(kind)
    exact = [read(int(one)) for one in x]
    found = evaluate(("cvt", "rn", "f32", kind), [x]).astype(np.uint32).view(np.float32)
    assert found.tolist() == [
        float(np.int64(one).astype(np.float32) if one < 2**63 else np.uint64(one).astype(np.float32)) for one in exact
    ]
    for other in ("s8", "u16", "s32", "u64"):
        assert evaluate(("cvt", other, kind), [x]).tolist() == [whole(other)(one) & MASK for one in exact]
    bits = floats(np.float32, np.uint32, 1)[0]
    most, least = read(2 ** (int(kind[1:]) - (kind[0] == "s")) - 1), 0 if kind[0] == "u" else -(2 ** (int(kind[1:]) - 1))

    def cut(x: float, rounding: Callable[[float], int]) -> int:
        return 0 if math.isnan(x) else most if x == math.inf else least if x == -math.inf else max(least, min(most, rounding(x)))

    numbers = values(bits, "f32").tolist()
    for name, rounding in (("rzi", math.trunc), ("rni", round), ("rmi", math.floor), ("rpi", math.ceil)):
        assert evaluate(("cvt", name, kind, "f32"), [bits]).tolist() == [cut(one, rounding) & MASK for one in numbers]


def test_approximations_are_the_nearest_numbers() -> None:
    bits = floats(np.float32, np.uint32, 1)[0]
    for name, function in (("ex2", torch.exp2), ("lg2", torch.log2), ("rsqrt", torch.rsqrt), ("tanh", torch.tanh)):
        expected = rounded(function(torch.from_numpy(values(bits, "f32"))).numpy(), "f32")
        assert np.abs(evaluate((name, "approx", "f32"), [bits]).astype(np.int64) - expected.astype(np.int64)).max() <= 1


def test_what_is_unknown_is_refused() -> None:
    for opcode in (("add", "b128x"), ("frobnicate", "s32"), ("ld", "global", "b32"), ("fma", "rn", "f64")):
        with pytest.raises(PtxError, match="no instruction of registers"):
            evaluate(opcode, operands(3))
