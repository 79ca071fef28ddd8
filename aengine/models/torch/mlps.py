"""Blocks of the torch decoder that take each token by itself: MLPs, experts, where a router gives each token to a few of many MLPs, inputs
of layers, and what several residual streams add to a layer.

A block is built from its description and its layer's weights, and maps activations [T, hidden_size] to the same shape. Does not know
where its result is added.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.params import ExpertMlp, SharedOutput
from aengine.layers.collectives import ONE_RANK, ExpertExchange, RowParallel
from aengine.layers.ops import Activations, LayerOps, activated
from aengine.models.spec import Experts, LayerInputs, Mlp, Streams
from aengine.models.torch.blocks import Normalize, Weights

_LEAST_SQUARE = 1e-5  # of a stream that is to be as long as another one


class MlpBlock:
    """A gated or plain MLP, or a rank's part of its width."""

    def __init__(self, mlp: Mlp, weights: Weights, ops: LayerOps, row_parallel: RowParallel) -> None:
        """Each of several ranks has a part of the width; `row_parallel` joins their outputs."""
        self._mlp = mlp
        self._ops = ops
        self._row_parallel = row_parallel
        up = "gate_up" if mlp.gated else "up"
        self._up, self._down = weights.linear(up), weights.linear("down")
        self.takes_float8 = weights.takes_float8(up)
        self._quantizes = mlp.gated and not mlp.sparsity and weights.takes_float8("down") and not row_parallel.gathers

    def __call__(self, x: Activations) -> Tensor:
        return self._row_parallel.after(self.partial(x))

    def partial(self, x: Activations) -> Tensor:
        """What `RowParallel.after` makes the result of."""
        inner = self._up(x)
        if self._quantizes:
            return self._down(self._ops.gated_float8(inner, self._mlp.activation))
        return self._down(self._row_parallel.before(activate(self._mlp, inner, self._ops)))


def activate(mlp: Mlp, x: Tensor, ops: LayerOps) -> Tensor:
    """What `down` is given: [T, 2 * intermediate_size] of gate and up, or [T, intermediate_size] of up alone -> the latter shape."""
    if mlp.sparsity:
        gate, up = x.chunk(2, -1)
        deviation, mean = torch.std_mean(gate, -1, correction=0, keepdim=True)
        return activated(F.relu(gate - (mean + deviation * NormalDist().inv_cdf(mlp.sparsity))), mlp.activation) * up
    return ops.gated(x, mlp.activation) if mlp.gated else activated(x, mlp.activation)


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
        """Each of several ranks has a part of the width of every expert, and of the shared ones; `row_parallel` joins what each sums of
        their outputs. `for_shared` has the same outputs, and the inputs of the shared ones. Of several replicas, each of which has some
        of the experts, `exchange` connects this one with the others."""
        self._experts = experts
        self._ops = ops
        self._router, self._router_bias = weights["router.weight"], weights.get("router.bias")
        self._correction = weights.get("router_correction")
        self._mlp = ExpertMlp(
            weights.experts("experts.gate_up" if experts.expert.gated else "experts.up"),
            weights.experts("experts.down"),
            partial(_between, experts.expert, row_parallel, ops),
        )
        self._row_parallel = row_parallel
        self._exchange = exchange
        self._shared: MlpBlock | None = None
        self._expert_scale = weights.get("expert_scale")
        self._norms: dict[str, Normalize] = {}
        if experts.branch_norm is not None:
            names = ("router_norm", "experts_norm", "experts_out_norm", "shared_norm", "shared_out_norm")
            self._norms = {name: Normalize(experts.branch_norm, weights, name, ops) for name in names}
        if experts.shared is not None:
            self._shared = MlpBlock(experts.shared, weights.below("shared."), ops, for_shared)
        self._shared_gate = weights.linear("shared_gate") if experts.shared_gate else None

    def __call__(self, x: Activations) -> Tensor:
        """The router and the sums are computed in float32."""
        assert isinstance(x, Tensor)
        if self._norms:
            return self._normed_branches(x)
        chosen, weights = self._route(x)
        return self._sums(x, chosen, weights, self._shared_output(x))

    def _sums(self, x: Tensor, chosen: Tensor, weights: Tensor, shared: SharedOutput | None) -> Tensor:
        """What the chosen experts make of x, and the shared output, added up over all ranks and replicas."""
        if self._experts.scaled_inputs:
            out = self._sums_of_scaled(x, chosen, weights, shared)
        elif self._exchange is None:
            out = self._ops.experts(x, chosen, weights, self._mlp, x.dtype, shared)
        else:
            sums = self._exchanged(self._exchange, x, chosen, weights)
            out = (sums if shared is None else shared.added_to(sums)).to(x.dtype)
        return self._row_parallel.after(out)

    def _sums_of_scaled(self, x: Tensor, chosen: Tensor, weights: Tensor, shared: SharedOutput | None) -> Tensor:
        """The sums where weights multiply what experts read: each choice is a row of its own."""
        rows = (x.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1)
        chosen, ones = chosen.view(-1, 1), torch.ones_like(weights).view(-1, 1)
        if self._exchange is None:
            made = self._ops.experts(rows, chosen, ones, self._mlp, torch.float32)
        else:
            made = self._exchanged(self._exchange, rows, chosen, ones)
        sums = made.view(*weights.shape, -1).sum(1)
        return (sums if shared is None else shared.added_to(sums)).to(x.dtype)

    def _normed_branches(self, x: Tensor) -> Tensor:
        """Experts and shared MLP as `Experts.branch_norm` says."""
        assert self._shared is not None
        norms = self._norms
        chosen, weights = self._route(norms["router_norm"](x))
        routed = norms["experts_out_norm"](self._sums(norms["experts_norm"](x), chosen, weights, None))
        return routed + norms["shared_out_norm"](self._shared(norms["shared_norm"](x)))

    def _shared_output(self, x: Tensor) -> SharedOutput | None:
        if self._shared is None:
            return None
        return SharedOutput(self._shared.partial(x), None if self._shared_gate is None else self._shared_gate(x))

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.is_cuda and x.dtype == self._router.dtype != torch.float32:
            logits = torch.mm(x, self._router.t(), out_dtype=torch.float32)  # the same sums as of float32 copies
        else:
            logits = F.linear(x.float(), self._router.float())
        chosen, weights = self._ops.route(logits, self._router_bias, self._correction, self._experts.routing)
        return chosen, weights if self._expert_scale is None else weights * self._expert_scale[chosen]

    def compute_for_others(self) -> None:
        """The part of this replica in a step in which it has no tokens."""
        x, top_k = self._router.new_empty(0, self._router.shape[1]), 1 if self._experts.scaled_inputs else self._experts.routing.top_k
        assert self._exchange is not None
        self._exchanged(self._exchange, x, x.new_empty(0, top_k, dtype=torch.int64), x.new_empty(0, top_k, dtype=torch.float32))

    def _exchanged(self, exchange: ExpertExchange, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return exchange.sums(x, chosen, weights, self._experts.num_experts, self._of_pairs)

    def _of_pairs(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted outputs of experts for rows, as `ComputePairs` demands it."""
        return self._ops.experts(rows, experts[:, None], weights[:, None], self._mlp, torch.float32)


def _between(expert: Mlp, row_parallel: RowParallel, ops: LayerOps, rows: Tensor) -> Tensor:
    """What is between the two products of experts."""
    return row_parallel.before(activate(expert, rows, ops))


class StreamsBlock:
    """What `Streams` says of one layer: x [streams, T, hidden_size]."""

    def __init__(self, streams: Streams, weights: Weights, ops: LayerOps) -> None:
        self._count, self._norm = streams.count, Normalize(streams.norm, weights, "streams_norm", ops)
        self._router, self._predict, self._correct = (weights[f"streams_{name}.weight"] for name in ("router", "predict", "correct"))
        self._scale = weights["streams_scale"]
        self._down, self._up = weights.linear("laurel_down"), weights.linear("laurel_up")
        self._laurel_norm = Normalize(streams.norm, weights, "laurel_norm", ops)

    def predicted(self, x: Tensor) -> Tensor:
        weights = F.linear(self._routed(x[0]), self._predict).view(-1, self._count, self._count)
        return x + torch.einsum("tij,jth->ith", weights, x)

    def corrected(self, x: Tensor, made: Tensor) -> Tensor:
        """`x` as it was predicted, and what the blocks made [T, hidden_size] of its first stream."""
        weights = F.linear(self._routed(made), self._correct) + 1.0
        return x + (made - x[0]) * weights.t().unsqueeze(-1)

    def beside(self, x: Activations) -> Tensor:
        """What the path beside the mixers, which read x, adds to what they make [T, hidden_size]."""
        assert isinstance(x, Tensor)
        return x + self._laurel_norm(self._up(self._down(x)))

    def gate_input(self, x: Tensor) -> Tensor:
        """What the layer's `InputGate` reads [T, hidden_size]."""
        return x[0] * self._scale

    def _routed(self, x: Tensor) -> Tensor:
        """[T, streams]"""
        return F.linear(self._norm(x.clone()) * x.shape[-1] ** -1.0, self._router).float().tanh().to(x.dtype)


def begin_streams(x: Tensor, weights: Weights) -> Tensor:
    """[T, hidden_size] -> [streams, T, hidden_size]."""
    others = torch.einsum("soh,th->sto", weights["streams_in.weight"], x)
    return torch.cat((x.unsqueeze(0), _as_long(others, x)))


def end_streams(x: Tensor, weights: Weights) -> Tensor:
    """[streams, T, hidden_size] -> [T, hidden_size]."""
    others = torch.einsum("soh,sth->sto", weights["streams_out.weight"], x[1:])
    return torch.cat((x[:1], _as_long(others, x[0]))).mean(0)


def _as_long(x: Tensor, like: Tensor) -> Tensor:
    """x [.., T, hidden_size] with the lengths of `like` [T, hidden_size]."""
    wanted = like.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()


class LayerInputsBlock:
    """What `LayerInputs` says, of all layers."""

    def __init__(self, described: LayerInputs, weights: Weights, ops: LayerOps) -> None:
        self._width, self._table = described.width, weights["layer_embedding.weight"]
        self._project, columns = weights.linear("layer_inputs"), weights["layer_inputs.weight"].shape[1]
        # The factor hidden_size ** -0.5 of what is normed is one of the epsilon.
        self._norm = Normalize(replace(described.norm, eps=described.norm.eps * columns), weights, "layer_inputs_norm", ops)

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """Return [T, layers, width]."""
        projected = self._norm(self._project(embedded).view(-1, self._width)).view(len(ids), -1, self._width)
        looked_up = F.embedding(torch.where(ids < len(self._table), ids, 0), self._table).view(projected.shape).float()
        return (projected.float().add_(looked_up, alpha=self._width**0.5) * 2**-0.5).to(embedded.dtype)
