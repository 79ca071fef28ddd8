"""What a device gives back while its models sleep, and how that comes back: KV pages, graphs, and weights on CUDA."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from aengine.errors import InsufficientMemoryError
from aengine.runner.base import IntArray
from aengine.runner.device_draft import DeviceDraft
from aengine.runner.device_model import DeviceModel
from aengine.runner.memory import trim_heap


class Asleep:
    """Models without pages and graphs; on CUDA their weights are in host memory. To be called on the stream of the steps."""

    def __init__(self, models: Sequence[DeviceModel], draft: DeviceDraft | None, pages: IntArray) -> None:
        """Keeps the content of `pages` in host memory. Raises InsufficientMemoryError if there is too little, and changes nothing then."""
        self._models = models
        self._draft = draft
        self._pages = pages
        self._device = models[0].backend.spec.device
        with _needing_memory("in host memory, for what the device is to give back"):
            self._content = [model.backend.read_pages(pages) for model in models]
            self._hidden = None if draft is None else draft.read_pages(pages)
            self._weights = None if self._device.type == "cpu" else Offloaded([model.model.weights for model in models])
        self._free()

    def wake(self, num_pages: int) -> None:
        """Without graphs. Raises InsufficientMemoryError, and sleeps on then."""
        try:
            with _needing_memory("to wake"):
                if self._weights is not None:
                    self._weights.restore()
                for model, content in zip(self._models, self._content, strict=True):
                    model.backend.allocate(num_pages)
                    model.backend.write_pages(self._pages, content)
                if self._draft is not None:
                    self._draft.allocate(num_pages)
                    self._draft.write_pages(self._pages, self._hidden)
        except InsufficientMemoryError:
            self._free()
            raise

    def _free(self) -> None:
        if self._weights is not None:
            self._weights.free()
        for model in self._models:
            model.graphs = None
            model.backend.free()
        if self._draft is not None:
            self._draft.free()
        gc.collect()  # graphs in pieces refer to themselves
        if self._device.type == "cpu":
            trim_heap()
        else:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()


class Offloaded:
    """A copy in host memory of tensors. Once freed, the tensors and views of them are what they were, but have no memory until they are
    restored."""

    def __init__(self, holders: object) -> None:
        """Of all tensors that `holders` are or hold, as of `tensors_of`."""
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_of(holders) if tensor.untyped_storage().nbytes()}
        self._bytes = [tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()) for tensor in storages.values()]
        self._copies = [torch.empty(len(each), dtype=torch.uint8, pin_memory=each.is_cuda).copy_(each) for each in self._bytes]

    def free(self) -> None:
        for each in self._bytes:
            each.untyped_storage().resize_(0)

    def restore(self) -> None:
        for copy, each in zip(self._copies, self._bytes, strict=True):
            each.untyped_storage().resize_(len(copy))
            each.copy_(copy, non_blocking=True)


def tensors_of(value: object) -> Iterator[Tensor]:
    """The tensors that an object is or holds, in sequences, mappings, and attributes of our own classes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)
    elif type(value).__module__.startswith("aengine."):
        for name in getattr(value, "__slots__", ()) or vars(value):
            yield from tensors_of(getattr(value, name))


@contextmanager
def _needing_memory(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise InsufficientMemoryError(f"there is too little memory {what}: {str(error).partition(chr(10))[0]}") from error
