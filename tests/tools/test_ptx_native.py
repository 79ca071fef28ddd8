"""The executor in C++ against its reference in NumPy: 10,000 random numbers for each instruction that it knows."""

from __future__ import annotations

import numpy as np
import pytest

from tools.ptx import executor, native
from tools.ptx.encoding import FALLBACK, Encoded
from tools.ptx.executor import Launch, shared_layout
from tools.ptx.memory import DeviceMemory
from tools.ptx.program import SIZES, read_kernels

_BLOCKS, _THREADS = 40, 256
_WHOLE = ("u16", "s16", "u32", "s32", "u64", "s64")
_APPROXIMATE = ("rcp", "sqrt", "rsqrt", "ex2", "lg2")
_FORMS = [
    *(f"{name}.{kind}" for kind in _WHOLE for name in ("add", "sub", "mul.lo", "min", "max", "div", "rem")),
    *(f"{name}.{kind}" for kind in ("s16", "s32", "s64") for name in ("neg", "abs")),
    *(f"mul.wide.{kind}" for kind in _WHOLE[:4]),
    *(f"mad.{form}" for form in ("lo.s32", "lo.u64", "wide.s32", "wide.u32")),
    *(f"{name}.b{bits}" for bits in (16, 32, 64) for name in ("and", "or", "xor", "not", "shl", "selp", "mov")),
    *(f"shr.{kind}" for kind in _WHOLE),
    *("prmt.b32", "lop3.b32", "bfi.b32", "bfi.b64"),
    *(f"{name}.{kind}" for kind in ("bf16", "f16", "bf16x2", "f16x2", "f64") for name in ("add", "sub", "mul")),
    *(f"fma.rn.{kind}" for kind in ("bf16", "f16", "bf16x2", "f16x2")),
    *(f"bfe.{kind}" for kind in ("u32", "s32", "u64", "s64")),
    *(f"{name}.b{bits}" for name in ("popc", "clz", "brev") for bits in (32, 64)),
    *("cvt.f64.f32", "cvt.rn.f32.f64", "cvt.rn.ftz.f32.f64", "cvt.ftz.f64.f32"),
    *(f"mul.hi.{kind}" for kind in ("u32", "s32", "u64", "s64")),
    *(f"setp.{test}.{kind}" for kind in _WHOLE for test in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(f"setp.{test}.u32" for test in ("lo", "ls", "hi", "hs")),
    *(f"setp.{test}{end}.f32" for end in ("", "u", ".ftz") for test in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(f"setp.lt.{how}.s32" for how in ("and", "or", "xor")),
    *(f"{name}{ftz}.f32" for ftz in ("", ".ftz") for name in ("add.rn", "sub", "mul", "fma.rn", "min", "max", "neg", "abs", "max.NaN")),
    *(
        f"{name}{ftz}.f32"
        for ftz in ("", ".ftz")
        for name in ("div.full", "rcp.approx", "sqrt.approx", "rsqrt.approx", "ex2.approx", "lg2.approx")
    ),
    *(f"cvt.{to}.{source}" for to in _WHOLE for source in _WHOLE if to != source),
    *(f"cvt.rn.f32.{source}" for source in _WHOLE),
    *(f"cvt.{how}.{to}.f32" for how in ("rni", "rzi", "rmi", "rpi") for to in _WHOLE),
    *("cvt.f32.bf16", "cvt.f32.f16", "cvt.rn.bf16.f32", "cvt.rz.bf16.f32", "cvt.rn.f16.f32", "cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"),
    *("cvt.rn.bf16.s32", "cvt.rn.f16.u32", "cvt.rni.f32.f32", "cvt.rmi.ftz.f32.f32"),
]
_SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0**-130, 65504.0, 65520.0, 3.4e38, 2.0**31, 2.0**63, 0.5, 1.5], np.float32
)


def _operands(rng: np.random.Generator) -> np.ndarray:
    """[3, threads], uint64: bits of any kind, floats near one, small whole numbers, and what is special among floats."""
    shape = 3, _BLOCKS * _THREADS
    near_one = (rng.standard_normal(shape) * 8).astype(np.float32).view(np.uint32).astype(np.uint64)
    small = rng.integers(-70, 70, shape).astype(np.uint64)
    special = rng.choice(_SPECIAL, shape).view(np.uint32).astype(np.uint64)
    return np.choose(rng.integers(0, 4, shape), [rng.integers(0, 2**64, shape, np.uint64), near_one, small, special])


def _kernel(form: str) -> str:
    name, *parts = form.split(".")
    kind = parts[-1]
    result = {"setp": "pred"}.get(name, parts[-2] if name == "cvt" else kind)
    if "wide" in parts:
        result = {"16": "b32", "32": "b64"}[kind[1:]]
    if name in ("popc", "clz"):
        result = "b32"
    pair = name == "cvt" and result.endswith("x2")
    count = (
        2 if pair else 1 if name in ("cvt", "neg", "abs", "not", "mov", "popc", "clz", "brev", "rcp", "sqrt", "rsqrt", "ex2", "lg2") else 2
    )
    count = 3 if name in ("mad", "fma", "prmt") or any(part in ("and", "or", "xor") for part in parts[:-1]) else count
    kinds = [kind] * count
    if name in ("shl", "shr", "bfe"):
        kinds[1] = "u32"
    if "wide" in parts and name == "mad":
        kinds[2] = result
    last = {"selp": ", %p1", "lop3": ", %third, 0x6a", "bfi": ", %third, 13", "bfe": ", 9"}.get(name, "")
    if name == "setp" and count == 3:
        kinds, last, count = kinds[:2], ", %p1", 2
    given = "".join(
        f"cvt.u{8 * SIZES[of]}.u64 %x{at}, %w{at};\n" if SIZES[of] < 8 else f"mov.b64 %x{at}, %w{at};\n" for at, of in enumerate(kinds)
    )
    declared = "".join(f".reg .b{8 * SIZES[of]} %x{at};" for at, of in enumerate(kinds))
    to, bits = ("%p0", 32) if result == "pred" else ("%y", 8 * SIZES[result])
    wide = "selp.b64 %out, 1, 0, %p0;" if result == "pred" else "mov.b64 %out, %y;" if bits == 64 else f"cvt.u64.u{bits} %out, %y;"
    return f"""
.visible .entry tried(.param .u64 in, .param .u64 out) .reqntid {_THREADS} {{
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b32 %third; .reg .b64 %rd<9>; .reg .b64 %w<3>; .reg .b64 %out; .reg .b{bits} %y; {declared}
    ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, {_THREADS}, %r1; mul.wide.u32 %rd3, %r3, 8; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    ld.global.b64 %w0, [%rd4]; ld.global.b64 %w1, [%rd4+{8 * _BLOCKS * _THREADS}]; ld.global.b64 %w2, [%rd4+{16 * _BLOCKS * _THREADS}];
    cvt.u32.u64 %third, %w2; setp.lt.s32 %p1, %third, 0;
    {given}
    {form} {to}, {", ".join(f"%x{at}" for at in range(count))}{last};
    {wide}
    st.global.b64 [%rd5], %out;
    ret;
}}"""


@pytest.mark.parametrize("form", _FORMS)
def test_an_instruction(form: str) -> None:
    (code,) = read_kernels(_kernel(form)).values()
    numbers = _operands(np.random.default_rng(sum(map(ord, form))))
    encoded, found = Encoded(code, shared_layout(code, 0)[0]), []
    matching = [op["code"] for op, one in zip(encoded.ops, code.instructions, strict=True) if ".".join(one.opcode) == form]
    assert FALLBACK not in matching
    assert matching
    for execute in (executor.execute, native.execute):
        memory = DeviceMemory(1 << 24)
        at, out = memory.allocate(numbers.nbytes), memory.allocate(numbers.nbytes // 3)
        memory.write(at, numbers.reshape(-1).view(np.uint8))
        execute(code, memory, Launch((_BLOCKS, 1, 1), (_THREADS, 1, 1), (at.to_bytes(8, "little"), out.to_bytes(8, "little")), 0))
        found.append(memory.read(out, numbers.nbytes // 3).view(np.uint64))
    wrong = np.flatnonzero(found[0] != found[1])
    examples = [[f"{int(one):#x}" for one in (*numbers[:, at], found[0][at], found[1][at])] for at in wrong[:3]]
    assert not len(wrong), (len(wrong), examples)
