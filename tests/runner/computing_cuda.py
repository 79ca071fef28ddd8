"""A CUDA device without a GPU, and with numbers: Triton's kernels are executed from their PTX, what torch computes is computed on the CPU.

Each storage of the fake device has memory in an arena, where addresses out of bounds, reads of what was never written and uses of what was
freed are faults. The device does nothing until the host waits for it: whoever reads a result too early, or writes again to memory that is
still to be copied, gets wrong numbers each time. For processes in which Triton compiles, and does not interpret.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from fake_cuda import CUDA, FakeCuda
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tools.ptx.memory import WRITTEN, DeviceMemory
from tools.ptx.triton_launches import Launches, compile_for

Work = Callable[[], None]
_UNWRITTEN_BYTE = 0xFF  # not a number in every floating type, and no index


class _Memory:
    """Of one storage of the device: bytes in the arena."""

    def __init__(self, memory: DeviceMemory, size: int) -> None:
        self.address, self.size = memory.allocate(size), size
        data, state = memory.bytes_at(self.address, size)
        data[:] = _UNWRITTEN_BYTE
        with torch.inference_mode(False), _disable_current_modes():
            self.data, self.state = torch.from_numpy(data), torch.from_numpy(state)
        weakref.finalize(self, memory.free, self.address, size)

    def tensor(self, like: Tensor) -> Tensor:
        """As `like` sees it. Keeps this memory."""
        tensor = self._strided(self.data, like)
        tensor.memory = self  # type: ignore[attr-defined]
        return tensor

    def set_written(self, like: Tensor) -> None:
        size = like.element_size()
        as_number = int.from_bytes(bytes([WRITTEN]) * size, "little")
        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        self._strided(self.state, like, dtype).fill_(as_number)

    @staticmethod
    def _strided(data: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            whole = torch.empty(0, dtype=dtype or like.dtype)
            return whole.set_(data.untyped_storage(), like.storage_offset(), like.size(), like.stride())


def _wide_product(x: Tensor, matrix: Tensor) -> Tensor:
    return x.float() @ matrix.float()


class ComputingCuda(FakeCuda):
    """`kernels`: those that were compiled, and what of them was executed."""

    def __init__(self) -> None:
        super().__init__()
        self._arena = DeviceMemory()
        self.kernels = Launches()
        self._work: deque[Work] = deque()
        self._given = self._done = 0
        self._recording: list[Work] | None = None
        self._lock = threading.RLock()
        compile_for(90)

    def memory(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        found: _Memory | None = getattr(storage, "memory", None)
        if found is None or found.size < storage.nbytes():
            found = storage.memory = _Memory(self._arena, storage.nbytes())  # type: ignore[attr-defined]
        return found

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        if func is torch.ops.aten.mm.dtype:  # which a CPU has not
            func, args = _wide_product, args[:2]
        args, kwargs = tree_map(self._number_or_memory, (args, kwargs))
        if func is not _wide_product and func._schema.is_mutable:
            changed = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
            self._do(lambda: func(*args, **kwargs), changed)
            return
        makes_device = not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
        targets = [self.memory(leaf).tensor(leaf) for leaf in tree_leaves(result)]

        def work() -> None:
            if makes_device:
                kwargs["device"] = torch.device("cpu")
            for target, made in zip(targets, tree_leaves(func(*args, **kwargs)), strict=True):
                target.copy_(made)

        self._do(work, tree_leaves(result))

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        addresses: dict[int, int] = {}
        kept: list[Tensor] = []

        def placed(value: Any) -> Any:
            if not isinstance(value, FakeTensor):
                return value
            memory = self.memory(value)
            tensor = memory.tensor(value)
            addresses[id(tensor)] = memory.address + value.storage_offset() * value.element_size()
            kept.append(tensor)
            return tensor

        with _disable_current_modes():  # type: ignore[no-untyped-call]
            args, options = tree_map(placed, (args, options))
            launch = self.kernels.compiled(kernel, grid, args, options, lambda tensor: addresses[id(tensor)])

        def work() -> None:
            assert len(kept) == len(addresses)  # this holds their memory, for replays too
            launch(self._arena, False)

        self._do(work, ())

    def give(self, work: Callable[[DeviceMemory], None], kept: Any) -> None:
        """What a library launches or copies. `kept`: until then."""

        def run() -> None:
            assert kept is not None
            work(self._arena)

        self._do(run, ())

    def pinned_at(self, address: int) -> Tensor | None:
        """The pinned memory of the host there."""
        for begin, tensor in list(self._pinned.items()):
            if begin <= address < begin + tensor.untyped_storage().nbytes():
                return tensor
        return None

    def upload(self, source: Tensor, target: Tensor, waits: bool) -> None:
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            given = source.clone() if waits else source
        memory = self.memory(target).tensor(target)
        self._do(lambda: memory.copy_(given), (target,))
        if waits:
            self.finish()

    def download(self, source: Tensor, target: Tensor, waits: bool) -> None:
        memory = self.memory(source).tensor(source)
        self._do(lambda: target.copy_(memory), ())
        if waits:
            self.finish()

    def read_number(self, tensor: Tensor) -> Any:
        self.finish()
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            return self.memory(tensor).tensor(tensor).item()

    def mark(self) -> int:
        return self._given

    def finish(self, mark: int | None = None) -> None:
        with self._lock:
            mark = self._given if mark is None else mark
            with torch.inference_mode(), _disable_current_modes():  # type: ignore[no-untyped-call]
                while self._done < mark:
                    self._done += 1  # a fault is told once, and what comes behind it goes on
                    self._work.popleft()()

    def begin_capture(self) -> None:
        self._recording = []

    def end_capture(self) -> list[Work]:
        recording, self._recording = self._recording, None
        assert recording is not None
        return recording

    def replay(self, captured: list[Work]) -> None:
        for work in captured:
            self._give(work)

    @contextmanager
    def in_all_threads(self) -> Iterator[None]:
        """Active for the whole process, as a real device is."""
        bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

        def with_device(thread: threading.Thread) -> None:
            with self.in_this_thread():
                bootstrap(thread)

        with self.active(), mock.patch.object(threading.Thread, "_bootstrap_inner", with_device), mock.patch.object(Tensor, "cuda", _cuda):
            yield

    def _number_or_memory(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return self.memory(value).tensor(value)
        if isinstance(value, Tensor):
            with _disable_current_modes():  # type: ignore[no-untyped-call]
                return value.clone()  # a number in host memory
        return value

    def _do(self, work: Work, written: Any) -> None:
        """`written`: tensors of the device that are whole behind it."""
        memories = [(self.memory(one), one) for one in written]

        def work_and_note() -> None:
            work()
            for memory, one in memories:
                memory.set_written(one)

        if self._recording is None:
            self._give(work_and_note)
        else:
            self._recording.append(work_and_note)

    def _give(self, work: Work) -> None:
        with self._lock:
            self._work.append(work)
            self._given += 1


def _cuda(tensor: Tensor, device: Any = CUDA, non_blocking: bool = False) -> Tensor:
    return tensor.to(CUDA, non_blocking=non_blocking)
