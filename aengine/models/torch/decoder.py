"""The torch decoder: one declarative model for every `ModelSpec`.

Owns the order of operations of a forward pass: embedding, layers with their residuals, and the head; and what a draft head reads of them,
by the formulas of `DraftHead`. What is between two residuals is a block. Attention, KV and metadata come with the batch; weights come from
outside.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.attention import AttentionStep
from aengine.kernels.arrays import as_tensor
from aengine.layers.adapters import AdapterTable
from aengine.layers.collectives import ONE_RANK, Collectives, ExpertExchange, RowParallel
from aengine.layers.ops import Activations, LayerOps, TorchOps, activated
from aengine.layers.rotary import QueryScale, RopeSpec, cos_sin_cache, mixed_cos_sin, query_scales
from aengine.models.sharding import (
    attended_bounds,
    hidden_bounds,
    recurrence_bounds,
    sharded_spec,
    sharded_weights,
    vocab_bounds,
    width_bounds,
)
from aengine.models.spec import (
    Attention,
    DraftHead,
    Experts,
    HeadKind,
    LatentAttention,
    Layer,
    Mlp,
    ModelSpec,
    Norm,
    ShortConvolution,
)
from aengine.models.torch.blocks import (
    PLUS_ONE,
    AttentionBlock,
    ConvolutionBlock,
    HeadInputs,
    LatentAttentionBlock,
    Linear,
    Normalize,
    RecurrenceBlock,
    Weight,
    Weights,
    same_form,
    tensors_of,
)
from aengine.models.torch.mlps import ExpertsBlock, LayerInputsBlock, MlpBlock, StreamsBlock, begin_streams, end_streams
from aengine.parallel.shard import WHOLE, Shard


class Kept:
    """Hidden states that a draft head reads, by slot as keys and values are: those of its target, and those that it carries itself."""

    def __init__(self, head: DraftHead, fuse: Linear | None) -> None:
        """`fuse`: of EAGLE3."""
        self.states = torch.zeros(0)  # [slots, hidden_size of the head]
        self.taps = head.taps
        self._carries_residual = head.kind is HeadKind.EAGLE3
        self._fuse = fuse

    def read(self, slots: Tensor) -> Tensor:
        return self.states.index_select(0, slots.clamp(min=0))

    def of_target(self, slots: Tensor, tapped: Mapping[int, Tensor], hidden: Tensor) -> None:
        """[T] tokens of the target, with the residuals at its `taps` and the `hidden` states that its output head reads."""
        self._write(slots, hidden if self._fuse is None else self._fuse(torch.cat([tapped[tap] for tap in self.taps], -1)))

    def of_head(self, next_slots: Tensor, residual: Tensor, hidden: Tensor) -> None:
        """[T] tokens of the head, with their last residual and the `hidden` states that its output head reads."""
        self._write(next_slots, residual if self._carries_residual else hidden)

    def _write(self, slots: Tensor, states: Tensor) -> None:
        """Where a slot is -1, at slot 0, which is on the reserved page 0."""
        self.states.index_copy_(0, slots.clamp(min=0).long(), states)


class ImageTensors(NamedTuple):
    """The images of a step, on the device. `input_ids` have the ids whose `LayerInputs` their tokens have."""

    tokens: Tensor  # [k] int64, the tokens of the step
    rows: Tensor  # [k, hidden_size], their inputs
    additions: Tensor | None  # [layers, k, hidden_size], what is added to the residual after each of the first layers


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of a mixed batch; the tokens of a row are consecutive."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    logits_indices: Tensor  # [m] int32, the tokens whose logits are computed
    attention: AttentionStep
    slots: Tensor | None = None  # [T] int32, where KV is written in the first layer group, -1: nowhere; for a draft head and its target
    next_slots: Tensor | None = None  # [T] int32, where a draft head keeps what it carries to the next position; -1: nowhere
    inputs: Tensor | None = None  # [T, hidden_size], the hidden states of the stage before, which are kept; of the first stage None
    images: ImageTensors | None = None


class Decoder:
    """The whole model, or a rank's part. `model(batch)` is the hidden states, `model.logits` the output head on the tokens whose logits are
    asked for, which the first stage has."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        num_positions: int,
        ops: LayerOps | None = None,
        collectives: Collectives | None = None,
        adapters: AdapterTable | None = None,
        shard: Shard = WHOLE,
        exchange: ExpertExchange | None = None,
    ) -> None:
        """Uses `weights` (those of `named_weights(spec)`, all on one device) without copying them. There may be a `head.weight` even if the
        head is tied to the embedding: the same matrix in another form. A draft head that has no embedding or no output head is given those
        of its target.

        It can be called with positions below `num_positions`. `ops`: those of the device; None: plain torch. `shard`: of a rank that has a
        part of the model, whose weights are those of `sharded_weights`; with several ranks in its stage that of their `collectives`.
        `adapters`: of `adapter_shapes`; None: there are none. `exchange`: with the replicas that have the other experts, if any have.
        Raises ValueError for other weights than these.
        """
        shard = shard if collectives is None else collectives.shard
        shared = {"embedding.weight", "head.weight"} if spec.draft_head is not None else {"head.weight"} if spec.tied_head else set()
        different = (sharded_weights(spec, shard).keys() ^ weights.keys()) - shared
        if different:
            raise ValueError(f"weights that are missing or unknown: {', '.join(sorted(different))}")
        self._spec = spec
        self._collectives = collectives
        self._vocab_bounds = vocab_bounds(spec, shard)
        weights = dict(weights)
        self._weights, self.adapters = Weights(weights), adapters
        head = weights.get("head.weight", weights.get("embedding.weight"))
        self._head = head if head is None or isinstance(head, Tensor) else self._weights.linear("head")
        ops = ops or TorchOps()
        device = next(weight.device for weight in weights.values() if isinstance(weight, Tensor))
        self._angles = {rope: as_tensor(cos_sin_cache(rope, num_positions)).to(device) for rope in spec.ropes}
        tables: dict[RopeSpec | QueryScale, Tensor] = dict(self._angles.items())
        tables |= {scale: as_tensor(query_scales(scale, num_positions)).to(device) for scale in spec.query_scales}
        self._layers = []
        held, wholes = sharded_spec(spec, shard), (spec.layers[index] for index in shard.layers(spec.num_layers))
        recurrent = itertools.count()
        for index, (whole, layer, places) in enumerate(zip(wholes, held.layers, held.places, strict=True)):
            divided = _divisions(spec, whole, collectives, exchange)
            of_layer = Weights(weights, f"layers.{index}.", adapters)
            mixers: list[_Mixer] = []
            if layer.attention is not None:
                mixers.append(_attention_block(layer.attention, places, of_layer, tables, ops, divided.attention))
            if layer.recurrence is not None:
                mixers.append(RecurrenceBlock(layer.recurrence, next(recurrent), of_layer, ops, divided.recurrence))
            streams = None if spec.streams is None else StreamsBlock(spec.streams, of_layer, ops)
            self._layers.append(_Layer(layer, mixers, of_layer, ops, divided, streams))
        self._layer_inputs = None if spec.layer_inputs is None or shard.stage else LayerInputsBlock(spec.layer_inputs, self._weights, ops)
        embedding_norm = None if shard.stage else spec.embedding_norm
        self._embedding_norm = _norm_or_identity(embedding_norm, self._weights, "embedding_norm", ops)
        self._norm = _Join(held.norm, self._weights, "norm", ops)
        draft_head = spec.draft_head
        self._head_inputs = None if draft_head is None else HeadInputs(draft_head, self._weights, ops)
        self.kept: Kept | None = None  # of a draft head and of its target
        if draft_head is not None:
            self.kept = Kept(draft_head, self._weights.linear("fuse") if draft_head.kind is HeadKind.EAGLE3 else None)
        self._taps: tuple[int, ...] = ()

    def serve(self, head: Decoder) -> None:
        """From now on it keeps the hidden states that the draft `head` reads. Before it is called or recorded."""
        self.kept = head.kept
        self._taps = () if head.kept is None else head.kept.taps

    def check_same_form(self, weights: Mapping[str, Weight]) -> None:
        """Raises ModelLoadError if `copy` cannot write these weights over the present ones: they are quantised in another way."""
        for name, weight in weights.items():
            if not same_form(self._weights.all[name], weight):
                raise ModelLoadError(f"{name} is not quantised as the weight that it would replace")

    def copy(self, weights: Mapping[str, Weight]) -> None:
        """Writes weights of the same names and forms over the present ones, which keep their memory."""
        every = self._weights.all
        for name, weight in weights.items():
            for target, source in zip(tensors_of(every[name]), tensors_of(weight), strict=True):
                target.copy_(source)
            derived = every.get(name + PLUS_ONE)
            if isinstance(derived, Tensor) and isinstance(weight, Tensor):
                derived.copy_(weight).add_(1.0)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size], normed, ready for the head; of a stage but the last for the next one."""
        if self.adapters is not None:
            self.adapters.begin(len(batch.input_ids))
        pending, residual, inputs = None, self._embed(batch) if batch.inputs is None else batch.inputs.clone(), None
        if self._head_inputs is not None:
            assert self.kept is not None
            assert batch.slots is not None
            inputs, residual = self._head_inputs(residual, self.kept.read(batch.slots))
        tapped: dict[int, Tensor] = {}
        layer_inputs = None if self._layer_inputs is None else self._layer_inputs(batch.input_ids, residual)
        streams = None if self._spec.streams is None else begin_streams(residual, self._weights)
        for index, layer in enumerate(self._layers):
            if streams is not None:
                streams = layer.of_streams(streams, batch, None if layer_inputs is None else layer_inputs[:, index])
                continue
            if index in self._taps:
                tapped[index] = residual.clone() if pending is None else residual + pending
            pending, residual = layer(pending, residual, batch, inputs)
            pending, residual = layer.end(pending, residual, None if layer_inputs is None else layer_inputs[:, index])
            if batch.images is not None and batch.images.additions is not None and index < len(batch.images.additions):
                residual = residual.index_add(0, batch.images.tokens, batch.images.additions[index])
        if streams is not None:
            residual = end_streams(streams, self._weights)
        if len(self._layers) in self._taps:
            tapped[len(self._layers)] = residual.clone() if pending is None else residual + pending
        hidden, residual = self._norm(pending, residual)
        assert isinstance(hidden, Tensor)
        if self.kept is not None and self._head_inputs is not None:
            assert batch.next_slots is not None
            self.kept.of_head(batch.next_slots, residual, hidden)
        elif self.kept is not None:
            assert batch.slots is not None
            self.kept.of_target(batch.slots, tapped, hidden)
        return hidden

    def mix_positions(self, first: int, positions: Tensor) -> None:
        """Rows `first` and following of tables of angles become those of [3, n] `positions`, in host memory."""
        for rope, table in self._angles.items():
            table[first : first + positions.shape[1]] = as_tensor(mixed_cos_sin(rope, positions.cpu().numpy())).to(table.device)

    def compute_for_others(self) -> None:
        """In place of a forward pass, while other replicas have one: their tokens meet the experts that are held here."""
        for layer in self._layers:
            layer.compute_for_others()

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """[T, hidden_size] -> [m, vocab_size] as of `scaled_logits`, of the tokens `indices` [m] int32."""
        return self.scaled_logits(self._head_product(hidden.index_select(0, indices), None, indices))

    def head_product(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the head's product for all tokens of the latest forward pass: [T, hidden_size] -> [T, vocab_size] in the dtype of the
        weights, in `out` if it is given. `scaled_logits` makes logits of it; the order of a token's logits is the same."""
        return self._head_product(hidden, out, None)

    def _head_product(self, hidden: Tensor, out: Tensor | None, indices: Tensor | None) -> Tensor:
        """`indices`: the tokens of the forward pass that these are; None: all."""
        if self._collectives is not None or not isinstance(self._head, Tensor):
            product = self._gathered_head_product(hidden, indices)
            return product if out is None else out.copy_(product)
        bias = self._weights.get("head.bias")
        if bias is None:
            return self._adapted_head(torch.mm(hidden, self._head.t(), out=out), hidden, indices)
        return self._adapted_head(torch.addmm(bias, hidden, self._head.t(), out=out), hidden, indices)

    def _gathered_head_product(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        head = self._head
        assert head is not None, "the first stage has it"
        product = F.linear(hidden, head, self._weights.get("head.bias")) if isinstance(head, Tensor) else head(hidden)
        product = self._adapted_head(product, hidden, indices)
        return product if self._collectives is None else self._collectives.gathered(product, self._vocab_bounds)

    def _adapted_head(self, product: Tensor, hidden: Tensor, indices: Tensor | None) -> Tensor:
        return product if self.adapters is None else self.adapters.add_products("head", product, hidden, indices)

    def scaled_logits(self, product: Tensor) -> Tensor:
        """The logits of a `head_product`: float32 where the model scales or caps them, else the product as it is."""
        scale, cap = self._spec.logit_scale, self._spec.logit_soft_cap
        if scale == 1.0 and not cap:
            return product
        logits = product.to(torch.float32, copy=True)
        if scale != 1.0:
            logits *= scale
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    @property
    def weights(self) -> list[Tensor]:
        return [tensor for weight in self._weights.all.values() for tensor in tensors_of(weight)]

    @property
    def shared_weights(self) -> dict[str, Weight]:
        """The weights that a draft head has of its target: embedding and output head."""
        embedding = self._weights.all["embedding.weight"]
        return {"embedding.weight": embedding, "head.weight": self._weights.all.get("head.weight", embedding)}

    @property
    def head_shape(self) -> tuple[int, int]:
        """How many logits a token has, and hidden_size."""
        head = self._spec.draft_head
        own = head.num_draft_ids if head is not None and head.own_head else None
        return own or self._spec.vocab_size, self._spec.hidden_size

    def _embed(self, batch: ForwardBatch) -> Tensor:
        embedded = self._embedded(batch.input_ids)
        if self._spec.embedding_scale != 1.0:
            embedded *= torch.tensor(self._spec.embedding_scale, dtype=embedded.dtype).item()
        if self._spec.learned_positions is not None:
            embedded += F.embedding(batch.positions + self._spec.learned_positions.offset, self._weights["positions.weight"])
        if batch.images is not None:
            embedded.index_copy_(0, batch.images.tokens, batch.images.rows)
        return self._embedding_norm(embedded)

    def _embedded(self, ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden_size] of ids [T]. Each of several ranks has those of some tokens; the results are summed."""
        if self._collectives is None:
            return self._looked_up(ids)
        table = self._weights["embedding.weight"]
        others = ids - self._vocab_bounds[self._collectives.shard.index]
        inside = (others >= 0) & (others < len(table))
        embedded = self._looked_up(others.clamp(0, len(table) - 1))
        return self._collectives.summed(embedded.masked_fill_(~inside.unsqueeze(-1), 0.0))

    def _looked_up(self, ids: Tensor) -> Tensor:
        embedded = F.embedding(ids, self._weights["embedding.weight"])
        return embedded if self.adapters is None else self.adapters.add_embedded(embedded, ids)


class _Join:
    """What stands at the beginning of a block: adds what is `pending` to the residual, and norms the sum. None: the identity."""

    def __init__(self, norm: Norm | None, weights: Weights, name: str, ops: LayerOps, *, float8: bool = False) -> None:
        """`float8`: the block takes the normed sum in float8."""
        self._norm = None if norm is None else Normalize(norm, weights, name, ops)
        self._float8 = float8

    def __call__(self, pending: Tensor | None, residual: Tensor) -> tuple[Activations, Tensor]:
        """[T, hidden_size] each, both given up. Returns the normed sum, which may be the same tensor, and the sum."""
        if self._norm is None:
            total = residual if pending is None else residual + pending
            return total, total
        if self._float8:
            return (self._norm.float8(residual, None) if pending is None else self._norm.float8(pending, residual)), residual
        return (self._norm(residual), residual) if pending is None else self._norm.of_sum(pending, residual)


class _Layer:
    """The sum that follows a block is left to the next, which makes it together with its norm: the `pending` activations."""

    def __init__(
        self,
        layer: Layer,
        mixers: Sequence[_Mixer],
        weights: Weights,
        ops: LayerOps,
        divided: _Divisions,
        streams: StreamsBlock | None,
    ) -> None:
        self._mixers, self._streams = mixers, streams
        self._mlp = None if layer.mlp is None else _mlp_block(layer.mlp, weights, ops, divided)
        self._parallel, self._multiplier = layer.parallel, layer.residual_multiplier
        self._shared_norm = layer.parallel and layer.mlp_norm is None
        mlp_float8 = self._mlp is not None and self._mlp.takes_float8
        self._normed_residuals = layer.normed_residuals
        for_both = (mlp_float8 or not self._shared_norm) and self._normed_residuals is None
        float8 = for_both and all(mixer.takes_float8 for mixer in mixers)
        self._join_attention = _Join(layer.attention_norm, weights, "attention_norm", ops, float8=float8)
        self._join_mlp = _Join(layer.mlp_norm, weights, "mlp_norm", ops, float8=mlp_float8 and self._normed_residuals is None)
        self._post_attention = _norm_or_identity(layer.post_attention_norm, weights, "post_attention_norm", ops)
        self._post_mlp = _norm_or_identity(layer.post_mlp_norm, weights, "post_mlp_norm", ops)
        self._gate, self._scale = None, weights["scale"] if layer.scaled else None
        if layer.input_gate is not None:
            self._gate = layer.input_gate, weights.linear("input_gate"), weights.linear("input_out")
            self._post_input = Normalize(layer.input_gate.norm, weights, "input_norm", ops)

    def __call__(
        self, pending: Tensor | None, residual: Tensor, batch: ForwardBatch, inputs: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """What is to be added to the residual, if anything, and the residual: [T, hidden_size] each. Those given are given up. Mixers read
        `inputs`; None: the normed residual."""
        if self._mixers:
            x, residual = self._join_attention(pending, residual) if inputs is None else (inputs, residual)
            if self._normed_residuals is not None:
                assert isinstance(x, Tensor)
                residual = x * self._normed_residuals[0]
            beside = None if self._streams is None else self._streams.beside(x)
            mixed = self._post_attention(
                functools.reduce(torch.add, (mixer(x, batch.positions, batch.attention) for mixer in self._mixers))
            )
            if self._parallel and self._mlp is not None:
                x = x if self._shared_norm else self._join_mlp(None, residual)[0]
                return self._scaled(mixed + self._mlp(x)), residual
            pending = mixed = self._scaled(mixed)
            if beside is not None:
                pending, residual = None, (residual + mixed + beside) * 2**-0.5
        if self._mlp is None:
            return pending, residual
        x, residual = self._join_mlp(pending, residual)
        if self._normed_residuals is not None:
            assert isinstance(x, Tensor)
            residual = x * self._normed_residuals[1]
        return self._scaled(self._post_mlp(self._mlp(x))), residual

    def end(self, pending: Tensor | None, residual: Tensor, layer_input: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """What comes after the blocks of a layer; as `__call__`, with its input [T, width] if layers have one."""
        if self._gate is not None:
            assert layer_input is not None
            residual = residual if pending is None else residual + pending
            pending = self._gated(residual, layer_input)
        if self._scale is None:
            return pending, residual
        total = residual if pending is None else residual + pending
        return None, (total.float() * self._scale).to(total.dtype)

    def of_streams(self, x: Tensor, batch: ForwardBatch, layer_input: Tensor | None) -> Tensor:
        """What the layer makes of several streams [streams, T, hidden_size]."""
        assert self._streams is not None
        x = self._streams.predicted(x)
        pending, residual = self(None, x[0].clone(), batch)
        x = self._streams.corrected(x, residual if pending is None else residual + pending)
        if layer_input is not None:
            x[1:] += self._gated(self._streams.gate_input(x), layer_input)
        return x

    def _gated(self, x: Tensor, layer_input: Tensor) -> Tensor:
        """What `InputGate` adds."""
        assert self._gate is not None
        described, gate, out = self._gate
        return self._post_input(out(activated(gate(x), described.activation) * layer_input))

    def compute_for_others(self) -> None:
        """Do the layer's part of `Decoder.compute_for_others`: only experts have one."""
        if isinstance(self._mlp, ExpertsBlock):
            self._mlp.compute_for_others()

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._multiplier == 1.0 else x * self._multiplier


def _norm_or_identity(norm: Norm | None, weights: Weights, name: str, ops: LayerOps) -> Callable[[Tensor], Tensor]:
    return (lambda x: x) if norm is None else Normalize(norm, weights, name, ops)


class _Divisions(NamedTuple):
    """Where what is divided of a layer meets."""

    attention: RowParallel
    recurrence: RowParallel
    mlp: RowParallel  # of experts, if it has any
    shared: RowParallel  # of shared experts
    experts: ExpertExchange | None


def _divisions(spec: ModelSpec, layer: Layer, collectives: Collectives | None, exchange: ExpertExchange | None) -> _Divisions:
    """`layer` as all ranks together have it."""
    if collectives is None:
        return _Divisions(ONE_RANK, ONE_RANK, ONE_RANK, ONE_RANK, exchange)
    shard, mlp = collectives.shard, layer.mlp
    mlps = (mlp.expert, mlp.shared or mlp.expert) if isinstance(mlp, Experts) else (mlp, mlp)
    inputs = (
        () if layer.attention is None else attended_bounds(layer.attention, shard),
        () if layer.recurrence is None else recurrence_bounds(layer.recurrence, shard),
        *(() if each is None else width_bounds(each, shard) for each in mlps),
    )
    attention, recurrence, routed, shared = (RowParallel(collectives, each, hidden_bounds(spec, shard)) for each in inputs)
    return _Divisions(attention, recurrence, routed, shared, exchange)


_Mixer = AttentionBlock | LatentAttentionBlock | ConvolutionBlock | RecurrenceBlock


def _attention_block(
    attention: Attention | LatentAttention | ShortConvolution,
    places: range,
    weights: Weights,
    tables: Mapping[RopeSpec | QueryScale, Tensor],
    ops: LayerOps,
    row_parallel: RowParallel,
) -> AttentionBlock | LatentAttentionBlock | ConvolutionBlock:
    """`places`: those of the layer in KV pages. `tables` are the [num_positions, rotary_dim] cos and sin of each rope, and
    the [num_positions] factors of each query scale."""
    index = places.start
    if isinstance(attention, ShortConvolution):
        return ConvolutionBlock(attention, places, weights, row_parallel)
    if isinstance(attention, LatentAttention):
        return LatentAttentionBlock(attention, index, weights, tables[attention.rope], ops, row_parallel)
    cos_sin = None if attention.rope is None else tables[attention.rope]
    scales = None if attention.query_scale is None else tables[attention.query_scale]
    return AttentionBlock(attention, index, weights, cos_sin, ops, row_parallel, scales)


def _mlp_block(mlp: Mlp | Experts, weights: Weights, ops: LayerOps, divided: _Divisions) -> MlpBlock | ExpertsBlock:
    if isinstance(mlp, Experts):
        return ExpertsBlock(mlp, weights, ops, divided.mlp, divided.shared, divided.experts)
    return MlpBlock(mlp, weights, ops, divided.mlp)
