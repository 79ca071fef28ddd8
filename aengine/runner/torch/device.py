"""The device that steps run on, its stream, its memory, and the threads of CPU operations. Knows nothing of models."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

from aengine.api.errors import ConfigError
from aengine.runner.contract import Device

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("aengine")
CUDA_DEVICE = pathlib.Path("/dev/nvidiactl")
_THREAD_SETTERS = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")


def find_device(name: str, local_index: int | None = None) -> Device:
    """That of `EngineConfig.device`, with its number if it is a CUDA device. Raises ConfigError if there is none.

    `local_index`: of one of several ranks, its number among those of its host. They have one device each, from the named one on, or from
    the first."""
    if name == "cpu" or (name == "auto" and sys.modules.get("torch") is None and not CUDA_DEVICE.exists()):
        return Device("cpu")
    import torch

    available = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if available else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return Device("cpu")
    if not available:
        raise ConfigError.of("device", f"{name!r} is not possible here: torch finds no CUDA device")
    if local_index is not None:
        device = torch.device("cuda", (device.index or 0) + local_index)
    if device.index is not None and device.index >= torch.cuda.device_count():
        wanted = repr(name) if local_index is None else f"{name!r} for rank {local_index} of a host"
        raise ConfigError.of("device", f"{wanted} is not possible here: there are {torch.cuda.device_count()} CUDA devices")
    return Device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def device_kind(device: torch.device) -> str:
    """What decides which of torch's kernels run there: its version, and the name of a GPU, or the instructions of a CPU."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {name}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device has no memory for what was to be done."""
    if sys.modules.get("torch") is None:
        return False
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def is_lost(error: BaseException) -> bool:
    """Whether a device fails."""
    if sys.modules.get("torch") is None:
        return False
    import torch

    return isinstance(error, torch.AcceleratorError)


class DeviceStream:
    """The one CUDA stream for all work of an executor; a CPU has none.

    Stream, device and inference mode belong to a thread, so each entry sets them and each exit sets them back. One stream makes it safe
    to write a buffer that earlier steps read, and to free a tensor that a step in flight uses: what reuses its memory runs later.
    """

    def __init__(self, device: torch.device, batch_invariant: bool = False) -> None:
        """`batch_invariant`: torch's sums are `BatchInvariance`'s."""
        import torch

        self._batch_invariant = batch_invariant
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_stream(self) -> AbstractContextManager[object]:
        import torch

        if self._stream is None:
            return torch.inference_mode()
        stack = ExitStack()
        stack.push(self._name_cause)
        stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.cuda.stream(self._stream))
        if self._batch_invariant:
            from aengine.layers.linear import BatchInvariance

            stack.enter_context(BatchInvariance())  # type: ignore[no-untyped-call]
        return stack

    def _name_cause(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises what the device has met with in place of an error of a library, which may know no more than that the device is lost."""
        import torch

        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            assert self._stream is not None
            self._stream.query()  # does not wait, unlike `finish`, for what other ranks may never do

    def finish(self) -> None:
        """Waits until everything on the stream has finished."""
        if self._stream is not None:
            self._stream.synchronize()


def free_cuda_memory(device: torch.device, utilization: float) -> int:
    """Bytes that `utilization` leaves beside what is in use already, by anyone."""
    import torch

    give_back_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free)


def give_back_memory(device: torch.device | Device) -> None:
    """Returns to the device what torch keeps of memory that nothing uses any more, of engines that were closed or did not load, too."""
    gc.collect()
    if device.type != "cpu":
        import torch

        torch.cuda.empty_cache()


def give_back_pinned_memory(device: torch.device) -> None:
    """Returns to the host the pinned memory that nothing uses any more, once the current stream has done what reads it."""
    import torch

    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()
        torch._C._host_emptyCache()


def used_cuda_memory(device: torch.device) -> int:
    """Bytes of a device that are in use, by anyone."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total - free


def cuda_kv_budget(device: torch.device, utilization: float, widest: Callable[[], object], graphs: Callable[[], int]) -> int:
    """Bytes that the KV cache may take: the `utilization` fraction of the device less weights, the widest step, graphs, and what other
    processes use.

    `widest` runs that step; `graphs` returns the bytes that all graphs will take, and keeps none itself.
    """
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    widest()
    torch.cuda.current_stream(device).synchronize()  # of the device it would be an error while another engine records graphs
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    ours = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    for_graphs = graphs()
    give_back_memory(device)
    return int(total * utilization) - others - ours - for_graphs


def set_thread_count(count: int) -> None:
    """CPU operations of torch that the calling thread runs use `count` threads from now on; other threads keep their number, unlike with
    `torch.set_num_threads`.

    torch uses OpenMP, which keeps this number per calling thread, and MKL, which keeps another one per calling thread. torch's own setter
    writes both for its caller, and also the numbers that other threads start with.
    """
    import torch

    torch.get_num_threads()  # the first use in a thread sets both numbers, later ones do not
    for setter in _thread_setters():
        setter(ctypes.c_int(count))
    if torch.get_num_threads() != count:
        _log.warning("operations of torch run on %d threads, not on %d: its OpenMP runtime was not found", torch.get_num_threads(), count)


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Operations of torch that this thread runs meanwhile use `count` threads."""
    import torch

    before = torch.get_num_threads()
    set_thread_count(count)
    try:
        yield
    finally:
        set_thread_count(before)


@functools.cache  # each handle of a library is a type of ctypes, which only a full garbage collection frees
def _thread_setters() -> tuple[Callable[[ctypes.c_int], object], ...]:
    """The symbols that torch itself uses: those of the process first, then those of its libraries. There may be no MKL."""
    import torch

    libraries = ctypes.PyDLL(None), ctypes.PyDLL(torch._C.__file__)
    found = (next((getattr(library, name) for library in libraries if hasattr(library, name)), None) for name in _THREAD_SETTERS)
    return tuple(setter for setter in found if setter is not None)
