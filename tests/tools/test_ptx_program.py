"""Reading PTX: what becomes of each kind of statement, and what is refused with its line."""

from __future__ import annotations

import pytest

from tools.ptx.program import (
    Address,
    Guard,
    Immediate,
    Instruction,
    Kernel,
    NumberKind,
    PtxError,
    Register,
    Source,
    Symbol,
    Vector,
    read_kernels,
)

_HEAD = """
.version 8.4
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.global .align 1 .b8 _$_str[11] = {95, 95, 67, 85};
"""
_TEXT = (
    _HEAD
    + """
.visible .entry first(
	.param .u64 .ptr .global .align 1 first_param_0,
	.param .align 8 .b8 first_param_1[24],
	.param .f32 first_param_2
)
.reqntid 64, 2
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<3>;
	.shared .align 4 .b8 own[128];
	.loc	1 12 7    // a comment; with a semicolon
$L__func_begin0:
	ld.param.b64 	%rd1, [first_param_1+8];
	mov.u32 	%r1, %tid.x;
	setp.lt.s32 	%p1, %r1, -5;
	@!%p1 bra 	$L__end;
	ld.global.v2.b32 	{ %r2, %r3 }, [ %rd1 + -16 ];
	.loc	1 13 2, function_name $L__info_string0, inlined_at 1 20 3
	shfl.sync.bfly.b32 	%r4|%p2, %r2, 1, 0f3F800000, -1;
	// begin inline asm
	{
	.reg .pred p; .reg .b32 %r8;
	setp.eq.u32 p, %r8, 0; @p cp.async.cg.shared::cta.global [ %r4 + 0 ], [ %rd1 ], 0x10;
	}
	// end inline asm
	st.shared.b32 	[own+4], 0d3FF0000000000000;
	mov.b32 	%r5, global_smem;
$L__end:
	ret;
}
.visible .entry second()
{
	ret;
}
.file	1 "/somewhere/kernels.py"
	.section	.debug_abbrev
	{
.b8 1
	}
"""
)


def kernel() -> Kernel:
    return read_kernels(
        _TEXT.replace('.file	1 "/somewhere/kernels.py"', "").replace(".version", '.file 1 "/somewhere/kernels.py"\n.version')
    )["first"]


def test_entries() -> None:
    assert list(read_kernels(_TEXT)) == ["first", "second"]
    found = kernel()
    assert found.threads == 128
    assert [(one.name, one.type, one.size, one.align) for one in found.parameters] == [
        ("first_param_0", "u64", 8, 1),
        ("first_param_1", "b8", 24, 8),
        ("first_param_2", "f32", 4, 4),
    ]
    assert [(one.name, one.size, one.align) for one in found.shared] == [("global_smem", 0, 16), ("own", 128, 4)]
    assert found.labels == {"$L__func_begin0": 0, "$L__end": len(found.instructions) - 1}


def test_operands() -> None:
    r1, rd1, p1 = Register("%r1", "b32"), Register("%rd1", "b64"), Register("%p1", "pred")
    load, move, compare, branch, pair, shuffle, *_ = kernel().instructions
    assert load.operands == (rd1, Address(Symbol("first_param_1"), 8))
    assert move.operands == (r1, Register("%tid.x", "u32"))
    assert compare.operands == (p1, r1, Immediate(-5, NumberKind.INTEGER))
    assert (branch.opcode, branch.operands, branch.guard) == (("bra",), (Symbol("$L__end"),), Guard(p1, True))
    assert pair.operands == (Vector((Register("%r2", "b32"), Register("%r3", "b32"))), Address(rd1, -16))
    assert shuffle.operands[0] == Vector((Register("%r4", "b32"), Register("%p2", "pred")))
    assert shuffle.operands[3:] == (Immediate(0x3F800000, NumberKind.FLOAT32), Immediate(-1, NumberKind.INTEGER))
    assert str(branch) == "@!%p1 bra"


def test_scopes() -> None:
    """Registers of inline assembly are its own, whatever names stand outside."""
    compare, copy = (one for one in kernel().instructions if one.opcode[0] == "cp" or one.opcode[:2] == ("setp", "eq"))
    assert compare.operands[:2] == (Register("1:p", "pred"), Register("1:%r8", "b32"))
    assert copy.guard == Guard(Register("1:p", "pred"), False)
    assert copy.opcode == ("cp", "async", "cg", "shared::cta", "global")
    assert copy.operands == (Address(Register("%r4", "b32"), 0), Address(Register("%rd1", "b64"), 0), Immediate(16, NumberKind.INTEGER))


def test_lines() -> None:
    """In the PTX and in the program that was compiled."""
    text = _TEXT.splitlines()
    for instruction in kernel().instructions:
        assert ".".join(instruction.opcode) in text[instruction.line - 2]  # one line more stands at the head
    sources = [instruction.source for instruction in kernel().instructions]
    assert sources == [Source("kernels.py", 12)] * 5 + [Source("kernels.py", 13)] * (len(sources) - 5)


def test_names_of_arrays_and_floats() -> None:
    store, move = (one for one in kernel().instructions if one.opcode in (("st", "shared", "b32"), ("mov", "b32")))
    assert store.operands == (Address(Symbol("own"), 4), Immediate(0x3FF0000000000000, NumberKind.FLOAT64))
    assert move == Instruction(("mov", "b32"), (Register("%r5", "b32"), Symbol("global_smem")), None, move.line, move.source)


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("mov.b32 %r9x, 1;", "line 9: register %r9x is not declared"),
        ("mov.b32 %r1 1;", "line 9: 1 stands where , is expected"),
        ("mov.b32 %r1, #;", "line 9: #; is not understood"),
        ("@%p1 .loop;", "line 9: register %p1 is not declared"),
        (".local .b8 stack[16];", "line 9: .local is not understood"),
        ("ld.global.b32 %r1, [{%r1}];", "line 9: an address begins with a register, a name or a number"),
        ("mov.b32 %r1,", "line 10: } is no operand"),
    ],
)
def test_what_is_refused(statement: str, why: str) -> None:
    with pytest.raises(PtxError) as error:
        read_kernels(f"{_HEAD}.entry bad() {{ .reg .b32 %r<2>;\n\n{statement}\n}}\n")
    assert str(error.value).startswith(why)


def test_a_text_that_ends_early() -> None:
    with pytest.raises(PtxError, match="ends in the midst of a statement"):
        read_kernels(_HEAD + ".entry bad() { ret;")
    with pytest.raises(PtxError, match=r"line 7: \.visible \.func is not understood"):
        read_kernels(_HEAD + ".visible .func (.reg .b32 x) f() { ret; }")
