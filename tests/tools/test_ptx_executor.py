"""Executing PTX: threads that part and meet, barriers, memory and its faults, warps and matrices."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from tools.ptx import native
from tools.ptx.executor import KernelFault, Launch, execute
from tools.ptx.memory import DeviceMemory
from tools.ptx.program import Allowed, Kernel, Source, read_kernels

NOTHING = Allowed()


def kernel(body: str, threads: int = 64, allowed: Allowed = NOTHING) -> Kernel:
    text = f"""
.file 1 "source.cuh"
.extern .shared .align 16 .b8 dynamic[];
.visible .entry tried(.param .u64 in, .param .u64 out) .reqntid {threads} {{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, {threads}, %r1; mul.wide.u32 %rd3, %r3, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
{body}
    ret;
}}"""
    return replace(read_kernels(text)["tried"], allowed=allowed)


def run(
    body: str,
    numbers: np.ndarray,
    size: int | None = None,
    blocks: int = 1,
    threads: int = 64,
    shared: int = 0,
    together: int = 32,
    products: bool = False,
    allowed: Allowed = NOTHING,
) -> np.ndarray:
    """What stands in `out`, of the type of `numbers`, with both executors, which sum `products` in different orders.

    `size`: of out, in numbers; as many as threads by default."""
    each = (_run(in_cpp, kernel(body, threads, allowed), numbers, size, blocks, threads, shared, together) for in_cpp in (False, True))
    found, why = zip(*each, strict=True)
    if why[0] is not None:
        assert why[1] == why[0] or all("is not modelled" in str(one) for one in why)
        raise KernelFault(why[0])
    assert found[1] is not None, why[1]
    if products:
        assert np.allclose(*(one.view(np.float32) for one in found), rtol=1e-5, atol=1e-5)
    else:
        assert (found[0] == found[1]).all()
    return found[0]


def _run(
    in_cpp: bool, code: Kernel, numbers: np.ndarray, size: int | None, blocks: int, threads: int, shared: int, together: int
) -> tuple[np.ndarray | None, str | None]:
    """And what fault there was."""
    memory = DeviceMemory(1 << 30)
    raw = numbers.reshape(-1).view(np.uint8)
    at, out_size = memory.allocate(raw.size), (blocks * threads if size is None else size) * numbers.itemsize
    memory.write(at, raw)
    out = memory.allocate(out_size)
    launch = Launch((blocks, 1, 1), (threads, 1, 1), (at.to_bytes(8, "little"), out.to_bytes(8, "little")), shared)
    try:
        if in_cpp:
            native.execute(code, memory, launch)
        else:
            execute(code, memory, launch, together)
    except KernelFault as fault:
        return None, str(fault)
    return memory.read(out, out_size).view(numbers.dtype), None


NUMBERS = np.arange(64, dtype=np.uint32)


@pytest.mark.parametrize("together", [1, 2, 32])
def test_blocks_and_threads(together: int) -> None:
    numbers = np.arange(320, dtype=np.uint32)
    out = run("ld.global.b32 %r4, [%rd4]; add.s32 %r4, %r4, 7; st.global.b32 [%rd5], %r4;", numbers, blocks=5, together=together)
    assert (out == numbers + 7).all()


def test_threads_part_and_meet() -> None:
    """Each runs a loop of its own length, and all shuffle together behind it."""
    out = run(
        """
    mov.b32 %r4, 0; mov.b32 %r5, %r1;
LOOP:
    setp.eq.s32 %p1, %r5, 0;
    @%p1 bra DONE;
    add.s32 %r4, %r4, %r5; sub.s32 %r5, %r5, 1;
    bra LOOP;
DONE:
    shfl.sync.idx.b32 %r6|%p2, %r4, 31, 31, -1;
    st.global.b32 [%rd5], %r6;""",
        NUMBERS,
    )
    assert out.tolist() == [496] * 32 + [2016] * 32


def test_some_end_early() -> None:
    body = "setp.ge.s32 %p1, %r1, 5; @%p1 exit; st.global.b32 [%rd5], %r1;"
    assert run(body, NUMBERS, size=5).tolist() == [0, 1, 2, 3, 4]


def test_barriers_hand_numbers_over() -> None:
    """Each thread reads what another warp wrote."""
    assert (run(HAND_OVER, NUMBERS, shared=256) == 63 - NUMBERS).all()


SOME = """
    setp.ge.s32 %p1, %r1, 32; shl.b32 %r4, %r1, 2; and.b32 %r4, %r4, 127; mov.b32 %r5, 64;
    @%p1 bra READ;
    st.shared.b32 [%r4], %r1; bar.arrive 1, 64; bar.sync 2, 32; st.global.b32 [%rd5], %r1; bra END;
READ:
    bar.sync 1, %r5; ld.shared.b32 %r7, [%r4]; st.global.b32 [%rd5], %r7;
END:
    mov.b32 %r8, 0;"""


def test_barriers_of_some_threads() -> None:
    """One warp hands over and goes on, another waits for it."""
    assert (run(SOME, NUMBERS, shared=128) == NUMBERS % 32).all()
    assert (run(SOME, NUMBERS, shared=128, blocks=3, size=192).reshape(3, 64) == NUMBERS % 32).all()
    with pytest.raises(KernelFault, match="race: shared bytes that another warp wrote"):
        run(SOME.replace("bar.sync 1, %r5", "bar.sync 3, 32"), NUMBERS, shared=128)
    with pytest.raises(KernelFault, match="not all threads reach"):
        run(SOME.replace("bar.arrive 1, 64;", ""), NUMBERS, shared=128)
    with pytest.raises(KernelFault, match="barrier 16 of 16"):
        run("bar.sync 16, 64;", NUMBERS)


def test_copies_are_made_at_their_wait_or_at_their_issue() -> None:
    """It differs where their source changes between."""
    late = "mov.b32 %r8, 7; st.global.b32 [%rd4], %r8; cp.async.wait_group 0;"
    found = []
    for early in (False, True):
        memory = DeviceMemory(1 << 20)
        at, out = memory.allocate(256), memory.allocate(256)
        memory.write(at, NUMBERS.view(np.uint8))
        launch = Launch((1, 1, 1), (64, 1, 1), (at.to_bytes(8, "little"), out.to_bytes(8, "little")), 256)
        native.execute(kernel(COPY.replace("cp.async.wait_group 0;", late)), memory, launch, early=early)
        found.append(memory.read(out, 256).view(np.uint32).tolist())
    assert found == [[7] * 64, (63 - NUMBERS).tolist()]


@pytest.mark.parametrize(("size", "expected"), [("4", 1), ("4, %r9", 0)])
def test_copies(size: str, expected: int) -> None:
    """Nothing is read, and zeros are written, where the size of the source is 0."""
    body = "mov.b32 %r9, 0;" + COPY.replace("4; cp.async.commit", f"{size}; cp.async.commit")
    assert (run(body, NUMBERS, shared=256) == expected * (63 - NUMBERS)).all()


COPY = """
    shl.b32 %r4, %r1, 2; cp.async.ca.shared.global [%r4], [%rd4], 4; cp.async.commit_group;
    cp.async.wait_group 0; bar.sync 0;
    sub.s32 %r6, 63, %r1; shl.b32 %r6, %r6, 2; ld.shared.b32 %r7, [%r6]; st.global.b32 [%rd5], %r7;"""
HAND_OVER = """
    shl.b32 %r4, %r1, 2; mov.b32 %r5, dynamic; add.s32 %r4, %r4, %r5; st.shared.b32 [%r4], %r1;
    bar.sync 0;
    sub.s32 %r6, 63, %r1; shl.b32 %r6, %r6, 2; ld.shared.b32 %r7, [%r6]; st.global.b32 [%rd5], %r7;"""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "st.global.b32 [%rd5+4], %r1;",
            r"store to address 0x1\w+, 4 bytes, which is out of bounds: block \(0, 0, 0\) thread 63, PTX line",
        ),
        ("ld.global.b32 %r4, [%rd5];", "load of address .* which was never written: block .* thread 0 and 63 more"),
        ("ld.global.b32 %r4, [%rd4+2];", "is no multiple of 4 bytes"),
        ("ld.global.v2.b32 {%r4, %r5}, [%rd4];", "is no multiple of 8 bytes: .* thread 1 and 31 more"),
        ("cvt.u32.u64 %r4, %rd4; cvt.u64.u32 %rd6, %r4; ld.global.b32 %r4, [%rd6];", "which is out of bounds"),
        ("st.global.b32 [%rd2], %r1;", "race: several threads store different numbers to one place"),
        ("setp.lt.s32 %p1, %r1, 9; @%p1 exit; bar.sync 0;", "a barrier that threads never reach, as they have ended"),
        (
            "setp.lt.s32 %p1, %r1, 9; @%p1 bra B; bar.sync 0; bra C;\nB: bar.sync 0; bar.sync 0;\nC: mov.b32 %r4, 1;",
            "not all threads reach",
        ),
        (COPY.replace("wait_group 0", "wait_group 1"), "load of shared bytes that were never written, or whose copy is under way"),
        (COPY.replace("cp.async.wait_group 0;", ""), "load of shared bytes that were never written, or whose copy is under way"),
        (COPY.replace("cp.async.commit_group;", ""), "load of shared bytes that were never written, or whose copy is under way"),
        (COPY.replace("bar.sync 0;", ""), "race: shared bytes that another warp wrote since the last barrier"),
        ("cp.async.ca.shared.global [%r1], [%rd1], 4; cp.async.commit_group;", "shared address 1 of 4 bytes"),
        (
            "shl.b32 %r4, %r1, 2; cp.async.ca.shared.global [%r4], [%rd4], 4; cp.async.commit_group;",
            "a copy or product that is not waited for",
        ),
        (HAND_OVER.replace("bar.sync 0;", ""), "race: shared bytes that another warp wrote since the last barrier: .*ld.shared.b32"),
        (HAND_OVER + "add.s32 %r6, %r6, 4; st.shared.b32 [%r4], %r6;", "race: store to shared bytes that another warp read"),
        (HAND_OVER.replace("63, %r1", "64, %r1"), "shared address 256 of 4 bytes: no multiple of them, or beyond 256"),
        (HAND_OVER.replace("st.shared.b32", "@%p1 st.shared.b32").replace("shl", "setp.lt.s32 %p1, %r1, 60; shl", 1), "never written"),
        ("setp.lt.s32 %p1, %r1, 9; @%p1 shfl.sync.idx.b32 %r4, %r1, 0, 31, -1;", "an instruction of whole warps, of which some threads"),
        ("tex.2d.v4.f32 %r4, %r1;", "tex.2d.v4.f32 is no instruction of registers"),
        ("mov.u32 %r4, %smid;", "%smid is not modelled: .*mov.u32"),
        ("bar.sync 1, 32;", "a barrier of 32 threads that 64 reach"),
    ],
)
def test_faults(body: str, why: str) -> None:
    with pytest.raises(KernelFault, match=why):
        run(body, NUMBERS, shared=256)


def test_parts_of_numbers() -> None:
    body = """mov.b64 %rd6, {%r1, %r3}; mov.b64 {_, %r4}, %rd6; mov.b32 {%rs1, %rs2}, %r4; add.s16 %rs2, %rs2, 3;
    mov.b32 %r5, {%rs2, %rs1}; st.global.b32 [%rd5], %r5;"""
    assert (run(body, NUMBERS, blocks=1) == (NUMBERS << 16) + 3).all()


def test_what_a_library_is_allowed() -> None:
    """Reading what was never written gives no number, but not what is being copied; races are allowed on lines of the source alone."""
    empty = "shl.b32 %r4, %r1, 2; ld.shared.b32 %r7, [%r4]; st.global.b32 [%rd5], %r7;"
    assert (run(empty, NUMBERS, shared=256, allowed=Allowed(unwritten=True)) == 0xFFFFFFFF).all()
    for body in (empty, COPY.replace("wait_group 0", "wait_group 1")):
        with pytest.raises(KernelFault, match="load of shared bytes that were never written, or whose copy is under way"):
            run(body, NUMBERS, shared=256, allowed=Allowed(unwritten=body != empty))
    raced = HAND_OVER.replace("bar.sync 0;", "\n.loc 1 7 0\n") + "\n.loc 1 8 0\nst.shared.b32 [%r6], %r6;"
    races = frozenset((Source("source.cuh", 7), Source("source.cuh", 8)))
    run(raced, NUMBERS, shared=256, allowed=Allowed(races))
    for line, verb in ((7, "wrote|read"), (8, "that another warp wrote")):
        with pytest.raises(KernelFault, match=verb):
            run(raced, NUMBERS, shared=256, allowed=Allowed(races - {Source("source.cuh", line)}))


def test_a_fault_names_its_line() -> None:
    text = ".loc 1 77 0\n st.global.b32 [%rd5+4], %r1;"
    with pytest.raises(KernelFault, match=r"thread 63, PTX line 9 \(st\.global\.b32\), source\.cuh:77"):
        run(text, NUMBERS)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "why"),
    [
        ((1, 65536, 1), (64, 1, 1), 0, "a grid of (1, 65536, 1) is beyond"),
        ((1, 1, 1), (32, 1, 1), 0, "32 threads of a block, of at most 1024, compiled for 64"),
        ((1, 1, 1), (64, 1, 1), 300_000, "300000 bytes of shared memory, of at most 232448"),
    ],
)
def test_limits(grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, why: str) -> None:
    with pytest.raises(KernelFault, match=re.escape(why)):
        execute(kernel(""), DeviceMemory(1 << 20), Launch(grid, block, (bytes(8), bytes(8)), shared))
    with pytest.raises(KernelFault, match=r"arguments of \[8\] bytes for parameters of \[8, 8\]"):
        execute(kernel(""), DeviceMemory(1 << 20), Launch((1, 1, 1), (64, 1, 1), (bytes(8),)))


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str) -> None:
    """Lanes whose source is outside keep their own number."""
    bound = 0 if mode == "up" else 31
    out = run(f"mov.b32 %r4, 5; shfl.sync.{mode}.b32 %r5, %r1, %r4, {bound}, -1; st.global.b32 [%rd5], %r5;", NUMBERS)
    lane, warp = NUMBERS % 32, NUMBERS // 32 * 32
    source = {"up": lane - np.uint32(5), "down": lane + 5, "bfly": lane ^ 5, "idx": np.full_like(lane, 5)}[mode]
    assert (out == warp + np.where(source < 32, source, lane)).all()


def test_warps_together() -> None:
    body = """setp.lt.u32 %p1, %r1, 40; vote.sync.ballot.b32 %r4, %p1, -1; neg.s32 %r5, %r1; redux.sync.min.s32 %r6, %r5, -1;
    selp.b32 %r7, %r4, %r6, %p1; st.global.b32 [%rd5], %r7;"""
    out = run(body, NUMBERS)
    assert out.tolist() == [2**32 - 1] * 32 + [255] * 8 + [2**32 - 63] * 24


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(space: str) -> None:
    if space == "global":
        first = (
            "setp.eq.u32 %p1, %r1, 0; @%p1 st.global.b32 [%rd2+256], 100; bar.sync 0; atom.global.gpu.relaxed.add.u32 %r4, [%rd2+256], %r1;"
        )
        out = run(first + "st.global.b32 [%rd5], %r4; bar.sync 0; ld.global.b32 %r5, [%rd2+256];", NUMBERS, size=65)
        assert out[64] == 100 + 2016
    else:
        first = "setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.b32 [0], 100; bar.sync 0; setp.lt.u32 %p2, %r1, 32; mov.b32 %r4, 0;"
        out = run(first + "@%p2 atom.shared.add.u32 %r4, [0], %r1; st.global.b32 [%rd5], %r4;", NUMBERS, shared=4)
    assert out[:32].tolist() == [100 + one * (one - 1) // 2 for one in range(32)]


@pytest.mark.parametrize("turned", ["", ".trans"])
def test_matrices_of_shared_memory(turned: str) -> None:
    """A warp reads four of them; lane 4 g + t has elements 2 t and 2 t + 1 of row g. And stores them where they were."""
    numbers = np.arange(256, dtype=np.uint32)  # 8 x 8 elements in each 32 words
    body = f"""
    mul.wide.u32 %rd6, %r1, 16; add.s64 %rd6, %rd1, %rd6; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd6];
    shl.b32 %r8, %r1, 4; st.shared.v4.b32 [%r8], {{%r4, %r5, %r6, %r7}}; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r8]; bar.sync 0;
    mul.wide.u32 %rd7, %r1, 16; add.s64 %rd7, %rd2, %rd7; st.global.v4.b32 [%rd7], {{%r10, %r11, %r12, %r13}};
    stmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 [%r8], {{%r10, %r11, %r12, %r13}}; bar.sync 0;
    ld.shared.v4.b32 {{%r14, %r15, %r16, %r17}}, [%r8]; st.global.v4.b32 [%rd7+512], {{%r14, %r15, %r16, %r17}};"""
    out = run(body, numbers[:128] * 65537 + 3, size=256, threads=32, shared=512)
    given = (numbers[:128] * np.uint32(65537) + np.uint32(3)).view(np.uint16).reshape(4, 8, 8)
    held = np.ascontiguousarray(given.swapaxes(1, 2) if turned else given).view(np.uint32).reshape(4, 32)
    assert (out[:128].reshape(32, 4) == held.T).all()
    assert (out[128:] == given.reshape(-1).view(np.uint32)).all()


@pytest.mark.parametrize(("kind", "dtype", "depth"), [("bf16", torch.bfloat16, 16), ("f16", torch.float16, 16), ("tf32", torch.float32, 8)])
def test_products(kind: str, dtype: torch.dtype, depth: int) -> None:
    """m16n8: the layouts of A, B and C of the ISA, written out here once more."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(shape, generator=generator).to(dtype).float() for shape in ((16, depth), (depth, 8), (16, 8)))
    per_word = 4 // dtype.itemsize
    lane = np.arange(32)
    group, thread = lane // 4, lane % 4

    def words(matrix: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        picked = torch.stack([matrix[rows, columns + k] for k in range(per_word)], 1)
        return picked.to(dtype).contiguous().view(torch.uint8).numpy().view(np.uint32)[:, 0]

    half, first = depth // 2, thread * per_word
    of_a = [words(a, group + 8 * (k % 2), first + half * (k // 2)) for k in range(4)]
    of_b = [words(b.T, group, first + half * k) for k in range(2)]
    of_c = [c[group + 8 * (k // 2), 2 * thread + k % 2].numpy().view(np.uint32) for k in range(4)]
    given = np.stack([*of_a, *of_b, *of_c], 1)  # [lanes, 10]
    loads = "".join(f"ld.global.b32 %r{10 + k}, [%rd6+{4 * k}];" for k in range(10))
    stores = "".join(f"st.global.b32 [%rd7+{4 * k}], %r{20 + k};" for k in range(4))
    shape = f"m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"
    body = f"""mul.wide.u32 %rd6, %r1, 40; add.s64 %rd6, %rd1, %rd6; mul.wide.u32 %rd7, %r1, 16; add.s64 %rd7, %rd2, %rd7; {loads}
    mma.sync.aligned.{shape} {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}}; {stores}"""
    found = torch.from_numpy(run(body, np.ascontiguousarray(given), size=128, threads=32, products=True).view(np.float32).reshape(32, 4))
    expected = a @ b + c
    none = body.replace("%r21, %r22", "_, %r22").replace("%r21;", "%r1;")  # a result that nobody wants
    rest = run(none, np.ascontiguousarray(given), size=128, threads=32, products=True).view(np.float32).reshape(32, 4)
    assert (rest[:, [0, 2, 3]] == found.numpy()[:, [0, 2, 3]]).all()
    for k in range(4):
        torch.testing.assert_close(found[:, k], expected[group + 8 * (k // 2), 2 * thread + k % 2], rtol=1e-5, atol=1e-5)
