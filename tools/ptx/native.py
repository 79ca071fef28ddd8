"""Executes kernels in C++ (`core/`), several times as fast as `executor.py`, which is its reference.

What the core does not know is computed by `arithmetic.py` when the core comes to it.
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

import numpy as np
from numpy.typing import NDArray

from tools.ptx.arithmetic import evaluate
from tools.ptx.encoding import Encoded
from tools.ptx.executor import Launch, check_limits, fault_of, reduced, shared_layout
from tools.ptx.memory import DeviceMemory
from tools.ptx.numbers import Bits
from tools.ptx.program import Instruction, Kernel, PtxError
from tools.ptx.registers import Registers

_ENDED, _NEEDS_CALLER = 0, 1
_NOT_OF_REGISTERS = {"bar", "barrier", "ld", "st", "cp", "mma", "wgmma", "atom", "red", "shfl", "vote", "ldmatrix", "stmatrix"}


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


def compiled(folder: pathlib.Path, source: str, link: Sequence[str] = ()) -> pathlib.Path:
    """A library of what is in a folder, compiled when it is first asked for and kept beside other temporary files."""
    text = b"".join(one.read_bytes() for one in sorted(folder.iterdir()))
    target = pathlib.Path(tempfile.gettempdir()) / f"aengine-ptx-{os.getuid()}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not target.exists():
        command = ["c++", "-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", str(folder / source), *link]
        with tempfile.TemporaryDirectory(dir=target.parent) as made:
            subprocess.run([*command, "-o", f"{made}/made.so"], check=True)
            os.replace(f"{made}/made.so", target)
    return target


@functools.cache
def library() -> ctypes.CDLL:
    """The core."""
    core = ctypes.CDLL(str(compiled(pathlib.Path(__file__).parent / "core", "core.cpp")))
    pointer, whole = ctypes.c_void_p, ctypes.c_int
    core.ptx_new.argtypes = [pointer] * 7 + [whole] * 3 + [pointer, pointer, ctypes.c_uint64]
    core.ptx_new.restype = pointer
    core.ptx_begin.argtypes = [pointer, whole, whole, whole]
    core.ptx_begin.restype = None
    core.ptx_message.restype = ctypes.c_char_p
    for one in (core.ptx_resume, core.ptx_pc, core.ptx_message, core.ptx_delete):
        one.argtypes = [pointer]
    return core


def execute(kernel: Kernel, memory: DeviceMemory, launch: Launch, encoded: Encoded | None = None, early: bool = False) -> NDArray[np.int64]:
    """Runs all blocks, one after another, and returns how often threads executed each instruction. Raises KernelFault. `encoded`: what
    `Encoded` has made of the kernel. `early`: whether copies and products are made when they are issued, not when they are waited for."""
    check_limits(kernel, launch)
    places, shared = shared_layout(kernel, launch.shared_bytes)
    encoded = encoded or Encoded(kernel, places)
    lanes = int(np.prod(launch.block))
    registers = np.zeros((len(encoded.masks), lanes), np.uint64)
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
    sizes = len(encoded.ops), lanes, int(early)
    state_of = core.ptx_new(*(one.ctypes.data for one in given), *sizes, data.ctypes.data, state.ctypes.data, data.size)
    try:
        for block in range(int(np.prod(launch.grid))):
            left = block
            for axis, blocks in zip("xyz", launch.grid, strict=True):
                named[f"%ctaid.{axis}"][:] = left % blocks
                left //= blocks
            core.ptx_begin(state_of, shared, *encoded.own)
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
