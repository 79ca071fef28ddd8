"""Hands launches of Triton kernels on CPU tensors to the executor, compiled for a GPU as they would be there.

Knows Triton's launcher alone: which arguments a kernel has, and what becomes of tensors. It changes Triton for the whole process, so
it is for processes of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tools.ptx.encoding import Encoded
from tools.ptx.executor import KernelFault, Launch, shared_layout
from tools.ptx.memory import DeviceMemory
from tools.ptx.native import execute
from tools.ptx.program import Kernel, Source, read_kernels


@dataclass
class Launches:
    """What was launched. `executed`: for each kernel that was compiled, by its hash, it and how often threads executed each instruction."""

    edit: Callable[[str], str] = str
    executed: dict[str, tuple[Kernel, NDArray[np.int64]]] = field(default_factory=dict)
    _encoded: dict[str, Encoded] = field(default_factory=dict)

    def run(self, kernel: Any, grid: Sequence[int], arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Compiles for these arguments, and executes with copies of their tensors, which it copies back. It does so twice, with
        asynchronous copies and products at their wait and at their issue. Raises KernelFault where that gives other numbers."""

        def executed(early: bool) -> tuple[DeviceMemory, _Copies]:
            memory, copies = DeviceMemory(4 << 30), _Copies()
            self.compiled(kernel, grid, arguments, options, lambda tensor: copies.address(memory, tensor))(memory, early)
            return memory, copies

        (memory, copies), (memory_of_early, copies_of_early) = executed(early=False), executed(early=True)
        pairs = zip(copies.found(memory), copies_of_early.found(memory_of_early), strict=True)
        if any((late != early).any() for late, early in pairs):
            raise KernelFault(f"{kernel.fn.__name__}: other numbers where copies or products are made when they are issued")
        copies.copy_back(memory)

    def compiled(
        self,
        kernel: Any,
        grid: Sequence[int],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        address: Callable[[torch.Tensor], int],
    ) -> Callable[[DeviceMemory, bool], None]:
        """Compiles for these arguments, and returns what executes the launch, as `native.execute` with `early`. `address`: of a tensor in
        the device's memory."""
        binary = kernel.run(*arguments, grid=grid, warmup=True, **options)
        if binary.hash not in self.executed:
            (code,) = read_kernels(self.edit(binary.asm["ptx"])).values()
            self.executed[binary.hash] = code, np.zeros(len(code.instructions), np.int64)
            self._encoded[binary.hash] = Encoded(code, shared_layout(code, 0)[0])
        (code, executed), encoded = self.executed[binary.hash], self._encoded[binary.hash]
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | {name: options[name] for name in kernel.arg_names if name in options}
        numbers = []
        for name, kind in binary.src.signature.items():
            if kind != "constexpr":
                value = given[name]
                numbers.append(address(value) if isinstance(value, torch.Tensor) else value)
        numbers += [0] * (len(code.parameters) - len(numbers))  # scratch memory of the launcher, which no kernel here asks for
        packed = tuple(_pack(number, one.type, one.size) for number, one in zip(numbers, code.parameters, strict=True))
        x, y, z = (*grid, 1, 1)[:3]
        launch = Launch((x, y, z), (32 * binary.metadata.num_warps, 1, 1), packed, binary.metadata.shared)

        def run(memory: DeviceMemory, early: bool) -> None:
            np.add(executed, execute(code, memory, launch, encoded, early), out=executed)

        return run


def lines_reached(executed: Iterable[tuple[Kernel, NDArray[np.int64]]]) -> dict[Source, bool]:
    """Of each line of the source from which there are instructions, whether threads have executed any of them."""
    reached: dict[Source, bool] = {}
    for kernel, counts in executed:
        for instruction, count in zip(kernel.instructions, counts.tolist(), strict=True):
            if instruction.source is not None:
                reached[instruction.source] = reached.get(instruction.source, False) or count > 0
    return reached


@dataclass
class _Copies:
    """Of the storages of tensors, by their addresses on the host."""

    placed: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)

    def address(self, memory: DeviceMemory, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.placed:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage)
            at = memory.allocate(raw.numel(), storage.data_ptr() % 16)  # as aligned as what Triton saw
            memory.write(at, raw.numpy())
            self.placed[storage.data_ptr()] = at, raw
        return self.placed[storage.data_ptr()][0] + tensor.data_ptr() - storage.data_ptr()

    def found(self, memory: DeviceMemory) -> list[NDArray[np.uint8]]:
        return [memory.read(at, raw.numel()) for at, raw in self.placed.values()]

    def copy_back(self, memory: DeviceMemory) -> None:
        for at, raw in self.placed.values():
            raw.copy_(torch.from_numpy(memory.read(at, raw.numel())))


def install(capability: int) -> Launches:
    """From now on, kernels of this process are compiled for `capability` (90 for Hopper) and executed."""
    launches = Launches()
    redirect(capability, launches.run)
    return launches


def redirect(capability: int, launch: Callable[[Any, Sequence[int], Sequence[Any], Mapping[str, Any]], None]) -> None:
    """From now on, launches of this process go to `launch`, with kernel, grid, arguments and options."""
    compile_for(capability)
    JITFunction.__getitem__ = lambda kernel, grid: lambda *arguments, **options: launch(kernel, grid, arguments, options)


def compile_for(capability: int) -> None:
    """From now on, `kernel.run(warmup=True)` in this process compiles for `capability`."""

    class Device:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    driver.set_active(Device())


def _pack(number: float, type: str, size: int) -> bytes:
    return struct.pack("<f", number) if type == "f32" else (int(number) & (2 ** (8 * size) - 1)).to_bytes(size, "little")
