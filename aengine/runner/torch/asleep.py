"""`DeviceAdapters`: the adapters of a `TorchExecutor`, and which of them are on the device.

All that are loaded are in host memory. Those of a step's rows are copied to the slots of the device that were used longest ago.

What a device gives back while its models sleep, and how that comes back: KV pages, graphs, and weights on CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from aengine.api.errors import InsufficientMemoryError
from aengine.api.runtime import trim_heap
from aengine.layers.adapters import AdapterTable, PackedAdapter
from aengine.runner.contract import IntArray, Step
from aengine.runner.memory import check_addition, pinned_bytes
from aengine.runner.torch.device import give_back_memory, give_back_pinned_memory
from aengine.runner.torch.model import PagedTorchModel, TorchDraftModel
from aengine.scheduler.plan import NO_INTS


class DeviceAdapters:
    """All methods are called on the stream of the steps."""

    def __init__(self, table: AdapterTable) -> None:
        self.table = table
        self._packed: dict[int, PackedAdapter] = {}
        self._slots: dict[int, int] = {}  # by key, the one that was used longest ago first
        self._free = list(range(table.num_slots))

    def set(self, key: int, packed: PackedAdapter | None) -> None:
        """Lets steps have the adapter with this key from now on. None: they have it no more, and its slot is free."""
        if packed is not None:
            self._packed[key] = packed
            return
        del self._packed[key]
        if key in self._slots:
            self._free.append(self._slots.pop(key))

    def forget_slots(self) -> None:
        """Forgets which adapters are on the device, so that each is copied again at its next use. Slots may hold anything finite from now
        on."""
        self._slots.clear()
        self._free = list(range(self.table.num_slots))

    def begin(self, step: Step) -> None:
        """To be called before the forward pass of a step: puts its adapters in slots, of which there are enough, and notes the slot of each
        token."""
        self.table.on = len(step.adapters) > 0
        if not self.table.on:
            self.table.write_slots(NO_INTS)  # for graphs
            return
        keys, of_rows = np.unique(step.adapters, return_inverse=True)
        used = keys.tolist()
        slots = np.array([self._slot(key, used) for key in used], dtype=np.int32)
        self.table.write_slots(np.repeat(slots[of_rows], np.diff(step.layout.qo_indptr)))

    def _slot(self, key: int, used: Sequence[int]) -> int:
        """The slot of an adapter, copied to it if it is in none; `num_slots` for key 0, which is no adapter. Those in `used` stay."""
        if key == 0:
            return self.table.num_slots
        slot = self._slots.pop(key, None)
        if slot is None:
            if not self._free:
                self._free.append(self._slots.pop(next(other for other in self._slots if other not in used)))
            slot = self._free.pop()
            self.table.put_adapter(slot, self._packed[key])
        self._slots[key] = slot
        return slot


class Asleep:
    """Models without pages and graphs; on CUDA their weights are in host memory. To be called on the stream of the steps."""

    def __init__(
        self,
        models: Sequence[PagedTorchModel],
        draft: TorchDraftModel | None,
        adapters: DeviceAdapters | None,
        pages: IntArray,
        level: int,
        available: int,
    ) -> None:
        """The model, and that of the `draft` if there is one. Keeps the content of `pages` in host memory, of which there are `available`
        bytes; at `level` 2 not the model's weights. Raises InsufficientMemoryError if there is too little, and changes nothing then."""
        self._models = models
        self._draft = draft
        self._pages = pages
        self._device = models[0].backend.spec.device
        self._parts: list[Offloaded] = []
        weights = [model.model.weights for model in models]
        if self._device.type != "cpu":
            of_pages = len(pages) * sum(model.backend.bytes_per_page() for model in models)
            of_weights = _copied_bytes([tensor for each in weights[level - 1 :] for tensor in each])
            check_addition("what the device is to give back needs", of_pages + of_weights, available)
        with _needing_memory("in host memory for what the device is to give back"):
            self._content = [model.backend.read_pages(pages) for model in models]
            self._hidden = None if draft is None else draft.read_pages(pages)
            if self._device.type != "cpu":
                self._parts.append(Offloaded(weights[0], copied=level == 1))
                self._parts.append(Offloaded([each for others in weights[1:] for each in others], besides=weights[0]))
        if adapters is not None:
            adapters.forget_slots()
            self._parts.append(Offloaded(adapters.table.tensors, copied=False))
        self._free()

    def drop_weights(self) -> None:
        """Gives up the weights of the model. A draft model keeps its own in host memory."""
        if self._device.type == "cpu":
            self._parts.insert(0, Offloaded(self._models[0].model.weights, copied=False))
            self._free()
        else:
            self._drop_copies(self._parts[:1])

    def give_weights(self) -> None:
        """Allocates memory for the weights of the model, which were dropped. Raises InsufficientMemoryError, and sleeps on then."""
        with self._or_asleep():
            self._parts[0].restore()

    def wake(self, num_pages: int) -> None:
        """Restores everything but graphs: weights, `num_pages` KV pages, and what the kept ones held. Raises InsufficientMemoryError, and
        sleeps on then."""
        with self._or_asleep():
            for part in self._parts:
                part.restore()
            for model, content in zip(self._models, self._content, strict=True):
                model.backend.allocate(num_pages)
                model.backend.write_pages(self._pages, content)
            if self._draft is not None:
                self._draft.allocate(num_pages)
                self._draft.write_pages(self._pages, self._hidden)
        if self._device.type != "cpu":
            self._drop_copies(self._parts)

    def _drop_copies(self, parts: Sequence[Offloaded]) -> None:
        """Frees the copies that the parts have in pinned host memory, which torch's allocator would keep."""
        torch.cuda.current_stream(self._device).synchronize()  # what is copied from them is there
        for part in parts:
            part.drop_copies()
        give_back_pinned_memory(self._device)

    @contextmanager
    def _or_asleep(self) -> Iterator[None]:
        try:
            with _needing_memory("to wake"):
                yield
        except InsufficientMemoryError:
            self._free()
            raise

    def _free(self) -> None:
        for part in self._parts:
            part.free()
        for model in self._models:
            model.graphs = None
            model.backend.free()
        if self._draft is not None:
            self._draft.free()
        if self._device.type == "cpu":
            trim_heap()
        else:
            give_back_memory(self._device)


class Offloaded:
    """Tensors that have no memory once they are freed, until they are restored, and are what they were otherwise, as are views of them.
    Those in mapped files stay there."""

    def __init__(self, tensors: Sequence[Tensor], *, copied: bool = True, besides: Sequence[Tensor] = ()) -> None:
        """`copied`: what they hold is kept in host memory; else they are zeros afterwards. Leaves out what is memory of `besides`, too."""
        others = {tensor.untyped_storage().data_ptr() for tensor in besides}
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.untyped_storage().resizable()}
        own = [tensor for at, tensor in storages.items() if at not in others]
        self._bytes = [tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()) for tensor in own]
        self._sizes = [len(each) for each in self._bytes]
        self._copies = [torch.empty(len(each), dtype=torch.uint8, pin_memory=each.is_cuda).copy_(each) for each in self._bytes if copied]
        self._is_free = False

    def free(self) -> None:
        self._is_free = True
        for each in self._bytes:
            each.untyped_storage().resize_(0)

    def drop_copies(self) -> None:
        self._copies = []

    def restore(self) -> None:
        """Does nothing if they have their memory."""
        if not self._is_free:
            return
        for size, each in zip(self._sizes, self._bytes, strict=True):
            each.untyped_storage().resize_(size)
        for index, each in enumerate(self._bytes):
            if self._copies:
                each.copy_(self._copies[index], non_blocking=True)
            else:
                each.zero_()
        self._is_free = False


def _copied_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that copies of the tensors in pinned host memory take. Memory that several tensors share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(map(pinned_bytes, storages.values()))


@contextmanager
def _needing_memory(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise InsufficientMemoryError(f"there is too little memory {what}: {str(error).partition(chr(10))[0]}") from error
