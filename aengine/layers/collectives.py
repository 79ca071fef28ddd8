"""The process groups of `Collectives`, made directly: torch's default group, which is the process's, is not touched.

On CUDA (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp of torch 2.11 to 2.13, src/init.cc of NCCL, and its guide, "Using NCCL with CUDA
Graphs"; of the tests, those on a GPU have one rank):

- A communicator cannot be set up while a stream is captured, so it is connected when the group is made.
- Collectives without `asyncOp` run on the current stream, and return no work to wait for.
- A collective is recorded on all ranks or on none, and all ranks launch their graphs and collectives in the same order, on one stream.
- Aborting a communicator first ends the kernels that wait for other ranks, and then waits until no graph refers to it. So graphs are
  destroyed before it, and a thread that is not to wait has another one abort it. Destroying it would wait for the other ranks, too.
- torch's watchdog would end the whole process, which is the user's, when an error of CUDA or of NCCL comes up in a collective. A group that
  is made with TORCH_NCCL_BLOCKING_WAIT has none. The variable's other effect is on works that are waited for, and there are none. Ranks
  that are gone or hang are noticed elsewhere.
- Kernels of torch's symmetric memory, which are faster for few tokens, cannot be aborted: with another rank gone they would keep the
  device of this process busy for ever. NCCL can be.

`Collectives`: what the ranks of a stage exchange between the operations of the torch decoder, and `RowParallel`, where they do.

All ranks call the same ones in the same order, with activations of the same number of rows. Knows nothing of models or processes.

`ExpertExchange`: tokens on their way to the replicas that hold their experts, and back.

All replicas call the same methods in the same order, those without tokens, too. Knows nothing of routers or of what an expert is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, cast

from aengine.parallel.shard import Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup, Work


_NEVER = timedelta(days=365)
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def gloo_group(store: Store, index: int, size: int, timeout: timedelta, host: str) -> ProcessGroup:
    """Makes the Gloo group of `size` ranks on CPUs. `host` is that of the store: the other ranks reach this one by the address from which
    it reaches that."""
    from torch.distributed import ProcessGroup, ProcessGroupGloo

    family = socket.getaddrinfo(host, None)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address = probe.getsockname()[0]
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return cast(ProcessGroup, ProcessGroupGloo(store, index, size, options))  # it has the same methods


def nccl_group(store: Store, index: int, size: int, device: torch.device) -> ProcessGroup:
    """Makes the NCCL group of `size` ranks on CUDA devices, one each. Waits for the other ranks."""
    from torch.distributed import (
        ProcessGroup,
        ProcessGroupNCCL,  # not every torch has it
    )

    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    options.config.blocking = 1
    with _no_watchdog():
        group = ProcessGroupNCCL(store, index, size, options)
    group.eager_connect_single_device(device)
    return cast(ProcessGroup, group)


@contextmanager
def _no_watchdog() -> Iterator[None]:
    """NCCL groups that are made meanwhile get no watchdog; later ones, which may be the user's, have one again."""
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


class CollectiveError(Exception):
    """What came of waiting for other ranks."""

    @property
    def timed_out(self) -> bool:
        return "timed out" in str(self).lower()  # gloo's errors have no other mark


class Collectives:
    """On CUDA they are operations of the current stream, which a graph may record, and the host does not wait for them."""

    def __init__(self, shard: Shard, group: ProcessGroup) -> None:
        """`group` has the ranks of the shard's stage. All methods raise CollectiveError."""
        from torch._C._distributed_c10d import (
            AllgatherOptions,
            AllreduceOptions,
            AllToAllOptions,
            BroadcastOptions,
        )  # not every torch has it

        self.shard = shard
        self._group = group
        self._all_gather_options, self._all_reduce_options, self._broadcast_options = (
            AllgatherOptions(),
            AllreduceOptions(),
            BroadcastOptions(),
        )
        self._all_to_all_options = AllToAllOptions()
        for options in (self._all_gather_options, self._all_reduce_options, self._broadcast_options, self._all_to_all_options):
            options.asyncOp = False  # else NCCL uses a stream of its own, which costs two events for each collective
        self._broadcast_options.rootRank = 0

    def gathered(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """[T, columns of this rank] -> [T, columns of all ranks], a new tensor. `bounds` [size + 1] say where those of each rank begin."""
        import torch
        import torch.nn.functional as F

        widths = [end - begin for begin, end in pairwise(bounds)]
        most = max(widths)
        padded = x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1]))
        return torch.cat([part[:, :width] for part, width in zip(self.stacked(padded), widths, strict=True)], -1)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in the dtype of `x`, which is given up; the same bits on all ranks.

        On a CPU the sum is of float32, in the order of the ranks. On CUDA the order is NCCL's, the same for the same shapes: each element
        is summed once, and then sent to all ranks."""
        if x.is_cuda:
            x = x.contiguous()
            if x.numel():
                self._run(lambda: self._group.allreduce([x], self._all_reduce_options))
            return x
        parts = self.stacked(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def stacked(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: `x` of all ranks, which has the same shape on all."""
        import torch

        out = torch.empty((self.shard.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            # Bytes, because not every library has all dtypes; flat, because gloo wants the parts side by side in the first dimension.
            whole, own = (tensor.view(-1).view(torch.uint8) for tensor in (out, x.contiguous()))
            self._run(lambda: self._group._allgather_base(whole, own, self._all_gather_options))
        return out

    def returned(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """[all rows, columns] -> [size, own rows, columns]: what each rank has of the rows of this one. `counts` says how many rows each
        rank has; they follow each other."""
        import torch

        own, columns = counts[self.shard.index], x.shape[1]
        out = torch.empty((self.shard.size, own, columns), dtype=x.dtype, device=x.device)
        sizes = [own] * self.shard.size, list(counts)
        self._run(lambda: self._group.alltoall_base(out.view(-1, columns), x.contiguous(), *sizes, self._all_to_all_options))
        return out

    def broadcast(self, x: Tensor) -> None:
        """Overwrites `x`, which is contiguous, with that of the first rank."""
        self._run(lambda: self._group.broadcast([x], self._broadcast_options))

    def close(self) -> None:
        """When nothing waits for another rank any more, and nothing is called after it. What others wait for from this rank ends with an
        error. All graphs that have recorded collectives must be gone."""
        self._group.abort()
        del self._group  # gloo's connections end with the group

    def _run(self, call: Callable[[], Work | None]) -> None:
        try:
            work = call()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise CollectiveError(str(error)) from error


class RowParallel:
    """Around the product that ends a block, whose input columns the ranks have in parts (Shoeybi et al., "Megatron-LM", 2019, section 3).

    In exact mode its inputs are gathered, each rank computes some columns of the result from all of them, and these are gathered. Otherwise
    each rank multiplies its inputs with its columns of the matrix, and the results are summed. On one rank it is the identity.
    """

    def __init__(self, collectives: Collectives | None = None, inputs: Sequence[int] = (), outputs: Sequence[int] = ()) -> None:
        """The bounds of both: as of `Collectives.gathered`."""
        self.collectives = collectives
        self._inputs = inputs
        self._outputs = outputs
        self.gathers = collectives is not None and collectives.shard.exact

    def before(self, x: Tensor) -> Tensor:
        """What the product is given, from this rank's columns of it."""
        return self.collectives.gathered(x, self._inputs) if self.collectives is not None and self.gathers else x

    def after(self, x: Tensor) -> Tensor:
        """The result on every rank, from what this rank's product is; `x` is given up."""
        if self.collectives is None:
            return x
        return self.collectives.gathered(x, self._outputs) if self.gathers else self.collectives.summed(x)

    def gathered(self, x: Tensor) -> Tensor:
        """The columns of all ranks, for a product that every rank computes whole."""
        return x if self.collectives is None else self.collectives.gathered(x, self._inputs)


ONE_RANK = RowParallel()


ComputePairs: TypeAlias = "Callable[[Tensor, Tensor, Tensor], Tensor]"
"""Rows [P, size], the expert [P] int64 of each among those that are held here, and its weight [P] float32 -> the weighted outputs
[P, size] float32."""


class ExpertExchange:
    def __init__(self, collectives: Collectives, shard: Shard) -> None:
        """`collectives`: with the other replicas. `shard`: what this replica holds of the model."""
        self._collectives = collectives
        self._shard = shard
        self._counts = [0] * collectives.shard.size  # tokens of each replica in the step

    def begin_step(self, num_tokens: int) -> list[int]:
        """Waits for all replicas; returns the number of tokens that each has in the step."""
        import torch

        self._counts = self._collectives.stacked(torch.tensor([num_tokens])).flatten().tolist()
        return self._counts

    def sums(self, x: Tensor, chosen: Tensor, weights: Tensor, num_experts: int, compute: ComputePairs) -> Tensor:
        """Computes what all experts make of each row, added: [T, size] float32. `x` [T, size] has the rows of this replica, `chosen` [T,
        top_k] int64 the experts that each goes to, and `weights` [T, top_k] float32 their weights. Each replica adds up what its experts
        make, and the sums are added in the order of replicas. `compute` is called with rows of all replicas, if any go to experts that are
        held here."""
        import torch

        held = self._shard.experts(num_experts)
        rows, chosen, weights = self._all_tokens(x, chosen, weights)
        tokens, places = ((chosen >= held.start) & (chosen < held.stop)).nonzero(as_tuple=True)
        order = chosen[tokens, places].argsort(stable=True)  # added in the order of experts, as where all are held
        tokens, places = tokens[order], places[order]
        out = torch.zeros(rows.shape, dtype=torch.float32, device=x.device)
        if len(tokens):
            out.index_add_(0, tokens, compute(rows[tokens], chosen[tokens, places] - held.start, weights[tokens, places]))
        total, *others = self._collectives.returned(out, self._counts).unbind()
        for part in others:
            total = total + part
        return total

    def _all_tokens(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        """Gathers arrays that have a row for each token of this replica: returns them with the rows of all replicas, in the order of
        replicas."""
        import torch

        own, counts = len(arrays[0]), self._counts
        assert own == counts[self._collectives.shard.index], "the step has begun with the tokens that it has"
        parts = [array.contiguous().view(torch.uint8) for array in arrays]
        packed = torch.zeros(max(counts), sum(part.shape[1] for part in parts), dtype=torch.uint8, device=arrays[0].device)
        torch.cat(parts, 1, out=packed[:own])
        stacked = self._collectives.stacked(packed)
        whole = torch.cat([part[:count] for part, count in zip(stacked, counts, strict=True)])
        found, begin = [], 0
        for array, part in zip(arrays, parts, strict=True):
            found.append(array.new_empty(len(whole), array.shape[1]))
            found[-1].view(torch.uint8).copy_(whole[:, begin : begin + part.shape[1]])
            begin += part.shape[1]
        return tuple(found)
