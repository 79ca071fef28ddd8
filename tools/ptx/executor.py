"""Executes a kernel on a grid: threads, their divergence, barriers, loads and stores, and what warps do together.

Owns which thread is where, and registers. What an instruction computes of registers is `arithmetic`'s, what an address means `memory`'s.
All threads of the blocks that run together execute an instruction at once; where they part, those that are farthest behind go first, so
that they meet again. Time, caches and the order in which hardware makes stores visible are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.ptx import matrices
from tools.ptx.arithmetic import evaluate
from tools.ptx.groups import AsyncGroups
from tools.ptx.memory import DeviceMemory, MemoryFault, SharedMemory
from tools.ptx.numbers import Bits
from tools.ptx.program import SIZES, Address, Immediate, Instruction, Kernel, Operand, PtxError, Symbol, Vector
from tools.ptx.registers import Registers, mask

_U = np.uint64
_LANES, _WARP_GROUP = 32, 128
_MOST_BARRIERS = 16
MOST_GRID = (2**31 - 1, 65535, 65535)
_MOST_BLOCK = (1024, 1024, 64)
_MOST_THREADS, _MOST_SHARED = 1024, 227 << 10
NO_EFFECT = {"membar", "fence", "prefetch", "nanosleep", "griddepcontrol"}


class KernelFault(Exception):
    """What hardware would refuse, or what makes a result depend on chance; the message names kernel, block, thread and lines."""


@dataclass(frozen=True)
class Launch:
    """`grid` and `block`: x, y and z. `arguments`: the bytes of each parameter. `shared_bytes`: of arrays whose size a launch gives."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[bytes, ...]
    shared_bytes: int = 0


def execute(kernel: Kernel, memory: DeviceMemory, launch: Launch, together: int = 32) -> NDArray[np.int64]:
    """Runs all blocks, `together` at a time, and returns how often threads executed each instruction. Raises KernelFault."""
    check_limits(kernel, launch)
    executed = np.zeros(len(kernel.instructions), np.int64)
    blocks = np.arange(np.prod(launch.grid, dtype=np.int64))
    for first in range(0, len(blocks), together):
        executed += _Blocks(kernel, memory, launch, blocks[first : first + together]).run()
    return executed


def check_limits(kernel: Kernel, launch: Launch) -> None:
    for what, sizes, limits in (("grid", launch.grid, MOST_GRID), ("block", launch.block, _MOST_BLOCK)):
        if not all(1 <= size <= limit for size, limit in zip(sizes, limits, strict=True)):
            raise KernelFault(f"{kernel.name}: a {what} of {sizes} is beyond {limits}")
    threads, shared = int(np.prod(launch.block)), shared_layout(kernel, launch.shared_bytes)[1]
    if threads > _MOST_THREADS or threads % _LANES or threads != (kernel.threads or threads):
        raise KernelFault(f"{kernel.name}: {threads} threads of a block, of at most {_MOST_THREADS}, compiled for {kernel.threads}")
    if shared > _MOST_SHARED:
        raise KernelFault(f"{kernel.name}: {shared} bytes of shared memory, of at most {_MOST_SHARED}")
    given, declared = [len(one) for one in launch.arguments], [one.size for one in kernel.parameters]
    if given != declared:
        raise KernelFault(f"{kernel.name}: arguments of {given} bytes for parameters of {declared}")


def reduced(opcode: Sequence[str], numbers: Bits) -> Bits:
    """redux.sync: the sum, the least or the like of each warp, for all of its threads."""
    total = evaluate(("mov", opcode[-1]), [numbers]).reshape(-1, _LANES)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        pair = [np.ascontiguousarray(one).reshape(-1) for one in (total[:, :half], total[:, half:])]
        total = evaluate((opcode[2], opcode[-1]), pair).reshape(-1, half)
    return np.repeat(total[:, 0], _LANES)


def fault_of(kernel: Kernel, launch: Launch, instruction: Instruction, what: str, block: int, thread: int, threads: int) -> KernelFault:
    """`block`, `thread`: the first one that does it, of as many `threads`."""
    x, y, _ = launch.grid
    who = f"block ({block % x}, {block // x % y}, {block // (x * y)}) thread {thread}" if threads else ""
    who += f" and {threads - 1} more, " if threads > 1 else ", " if threads else ""
    source = "" if instruction.source is None else f", {instruction.source.file}:{instruction.source.line}"
    return KernelFault(f"{kernel.name}: {what}: {who}PTX line {instruction.line} ({instruction}){source}")


def shared_layout(kernel: Kernel, dynamic: int) -> tuple[dict[str, int], int]:
    """Where each array begins, and the bytes of all. Arrays whose size a launch gives lie in one place, behind all others."""
    places, at = {}, 0
    for one in sorted(kernel.shared, key=lambda one: one.size == 0):
        at = -(-at // one.align) * one.align
        places[one.name] = at
        at += one.size
    return places, at + dynamic


class _Blocks:
    """Blocks that run together. Registers are [threads], the threads of each block behind one another."""

    def __init__(self, kernel: Kernel, memory: DeviceMemory, launch: Launch, blocks: NDArray[np.int64]) -> None:
        self._kernel, self._memory, self._launch, self._numbers = kernel, memory, launch, blocks
        self._per_block = int(np.prod(launch.block))
        self._threads = len(blocks) * self._per_block
        thread = np.arange(self._threads) % self._per_block
        self._block_of = np.arange(self._threads) // self._per_block
        self._places, shared = shared_layout(kernel, launch.shared_bytes)
        self._shared = SharedMemory(shared, len(blocks), self._block_of, thread // _LANES)
        self._arguments = {one.name: argument for one, argument in zip(kernel.parameters, launch.arguments, strict=True)}
        self._registers = Registers(self._threads, self._special(thread, blocks[self._block_of]), self._places)
        self._pcs = np.zeros(self._threads, np.int64)
        self._waiting = np.zeros(self._threads, bool)
        self._arrived = np.zeros((_MOST_BARRIERS, self._threads), bool)
        self._end = len(kernel.instructions)
        self._executed = np.zeros(self._end, np.int64)
        self._copies, self._products = AsyncGroups(self._threads), AsyncGroups(self._threads)

    def _special(self, thread: NDArray[np.int64], block: NDArray[np.int64]) -> dict[str, Bits]:
        found: dict[str, NDArray[np.int64]] = {"%laneid": thread % _LANES, "%warpid": thread // _LANES}
        for axis, size, blocks in zip("xyz", self._launch.block, self._launch.grid, strict=True):
            found |= {f"%tid.{axis}": thread % size, f"%ctaid.{axis}": block % blocks}
            found |= {f"%ntid.{axis}": np.full_like(thread, size), f"%nctaid.{axis}": np.full_like(thread, blocks)}
            thread, block = thread // size, block // blocks
        return {name: number.astype(_U) for name, number in found.items()}

    def run(self) -> NDArray[np.int64]:
        targets = set(self._kernel.labels.values())
        while (active := self._choose()) is not None:
            pc = int(self._pcs[active][0])
            while True:
                instruction = self._kernel.instructions[pc]
                doing = active if instruction.guard is None else active & self._guard(instruction)
                self._executed[pc] += int(doing.sum())
                try:
                    goes_on = self._step(instruction, active, doing, pc)
                except MemoryFault as fault:
                    raise self._fault(instruction, str(fault), fault.threads) from None
                except PtxError as error:
                    raise self._fault(instruction, str(error), doing) from None
                if not goes_on:
                    break
                pc += 1
                if pc in targets:
                    self._pcs[active] = pc
                    break
        for one in (*self._copies.pending, *self._products.pending):
            raise self._fault(one.instruction, "a copy or product that is not waited for", one.threads)
        return self._executed

    def _choose(self) -> NDArray[np.bool_] | None:
        """The threads that go on: those farthest behind of all that wait for nothing. None if all have ended."""
        ready = (self._pcs != self._end) & ~self._waiting
        if ready.any():
            first: NDArray[np.bool_] = ready & (self._pcs == self._pcs[ready].min())
            return first
        if self._waiting.any():
            instruction = self._kernel.instructions[int(self._pcs[self._waiting][0]) - 1]
            raise self._fault(instruction, "a barrier that not all threads reach", self._waiting)
        return None

    def _guard(self, instruction: Instruction) -> NDArray[np.bool_]:
        assert instruction.guard is not None
        guards: NDArray[np.bool_] = (self._registers.read(instruction.guard.register, "pred") != 0) ^ instruction.guard.negated
        return guards

    def _fault(self, instruction: Instruction, what: str, threads: NDArray[np.bool_]) -> KernelFault:
        first = int(np.flatnonzero(threads)[0]) if threads.any() else 0
        block = int(self._numbers[first // self._per_block])
        return fault_of(self._kernel, self._launch, instruction, what, block, first % self._per_block, int(threads.sum()))

    def _step(self, instruction: Instruction, active: NDArray[np.bool_], doing: NDArray[np.bool_], pc: int) -> bool:
        """Whether the same threads go on behind it. `active`: those that are there; `doing`: those whose guard lets them."""
        match instruction.opcode:
            case ("bra", *_):
                (label,) = instruction.operands
                assert isinstance(label, Symbol)
                self._pcs[active] = np.where(doing, self._kernel.labels[label.name], pc + 1)[active]
                return False
            case ("ret" | "exit", *_):
                self._pcs[active] = np.where(doing, self._end, pc + 1)[active]
                return False
            case ("bar" | "barrier", *rest) if "warp" not in rest:
                self._arrive(instruction, active, doing, pc)
                return False
            case _:
                if doing.any():
                    self._compute(instruction, doing)
                return True

    def _arrive(self, instruction: Instruction, active: NDArray[np.bool_], doing: NDArray[np.bool_], pc: int) -> None:
        """At a barrier, the first operand, of as many threads as the second says, or of all of a block."""
        if "sync" not in instruction.opcode and "arrive" not in instruction.opcode:
            raise PtxError(f"{instruction} is not modelled")
        if (active != doing).any():
            raise PtxError("a barrier with a guard is not modelled")
        numbers = [self._registers.read(one, "u32")[active] for one in instruction.operands]
        if any((one != one[0]).any() for one in numbers):
            raise PtxError("threads that are together at several barriers are not modelled")
        number, count = int(numbers[0][0]), int(numbers[1][0]) if len(numbers) > 1 else self._per_block
        if number >= _MOST_BARRIERS:
            raise PtxError(f"barrier {number} of {_MOST_BARRIERS}")
        here = self._arrived[number]
        self._pcs[active] = pc + 1
        here |= active
        if "sync" in instruction.opcode:
            self._waiting |= active
        have = here.reshape(-1, self._per_block).sum(1)
        if (have > count).any():
            raise PtxError(f"a barrier of {count} threads that {have.max()} reach")
        ended = ((self._pcs == self._end) & ~here).reshape(-1, self._per_block)
        if len(numbers) == 1 and (ended.any(1) & (ended | here.reshape(ended.shape)).all(1) & (have > 0)).any():
            raise self._fault(instruction, "a barrier that threads never reach, as they have ended", self._waiting)
        complete = np.asarray(have == count)
        self._shared.pass_barrier(complete, here)
        through = np.repeat(complete, self._per_block) & here
        self._waiting[through] = here[through] = False

    def _compute(self, instruction: Instruction, doing: NDArray[np.bool_]) -> None:
        name, opcode, operands = instruction.opcode[0], instruction.opcode, instruction.operands
        allowed = self._kernel.allowed
        self._shared.allow(instruction.source in allowed.races, allowed.unwritten)
        if name == "fence" and "proxy" in opcode:
            self._shared.pass_fence(np.unique(self._block_of[doing]))
        if name in NO_EFFECT or name in ("bar", "barrier"):
            return
        if name == "ld":
            self._load(opcode, operands, doing)
        elif name == "st":
            self._store(opcode, operands, doing)
        elif name == "cp":
            self._copy(instruction, doing)
        elif name == "wgmma":
            self._multiply(instruction, doing)
        elif name in ("atom", "red"):
            self._exchange(opcode, operands, doing)
        elif name == "shfl":
            self._registers.write(operands[0], self._shuffle(opcode, operands, doing), doing)
        elif name == "redux":
            self._registers.write(operands[0], self._reduce(opcode, operands, doing), doing)
        elif name == "vote":
            self._registers.write(operands[0], self._vote(opcode, operands, doing), doing)
        elif name == "ldmatrix":
            self._load_matrices(opcode, operands, doing)
        elif name == "stmatrix":
            self._store_matrices(opcode, operands, doing)
        elif name == "mma":
            self._whole_warps(doing)
            a, b, c = (np.stack([self._registers.read(part, "b32") for part in parts_of(one)]) for one in operands[1:4])
            for target, part in zip(parts_of(operands[0]), matrices.product(opcode, a, b, c), strict=True):
                self._registers.write(target, part, doing)
        elif name == "cvta":
            self._registers.write(operands[0], self._registers.read(operands[1], opcode[-1]), doing)
        elif not operands:
            raise PtxError(f"{instruction} is not modelled")
        else:
            self._registers.write(operands[0], evaluate(opcode, self._registers.read_all(opcode, operands[1:])), doing)

    # Memory

    def _address(self, operand: Operand) -> Bits:
        assert isinstance(operand, Address)
        base = np.zeros(self._threads, _U) if operand.base is None else self._registers.read(operand.base, "u64")
        return base + _U(operand.offset & (2**64 - 1))

    def _memory_of(self, opcode: Sequence[str]) -> DeviceMemory | SharedMemory:
        if any(part.startswith("shared") for part in opcode):
            return self._shared
        if "global" not in opcode:
            raise PtxError("an access that names neither global nor shared memory is not modelled")
        return self._memory

    def _load(self, opcode: Sequence[str], operands: Sequence[Operand], doing: NDArray[np.bool_]) -> None:
        kind, targets = opcode[-1], parts_of(operands[0])
        unit = SIZES[kind]
        if "param" in opcode:
            address = operands[1]
            assert isinstance(address, Address)
            assert isinstance(address.base, Symbol)
            raw = self._arguments[address.base.name][address.offset : address.offset + unit * len(targets)]
            fields = [int.from_bytes(raw[at : at + unit], "little") for at in range(0, len(raw), unit)]
            parts = [np.full(self._threads, field, _U) for field in fields]
        else:
            parts = self._memory_of(opcode).load(self._address(operands[1]), unit, len(targets), doing)
        for target, part in zip(targets, parts, strict=True):
            self._registers.write(target, evaluate(("mov", kind), [part]), doing)

    def _store(self, opcode: Sequence[str], operands: Sequence[Operand], doing: NDArray[np.bool_]) -> None:
        kind = opcode[-1]
        parts = [self._registers.read(one, kind) for one in parts_of(operands[1])]
        self._memory_of(opcode).store(self._address(operands[0]), SIZES[kind], parts, doing)

    def _copy(self, instruction: Instruction, doing: NDArray[np.bool_]) -> None:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode[1] != "async" or "bulk" in opcode:
            raise PtxError(f"{'.'.join(opcode)} is not modelled")
        if "commit_group" in opcode or "wait_all" in opcode:
            self._copies.commit(doing)
        if "wait_group" in opcode or "wait_all" in opcode:
            self._copies.wait(integer(operands[0]) if operands else 0, doing)
        if "commit_group" in opcode or opcode[2].startswith("wait"):
            return
        size = integer(operands[2])
        given = self._registers.read(operands[3], "u32") if len(operands) > 3 else np.full(self._threads, size, _U)
        if (doing & (given != size) & (given != 0)).any():
            raise PtxError("a copy of a part of its size is not modelled")
        to, source, unit = self._address(operands[0]), self._address(operands[1]), min(size, 8)

        def copy(now: NDArray[np.bool_]) -> None:
            parts = self._memory.load(source, unit, size // unit, now & (given != 0))
            self._shared.finish_copy(to, unit, parts, now)

        self._shared.begin_copy(to, size, doing)
        self._copies.issue(copy, doing, instruction)

    def _multiply(self, instruction: Instruction, doing: NDArray[np.bool_]) -> None:
        """wgmma: of four warps, B and perhaps A from shared memory. What it reads must stay as it is from its issue to its wait."""
        opcode, operands = instruction.opcode, instruction.operands
        if "commit_group" in opcode:
            self._products.commit(doing)
        elif "wait_group" in opcode:
            self._products.wait(integer(operands[0]), doing)
        if opcode[1] != "mma_async":
            return
        self._whole_warps(doing, _WARP_GROUP)
        shape = matrices.GroupShape.of(opcode, [integer(one) for one in operands[4:]], isinstance(operands[1], Vector))
        targets = parts_of(operands[0])
        kept = self._registers.read(operands[3], "pred")
        held = np.stack([self._registers.read(one, "b32") for one in operands[1].parts]) if isinstance(operands[1], Vector) else None
        descriptors = [None if held is not None else self._registers.read(operands[1], "b64"), self._registers.read(operands[2], "b64")]

        def of_shared(which: int, group: int) -> NDArray[np.float32]:
            descriptor = descriptors[which]
            assert descriptor is not None
            first = group * _WARP_GROUP
            places = matrices.places(int(descriptor[first]), shape.rows[which], shape.turned[which])
            return matrices.elements(self._shared.load_rows(first, places), shape.kinds[which], shape.turned[which])

        def multiply(now: NDArray[np.bool_]) -> None:
            results = np.zeros((len(targets), self._threads), np.float32)
            for group in np.flatnonzero(now[::_WARP_GROUP]).tolist():
                lanes = slice(group * _WARP_GROUP, (group + 1) * _WARP_GROUP)
                left = of_shared(0, group) if held is None else matrices.held_rows(held[:, lanes], shape.kinds[0])
                results[:, lanes] = matrices.spread_product(left, of_shared(1, group))
            for target, part in zip(targets, results, strict=True):
                before = np.where(kept != 0, self._registers.read(target, "f32").astype(np.uint32).view(np.float32), np.float32(0))
                self._registers.write(target, (before + part).view(np.uint32).astype(_U), now)

        for group in np.flatnonzero(doing[::_WARP_GROUP]).tolist():
            for which in range(2):
                if descriptors[which] is not None:
                    of_shared(which, group)  # it may be read from now on
        self._products.issue(multiply, doing, instruction)

    def _exchange(self, opcode: Sequence[str], operands: Sequence[Operand], doing: NDArray[np.bool_]) -> None:
        """One thread after another."""
        kind, memory = opcode[-1], self._memory_of(opcode)
        what = next(part for part in opcode if part in ("add", "min", "max", "and", "or", "xor", "exch", "cas"))
        target, (place, *given) = (operands[0], operands[1:]) if opcode[0] == "atom" else (Symbol("_"), operands)
        addresses, numbers = self._address(place), [self._registers.read(one, kind) for one in given]
        before = np.zeros(self._threads, _U)
        for thread in np.flatnonzero(doing):
            alone = np.zeros(self._threads, bool)
            alone[thread] = True
            old = memory.load(addresses, SIZES[kind], 1, alone)[0][thread]
            first = numbers[0][thread]
            if what in ("exch", "cas"):
                new = first if what == "exch" else numbers[1][thread] if old == first & mask(f"b{8 * SIZES[kind]}") else old
            else:
                new = evaluate((what, kind), [np.array([old]), np.array([first])])[0]
            memory.exchange(int(thread), addresses, SIZES[kind], new)
            before[thread] = old
        self._registers.write(target, before, doing)

    def _load_matrices(self, opcode: Sequence[str], operands: Sequence[Operand], doing: NDArray[np.bool_]) -> None:
        """Of 8 x 8 elements of 16 bits: each eight lanes have the addresses of the rows of one."""
        self._whole_warps(doing)
        targets = parts_of(operands[0])
        words = self._shared.load(self._address(operands[1]), 4, 4, doing & self._first_lanes(8 * len(targets)))
        rows = np.stack(words, 1).astype(np.uint32).reshape(-1, 4, 8, 4)[:, : len(targets)]
        for target, part in zip(targets, matrices.spread(np.ascontiguousarray(rows), "trans" in opcode), strict=True):
            self._registers.write(target, part, doing)

    def _store_matrices(self, opcode: Sequence[str], operands: Sequence[Operand], doing: NDArray[np.bool_]) -> None:
        self._whole_warps(doing)
        held = np.stack([self._registers.read(one, "b32") for one in parts_of(operands[1])])
        rows = np.zeros((self._threads // _LANES, 4, 8, 4), np.uint32)
        rows[:, : len(held)] = matrices.gathered(held, "trans" in opcode)
        words = rows.reshape(self._threads, 4).T.astype(_U)
        self._shared.store(self._address(operands[0]), 4, list(words), doing & self._first_lanes(8 * len(held)))

    def _first_lanes(self, count: int) -> NDArray[np.bool_]:
        return np.arange(self._threads) % _LANES < count

    # What warps do together: [warps, lanes]

    def _whole_warps(self, doing: NDArray[np.bool_], threads: int = _LANES) -> None:
        """`threads`: of a warp, or of the four that compute a product together."""
        warps = doing.reshape(-1, threads)
        parted = warps.any(1) != warps.all(1)
        if parted.any():
            raise MemoryFault("an instruction of whole warps, of which some threads are missing", np.repeat(parted, threads) & doing)

    def _shuffle(self, opcode: Sequence[str], operands: Sequence[Operand], doing: NDArray[np.bool_]) -> Bits:
        self._whole_warps(doing)
        number, amount, bounds = (self._registers.read(one, "b32").reshape(-1, _LANES).astype(np.int64) for one in operands[1:4])
        lane, clamp, segment = np.arange(_LANES), bounds & 31, bounds >> 8 & 31
        amount = amount & 31
        least, most = lane & segment, (lane & segment) | (clamp & ~segment)
        source = {"up": lane - amount, "down": lane + amount, "bfly": lane ^ amount, "idx": least | (amount & ~segment)}[opcode[2]]
        there = source >= most if opcode[2] == "up" else source <= most
        result = np.take_along_axis(number, np.where(there, source, lane), 1).reshape(-1).astype(_U)
        if isinstance(operands[0], Vector):
            self._registers.write(operands[0].parts[1], there.reshape(-1).astype(_U), doing)
        return result

    def _reduce(self, opcode: Sequence[str], operands: Sequence[Operand], doing: NDArray[np.bool_]) -> Bits:
        self._whole_warps(doing)
        return reduced(opcode, self._registers.read(operands[1], opcode[-1]))

    def _vote(self, opcode: Sequence[str], operands: Sequence[Operand], doing: NDArray[np.bool_]) -> Bits:
        self._whole_warps(doing)
        flags = self._registers.read(operands[1], "pred").reshape(-1, _LANES) & _U(1)
        if "ballot" in opcode:
            return np.repeat((flags << np.arange(_LANES, dtype=_U)).sum(1, dtype=_U), _LANES)
        whole = flags.all(1) if "all" in opcode else flags.any(1)
        return np.repeat(whole.astype(_U), _LANES)


def integer(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise PtxError("a number in a register is not modelled here")
    return operand.bits


def parts_of(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)
