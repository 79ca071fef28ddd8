"""A CUDA device without a GPU: tensors on it have shapes, dtypes and strides, but no numbers. Kernels of Triton are counted and not run.

A whole runner runs on it. That shows what does not depend on numbers: which kernels are launched, that the tensors of an operation are on
one device, that shapes do not depend on numbers, and that nothing makes the host wait. Tensors in host memory are real; what is copied to
them from the device is zeros.
"""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from aengine.runner.torch import capture

CUDA = torch.device("cuda", 0)
_TYPE_CUDA, _TYPE_META = 1, 14  # numbers of `c10::DeviceType`
_NO_KERNEL = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh", "set_"))
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_OPTIONS = frozenset(("num_warps", "num_stages", "enable_fp_fusion"))


class HostWaitError(AssertionError):
    """The host waits for the device, or would copy from memory that is not pinned."""


class FakeCuda:
    """`launches` are the names of kernels in their order: those of Triton, operations of torch (once each, though some take several
    kernels), and calls of `library`; a replay launches again what its graph has captured."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.replays = 0
        self.strict = False
        """Whether what makes the host wait raises HostWaitError. While a graph is captured it does so always."""
        self.capturing = False
        self._tensors = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: dict[int, Tensor] = {}  # by address; kept, so that no address is used again

    @contextmanager
    def active(self) -> Iterator[FakeCuda]:
        cuda = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda *_: (9, 0),
            "get_device_name": lambda *_: "fake",
            "get_device_properties": lambda *_: SimpleNamespace(
                name="fake", multi_processor_count=132, major=9, minor=0, total_memory=80 << 30, L2_cache_size=50 << 20
            ),
            "mem_get_info": lambda *_: (70 << 30, 80 << 30),
            "memory_reserved": lambda *_: 0,
            "max_memory_reserved": lambda *_: 1 << 30,
            "reset_peak_memory_stats": lambda *_: None,
            "empty_cache": lambda: None,
            "synchronize": lambda *_: torch.cuda.Stream().synchronize(),
            "Event": type("Event", (_Event,), {"fake": self}),
            "Stream": type("Stream", (_Stream,), {"fake": self}),
            "current_stream": lambda *_: torch.cuda.Stream(),
            "stream": lambda _: ExitStack(),
            "set_sync_debug_mode": lambda mode: setattr(self, "strict", mode == "error"),
            "get_sync_debug_mode": lambda: 2 if self.strict else 0,
            "_sleep": lambda cycles: None,  # nothing is done before it is waited for, anyway
            "graph_pool_handle": lambda: (0, 0),
            "CUDAGraph": type("CUDAGraph", (_Graph,), {"fake": self}),
        }
        from triton.runtime.jit import KernelInterface  # here, once tests have said whether Triton interprets

        _device_constructors()  # the functions that obey `with torch.device(...)`, which torch keeps from its first look: not `_tensor`
        with ExitStack() as stack:
            for name, value in cuda.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            stack.enter_context(mock.patch.object(torch._C, "_host_emptyCache", create=True))
            stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
            stack.enter_context(mock.patch.object(torch, "tensor", _tensor))
            stack.enter_context(mock.patch.object(capture, "_borrowed", lambda tensor: tensor))  # there is no memory
            stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))  # nor a driver
            stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", self._launcher()))
            stack.enter_context(_device_guard())
            stack.enter_context(self.in_this_thread())
            yield self

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """While the device is active: operations of another thread find it, too."""
        with self._tensors, _Operations(self):
            yield

    def library(self) -> Any:
        """A FlashInfer whose functions are launches; the `run` of a wrapper is two, of which the second combines splits."""
        fake = self

        class Wrapper:
            def __init__(self, **_: Any) -> None: ...

            def plan(self, **_: Any) -> None: ...

            def reset_workspace_buffer(self, **_: Any) -> None: ...

            def run(self, **_: Any) -> None:
                fake.launches += ["attention", "merge_states"]

        class Library:
            __version__ = "0.6.18.post1"
            BatchDecodeWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper = Wrapper

            def __getattr__(self, name: str) -> Callable[..., None]:
                return lambda **_: fake.launches.append(name)

        return Library()

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def pinned(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _wait(self, what: str) -> None:
        if self.strict or self.capturing:
            raise HostWaitError(what)

    # What a device with numbers does beside: here there are none.

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation of torch, which is no view. `result`: of tensors without numbers."""

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A kernel of Triton."""

    def upload(self, source: Tensor, target: Tensor, waits: bool) -> None:
        """From memory of the host."""

    def download(self, source: Tensor, target: Tensor, waits: bool) -> None:
        """To memory of the host."""
        target.zero_()

    def read_number(self, tensor: Tensor) -> Any:
        return 0

    def mark(self) -> int:
        """A place in the order of all that was given to the device so far."""
        return 0

    def finish(self, mark: int | None = None) -> None:
        """The host waits for what was given until then, or for everything."""

    def begin_capture(self) -> None: ...

    def end_capture(self) -> Any:
        """What was given since `begin_capture`."""

    def replay(self, captured: Any) -> None: ...

    def _launcher(self) -> Callable[[Any, Any], Callable[..., None]]:
        def of(kernel: Any, grid: Any) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                constants = {name: value for name, value in options.items() if name not in _OPTIONS}
                inspect.signature(kernel.fn).bind(*args, **constants)
                for tensor in filter(torch.is_tensor, [*args, *options.values()]):
                    assert tensor.device == CUDA, f"{kernel.fn.__name__} is given a tensor in host memory"
                assert all(isinstance(size, int) and size > 0 for size in grid), f"{kernel.fn.__name__} has the grid {grid}"
                self.launches.append(kernel.fn.__name__)
                self.launch(kernel, grid, args, options)

            return launch

        return of


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if func.namespace != "aten":
            return func(*args, **kwargs)
        if name not in ("pin_memory", "is_pinned") and func.has_kernel_for_dispatch_key(_COMPOSITE):
            with self:  # one that consists of others, which inference mode does not take apart
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        device = kwargs.get("device")
        if len(on_host) == len(tensors) and (device is None or torch.device(device).type == "cpu"):
            return self._on_host(func, name, args, kwargs)
        if name in ("_to_copy", "copy_") and (on_host or (device is not None and torch.device(device).type == "cpu")):
            return self._copied(func, name, args, kwargs)
        if name == "_local_scalar_dense":
            self._fake._wait("a number is read")
            return self._fake.read_number(args[0])
        for tensor in on_host:
            if tensor.dim():
                self._fake._wait(f"{name} is given a tensor of shape {list(tensor.shape)} in host memory")
        result = func(*args, **kwargs)
        if name not in _NO_KERNEL and (func._schema.is_mutable or not _is_view(result, tensors)):
            self._fake.launches.append(name)
            self._fake.compute(func, args, kwargs, result)
        return result

    def _on_host(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "is_pinned":
            return self._fake.is_pinned(args[0])
        pins = name in ("pin_memory", "_pin_memory")
        pinned = kwargs.pop("pin_memory", False) or pins
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            result = args[0].clone() if pins else func(*args, **kwargs)
        return self._fake.pinned(result) if pinned else result

    def _copied(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Between host and device."""
        target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        host = source if isinstance(target, FakeTensor) or (target is None and not isinstance(source, FakeTensor)) else target
        if source.numel() and (waits or host is None or not self._fake.is_pinned(host)):
            self._fake._wait(f"{list(source.shape)} numbers are copied {'to' if host is source else 'from'} the device")
        dtype = kwargs.get("dtype") or source.dtype
        if host is source:
            on_device = torch.empty(source.shape, dtype=dtype, device=CUDA) if target is None else target
            self._fake.upload(source, on_device, waits)
            return on_device
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            on_host = torch.empty(source.shape, dtype=dtype) if target is None else target
            self._fake.download(source, on_host, waits)
            return on_host


class _Event:
    """Waiting for one is how a host waits for what it needs, so that is no mistake."""

    fake: FakeCuda

    def __init__(self, **_: Any) -> None:
        self._mark = 0

    def record(self, *_: Any) -> None:
        self._mark = self.fake.mark()

    def synchronize(self) -> None:
        self.fake.finish(self._mark)

    def query(self) -> bool:
        self.fake.finish(self._mark)
        return True


class _Stream:
    fake: FakeCuda
    device = CUDA
    cuda_stream = 0

    def __init__(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        self.fake._wait("the host waits for all work")
        self.fake.finish()

    def wait_event(self, event: Any) -> None: ...


class _Graph:
    fake: FakeCuda

    def __init__(self, **_: Any) -> None: ...

    def capture_begin(self, **_: Any) -> None:
        self.fake.capturing = True
        self._before, self.fake.launches = self.fake.launches, []
        self.fake.begin_capture()

    def capture_end(self) -> None:
        self.fake.capturing = False
        self._captured, self.fake.launches = self.fake.launches, self._before
        self._work = self.fake.end_capture()

    def replay(self) -> None:
        self.fake.replays += 1
        self.fake.launches += self._captured
        self.fake.replay(self._work)


_made = torch.tensor


def _tensor(data: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
    """`torch.tensor`, which copies to the device out of sight of dispatch modes."""
    made = _made(data, **options)
    return made if device is None else made.to(device)


class _Generator(torch.Generator):
    """Of the host: there is none of the device."""

    def __new__(cls, *_: Any) -> _Generator:
        return super().__new__(cls)


def _is_view(result: Any, tensors: list[Tensor]) -> bool:
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    given = {tensor.untyped_storage()._cdata for tensor in tensors}
    return bool(made) and all(tensor.untyped_storage()._cdata in given for tensor in made)


@contextmanager
def _device_guard() -> Iterator[None]:
    """Torch indexes no tensor of a CUDA device without a guard of such devices. Builds for CPUs have none, and that of CUDA builds needs a
    driver; that of meta does."""
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = (ctypes.c_void_p * (_TYPE_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_TYPE_CUDA]
    guards[_TYPE_CUDA] = guards[_TYPE_META]
    try:
        yield
    finally:
        guards[_TYPE_CUDA] = before
