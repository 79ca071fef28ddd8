"""Where new weights of a running model come from, beside directories and named tensors in process: memory that a trainer shares, and a
group of torch.distributed.

Torch and safetensors are imported where they are used.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

NamedTensors: TypeAlias = "Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"
"""Tensors on any device, under the names that a checkpoint of the model has."""

_SHARED = pathlib.Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Weights in shared memory of this host: a safetensors file in /dev/shm, which any process writes with `SharedWeights(name).write`."""

    name: str  # of letters, digits, '.', '_' and '-'

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{1,200}", self.name, re.ASCII) or self.name.strip(".") == "":
            raise ValueError(f"name {self.name!r} is not one of 1 to 200 letters, digits, '.', '_' and '-'")

    @property
    def path(self) -> pathlib.Path:
        return _SHARED / self.name

    def write(self, tensors: NamedTensors) -> None:
        """Replaces what is there once all tensors are written, so nobody ever reads a part of them."""
        from safetensors.torch import save_file

        unfinished = _SHARED / f"{self.name}.unfinished"
        every = dict(tensors.items() if isinstance(tensors, Mapping) else tensors)
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in every.items()}, unfinished)
            unfinished.rename(self.path)
        finally:
            unfinished.unlink(missing_ok=True)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, eq=False)
class GroupWeights:
    """Weights that another process of a torch.distributed group sends with `send_weights`. The process of the engine is a member."""

    group: ProcessGroup | None = None  # None: the default group
    source_rank: int = 0  # of the sender, in the group
    timeout: float = 60.0  # seconds for each tensor

    def receive(self, engine_device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the sender, on the CPU. Raises ModelLoadError when the sender is gone, or too slow; then the group is of no more
        use."""
        import torch

        device = _device_of(self.group, engine_device)
        try:
            size = torch.empty(1, dtype=torch.int64, device=device)
            self._receive(size)
            header = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
            self._receive(header)
            for name, dtype, shape in json.loads(header.cpu().numpy().tobytes()):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                self._receive(tensor)
                yield name, tensor.cpu()
        except RuntimeError as error:
            raise ModelLoadError(f"rank {self.source_rank} of the group sent no weights: {_first_line(error)}") from error

    def _receive(self, tensor: Tensor) -> None:
        _broadcast(tensor, self.group, self.source_rank, self.timeout)


WeightSource: TypeAlias = "str | os.PathLike[str] | NamedTensors | SharedWeights | GroupWeights"
"""What `AsyncEngine.update_weights` takes."""


def send_weights(tensors: NamedTensors, group: ProcessGroup | None = None, timeout: float = 60.0) -> None:
    """Sends named tensors to all other members of a torch.distributed group, each of which receives them with `GroupWeights`. They are all
    read before the first is sent. Raises RuntimeError when a member is gone, or too slow."""
    import torch
    import torch.distributed as dist

    every = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    header = json.dumps([[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in every]).encode()
    rank, device = dist.get_rank(group), _device_of(group)
    listed = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for tensor in (torch.tensor([len(header)]), listed, *(tensor for _, tensor in every)):
        _broadcast(tensor.detach().to(device).contiguous(), group, rank, timeout)


def _broadcast(tensor: Tensor, group: ProcessGroup | None, rank: int, timeout: float) -> None:
    import torch.distributed as dist

    work: Any = dist.broadcast(tensor, group=group, async_op=True, group_src=rank)
    work.wait(timedelta(seconds=timeout))


def _device_of(group: ProcessGroup | None, engine_device: torch.device | None = None) -> torch.device:
    """That this process sends from or receives on: for NCCL the one that the group is bound to, else that of the engine, else the current
    one of the calling thread, which has the first unless it has chosen another."""
    import torch
    import torch.distributed as dist

    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    bound = (group or dist.group.WORLD).bound_device_id  # type: ignore[union-attr]
    if bound is None and engine_device is not None and engine_device.type == "cuda":
        bound = engine_device
    return bound or torch.device("cuda", torch.cuda.current_device())


def _first_line(error: BaseException) -> str:
    with contextlib.suppress(IndexError):
        return str(error).splitlines()[0][:200]
    return type(error).__name__
