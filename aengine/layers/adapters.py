"""`AdapterTable`: the adapters that a device holds, and what they add to the results of linear layers.

Memory is that of a fixed number of slots, each with room for one adapter, so that graphs can be recorded before there is any. Knows nothing
of models, files or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.kernels.arrays import to_device
from aengine.kernels.params import AdapterMatrices, TokenSlots
from aengine.layers.ops import Activations


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What an adapter changes of a parameter: out_features rows in parts, each with low-rank matrices of its own."""

    in_features: int  # of an embedding its vocabulary
    bounds: tuple[int, ...]  # [parts + 1], ascending from 0: the rows of each part

    @property
    def num_parts(self) -> int:
        return len(self.bounds) - 1

    @property
    def size(self) -> int:
        """Numbers for one rank of an adapter."""
        return self.num_parts * self.in_features + self.bounds[-1]


class AdapterOps(Protocol):
    """The product with low-rank matrices. Results depend on shapes that a graph can hold, and on nothing that the host must wait for."""

    def grouped(self, slots: Tensor, num_slots: int) -> TokenSlots:
        """Prepares the slots [T] int32 of tokens for `shrink` and `expand`. `num_slots` stands for no adapter."""

    def shrink(self, x: Tensor, matrices: AdapterMatrices, tokens: TokenSlots) -> Tensor:
        """Activations [T, in_features] times `a` of each token's slot: [n, T, low_rank * parts], to be added over n. What a token without
        an adapter gets, or a rank that does not count, may be anything."""

    def expand(self, out: Tensor, inner: Tensor, matrices: AdapterMatrices, tokens: TokenSlots) -> None:
        """Adds what `shrink` made, times `b` of each token's slot, to [T, out_features]; nothing for tokens without an adapter."""


class TorchAdapterOps:
    """`AdapterOps` in plain torch, the reference: each token is multiplied with the matrices of all slots."""

    def grouped(self, slots: Tensor, num_slots: int) -> TokenSlots:
        return slots.long()

    def shrink(self, x: Tensor, matrices: AdapterMatrices, tokens: TokenSlots) -> Tensor:
        assert isinstance(tokens, Tensor)
        of_slots = torch.matmul(x, matrices.a.flatten(1, 2).transpose(1, 2))
        own = tokens.clamp(max=len(of_slots) - 1).view(1, -1, 1)
        return of_slots.gather(0, own.expand(1, *of_slots.shape[1:]))

    def expand(self, out: Tensor, inner: Tensor, matrices: AdapterMatrices, tokens: TokenSlots) -> None:
        assert isinstance(tokens, Tensor)
        num_slots, low_rank, _ = matrices.b.shape
        slots, ranks = (torch.arange(count, device=out.device) for count in (num_slots, low_rank))
        counts = (tokens.view(-1, 1, 1) == slots.view(-1, 1)) & (ranks < matrices.ranks.view(-1, 1))  # [T, slots, low_rank]
        by_part = inner.sum(0).to(out.dtype).view(len(out), 1, low_rank, len(matrices.bounds) - 1)
        for part, (first, stop) in enumerate(pairwise(matrices.bounds)):
            of_slots = torch.where(counts, by_part[..., part], 0.0).flatten(1)
            out[:, first:stop] += of_slots @ matrices.b[:, :, first:stop].flatten(0, 1)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory, pinned for CUDA."""

    ranks: Tensor  # [parameters of the table] int32
    matrices: Mapping[str, tuple[Tensor, Tensor]]  # [rank, parts, in_features] and [rank, out_features]


class AdapterTable:
    """All methods but `pack` belong to the thread and the stream of the steps."""

    def __init__(
        self,
        shapes: Mapping[str, AdapterShape],
        num_slots: int,
        low_rank: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: AdapterOps,
    ) -> None:
        """`shapes`: by the name of a parameter without `.weight`. `low_rank`: the most of an adapter. `max_tokens`: of a step, padded."""
        self.num_slots = num_slots
        self.on = True
        """Whether a forward pass looks for adapters; to be False only where no token has one, and the pass is not recorded."""
        self._shapes = shapes
        self._dtype = dtype
        self._pinned = device.type == "cuda"
        self._ops = ops
        self._ranks = torch.zeros(len(shapes), num_slots, dtype=torch.int32, device=device)
        self._matrices = {
            name: AdapterMatrices(
                a=torch.zeros(num_slots, low_rank, shape.num_parts, shape.in_features, dtype=dtype, device=device),
                b=torch.zeros(num_slots, low_rank, shape.bounds[-1], dtype=dtype, device=device),
                ranks=ranks,
                bounds=shape.bounds,
                device_bounds=torch.tensor(shape.bounds, dtype=torch.int32, device=device),
            )
            for (name, shape), ranks in zip(shapes.items(), self._ranks, strict=True)
        }
        self._written = np.full(max_tokens, num_slots, dtype=np.int32)
        self._slots = to_device(self._written.copy(), device)
        self._tokens: TokenSlots | None = None  # of the forward pass

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all slots on the device: `a` and `b` of each parameter."""
        return [tensor for matrices in self._matrices.values() for tensor in (matrices.a, matrices.b)]

    def pack(self, parts: Mapping[str, Mapping[range, tuple[Tensor, Tensor]]]) -> PackedAdapter:
        """An adapter that changes rows of parameters: by name, the rows of a part and their matrices [r, in_features] and [rows, r]. May be
        called from any thread."""
        ranks = torch.zeros(len(self._shapes), dtype=torch.int32, pin_memory=self._pinned)
        packed = {}
        for index, (name, shape) in enumerate(self._shapes.items()):
            changed = parts.get(name)
            if changed:
                rank = max(len(a) for a, _ in changed.values())
                packed[name] = self._packed(shape, rank, changed)
                ranks[index] = rank
        return PackedAdapter(ranks, packed)

    def _packed(self, shape: AdapterShape, rank: int, changed: Mapping[range, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        all_a = torch.zeros(rank, shape.num_parts, shape.in_features, dtype=self._dtype, pin_memory=self._pinned)
        all_b = torch.zeros(rank, shape.bounds[-1], dtype=self._dtype, pin_memory=self._pinned)
        for rows, (a, b) in changed.items():
            part = next(part for part, stop in enumerate(shape.bounds[1:]) if rows.start < stop)
            assert rows.stop <= shape.bounds[part + 1], "within one part"
            all_a[: len(a), part].copy_(a)
            all_b[: len(a), rows.start : rows.stop].copy_(b.t())
        return all_a, all_b

    def put_adapter(self, slot: int, packed: PackedAdapter) -> None:
        """Steps from now on find the adapter in `slot`."""
        self._ranks[:, slot].copy_(packed.ranks, non_blocking=True)
        for name, (a, b) in packed.matrices.items():
            matrices = self._matrices[name]
            matrices.a[slot, : len(a)].copy_(a, non_blocking=True)
            matrices.b[slot, : len(b)].copy_(b, non_blocking=True)

    def write_slots(self, slots: NDArray[np.int32]) -> None:
        """Sets the slots [T] int32 of the tokens of the next forward pass, `num_slots` for a token without an adapter. Tokens behind these
        T have none."""
        padded = np.full_like(self._written, self.num_slots)
        padded[: len(slots)] = slots
        if not np.array_equal(padded, self._written):
            self._written = padded
            self._slots.copy_(to_device(padded, self._slots.device), non_blocking=True)

    def begin(self, num_tokens: int) -> None:
        """A forward pass of so many tokens begins."""
        self._tokens = self._ops.grouped(self._slots[:num_tokens], self.num_slots) if self.on else None

    def linear(self, name: str, linear: Callable[[Activations], Tensor]) -> Callable[[Activations], Tensor]:
        """A linear layer of all tokens of a forward pass, with what adapters add to it."""
        if name not in self._matrices:
            return linear

        def adapted(x: Activations) -> Tensor:
            assert isinstance(x, Tensor)
            return self.add_products(name, linear(x), x)

        return adapted

    def add_products(self, name: str, out: Tensor, x: Tensor, indices: Tensor | None = None) -> Tensor:
        """What adapters add to the product `out` [n, out_features] of x [n, in_features], which is overwritten. `indices` [n]: the tokens
        of the forward pass that these are; None: all."""
        if self._tokens is not None:
            matrices = self._matrices[name]
            tokens = self._tokens if indices is None else self._ops.grouped(self._slots.index_select(0, indices), self.num_slots)
            self._ops.expand(out, self._ops.shrink(x, matrices, tokens), matrices, tokens)
        return out

    def add_embedded(self, out: Tensor, ids: Tensor) -> Tensor:
        """What adapters add to the embeddings [T, hidden_size] of ids [T], which is overwritten."""
        if self._tokens is not None:
            matrices = self._matrices["embedding"]
            slots = self._slots[: len(ids)].clamp(max=self.num_slots - 1).long()
            inner = matrices.a[slots, :, 0, ids.long()].float()
            self._ops.expand(out, inner.unsqueeze(0), matrices, self._tokens)
        return out
