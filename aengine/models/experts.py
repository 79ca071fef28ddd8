"""The block of experts of the torch decoder: a router that gives each token to a few of many MLPs.

Owns which experts a token goes to, and the sum of their results. Knows nothing of attention, batches or checkpoints.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.layer_params import ExpertMlp, SharedOutput
from aengine.layers.collectives import ONE_RANK, RowParallel
from aengine.layers.expert_exchange import ExpertExchange
from aengine.layers.ops import Activations, LayerOps
from aengine.models.blocks import MlpBlock, Weights, activate
from aengine.models.spec import Experts, Mlp


class ExpertsBlock:
    """Routed experts, and those that all tokens share."""

    takes_float8 = False

    def __init__(
        self,
        experts: Experts,
        weights: Weights,
        ops: LayerOps,
        row_parallel: RowParallel = ONE_RANK,
        for_shared: RowParallel = ONE_RANK,
        exchange: ExpertExchange | None = None,
    ) -> None:
        """Of several ranks each has a part of the width of every expert, and of the shared ones. What each rank sums of their outputs
        `row_parallel` joins; `for_shared` has the same outputs, and the inputs of the shared ones. Of several replicas, each of which has
        some of the experts, `exchange` connects this one with the others."""
        self._experts = experts
        self._ops = ops
        self._router, self._router_bias = weights["router.weight"], weights.get("router.bias")
        self._correction = weights.get("router_correction")
        self._mlp = ExpertMlp(
            weights.experts("experts.gate_up"), weights.experts("experts.down"), partial(_between, experts.expert, row_parallel, ops)
        )
        self._row_parallel = row_parallel
        self._exchange = exchange
        self._shared: MlpBlock | None = None
        if experts.shared is not None:
            self._shared = MlpBlock(experts.shared, weights.below("shared."), ops, for_shared)
        self._shared_gate = weights.linear("shared_gate") if experts.shared_gate else None

    def __call__(self, x: Activations) -> Tensor:
        """The router and the sums are computed in float32."""
        assert isinstance(x, Tensor)
        chosen, weights = self._route(x)
        shared = self._shared_output(x)
        if self._exchange is None:
            out = self._ops.experts(x, chosen, weights, self._mlp, x.dtype, shared)
        else:
            sums = self._exchanged(self._exchange, x, chosen, weights)
            out = (sums if shared is None else shared.added_to(sums)).to(x.dtype)
        return self._row_parallel.after(out)

    def _shared_output(self, x: Tensor) -> SharedOutput | None:
        if self._shared is None:
            return None
        return SharedOutput(self._shared.partial(x), None if self._shared_gate is None else self._shared_gate(x))

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.is_cuda and x.dtype == self._router.dtype != torch.float32:
            logits = torch.mm(x, self._router.t(), out_dtype=torch.float32)  # the same sums as of float32 copies
        else:
            logits = F.linear(x.float(), self._router.float())
        return self._ops.route(logits, self._router_bias, self._correction, self._experts.routing)

    def compute_for_others(self) -> None:
        """The part of this replica in a step in which it has no tokens."""
        x, top_k = self._router.new_empty(0, self._router.shape[1]), self._experts.routing.top_k
        assert self._exchange is not None
        self._exchanged(self._exchange, x, x.new_empty(0, top_k, dtype=torch.int64), x.new_empty(0, top_k, dtype=torch.float32))

    def _exchanged(self, exchange: ExpertExchange, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return exchange.sums(x, chosen, weights, self._experts.num_experts, self._of_pairs)

    def _of_pairs(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As `ComputePairs`."""
        return self._ops.experts(rows, experts[:, None], weights[:, None], self._mlp, torch.float32)


def _between(expert: Mlp, row_parallel: RowParallel, ops: LayerOps, rows: Tensor) -> Tensor:
    """What is between the two products of experts."""
    return row_parallel.before(activate(expert, rows, ops))
