"""`ExpertExchange`: tokens on their way to the replicas that hold their experts, and back.

All replicas call the same methods in the same order, those without tokens, too. Knows nothing of routers or of what an expert is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aengine.layers.collectives import Collectives
from aengine.parallel.shard import Shard

ComputePairs = Callable[[Tensor, Tensor, Tensor], Tensor]
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
        self._counts = self._collectives.stacked(torch.tensor([num_tokens])).flatten().tolist()
        return self._counts

    def sums(self, x: Tensor, chosen: Tensor, weights: Tensor, num_experts: int, compute: ComputePairs) -> Tensor:
        """Of rows [T, size], the experts [T, top_k] int64 that each goes to, and their weights [T, top_k] float32: what all experts make of
        each row, added, [T, size] float32. Each replica adds up what its experts make, and the sums are added in the order of replicas.
        `compute` is called with rows of all replicas, if any go to experts that are held here."""
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
        """Of arrays with a row for each own token those of the tokens of all replicas."""
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
