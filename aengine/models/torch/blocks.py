"""Blocks of the torch decoder that mix tokens: grouped-query attention, multi-head latent attention in absorbed form (DeepSeek-V2, 2024,
section 2.1), convolutions and recurrences; and what all blocks read, norms and weights.

A block is built from its description and its layer's weights, and maps activations [T, hidden_size] to the same shape. Does not know
where its result is added; knows nothing of batches or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.attention import AttentionStep, IndexQuery
from aengine.kernels.params import ExpertLinear, Rotation
from aengine.kernels.quantizing import Float8Rows
from aengine.kernels.recurrence import RecurrentRule
from aengine.layers.adapters import AdapterTable
from aengine.layers.collectives import Collectives, RowParallel
from aengine.layers.ops import Activations, LayerOps, LinearMethod
from aengine.models.spec import (
    Attention,
    DraftHead,
    HeadKind,
    LatentAttention,
    Norm,
    NormKind,
    Recurrence,
    RecurrenceKind,
    ShortConvolution,
    SparseIndex,
)

if TYPE_CHECKING:
    from aengine.kernels.triton.codes import Codes


Linear = Callable[[Activations], Tensor]
Weight: TypeAlias = "Tensor | LinearMethod | Codes"
"""A parameter of a model on its device; a matrix that is quantised there is what multiplies with it, or the codes of experts."""

PLUS_ONE = ".plus_one"


def tensors_of(weight: Weight) -> tuple[Tensor, ...]:
    return (weight,) if isinstance(weight, Tensor) else weight.tensors


def same_form(one: Weight, other: Weight) -> bool:
    """Whether the tensors of one can take the numbers of the other."""
    if type(one) is not type(other) or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one.form != other.form):
        return False
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(ours.shape == theirs.shape and ours.dtype is theirs.dtype for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model whose names begin with `prefix`."""

    all: dict[str, Weight]
    prefix: str = ""
    adapters: AdapterTable | None = None

    def below(self, prefix: str) -> Weights:
        """Return the weights whose names go on with `prefix`."""
        return replace(self, prefix=self.prefix + prefix)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.all[self.prefix + name]
        assert isinstance(tensor, Tensor)
        return tensor

    def get(self, name: str) -> Tensor | None:
        return self[name] if self.prefix + name in self.all else None

    def ones(self, size: int) -> Tensor:
        """[size], as the weights of a norm beside the others of this layer."""
        return self["attention_norm.weight"].new_ones(size)

    def plus_one(self, name: str) -> Tensor:
        """1 + w in float32, which is kept among the weights."""
        return cast(Tensor, self.all.setdefault(f"{self.prefix}{name}{PLUS_ONE}", self[name].float() + 1.0))

    def linear(self, name: str) -> Linear:
        """With what adapters add, if there may be any."""
        weight, bias = self.all[f"{self.prefix}{name}.weight"], self.get(f"{name}.bias")
        method = partial(F.linear, weight=weight) if isinstance(weight, Tensor) else cast(LinearMethod, weight)
        linear = partial(method, bias=bias)
        return linear if self.adapters is None else self.adapters.linear(self.prefix + name, linear)

    def takes_float8(self, name: str) -> bool:
        """Whether the `linear` is to be given `Float8Rows` where these cost nothing. Adapters are multiplied with what is not rounded."""
        return self.adapters is None and getattr(self.all[f"{self.prefix}{name}.weight"], "takes_float8", False)

    def experts(self, name: str) -> ExpertLinear:
        return ExpertLinear(cast("Tensor | Codes", self.all[f"{self.prefix}{name}.weight"]), self.get(f"{name}.bias"))


class Normalize:
    """A norm over the last dimension of activations."""

    def __init__(self, norm: Norm, weights: Weights, name: str, ops: LayerOps, size: int = 0) -> None:
        """`size`: of the dimension, for a norm without weights."""
        self._norm = norm
        self._ops = ops
        stored = f"{name}.weight"
        if norm.weighted:
            self.weight = weights.plus_one(stored) if norm.unit_offset else weights[stored]
        else:
            self.weight = weights.ones(size)
        self._bias = weights.get(f"{name}.bias")

    def float8(self, x: Tensor, residual: Tensor | None) -> Float8Rows:
        """What the norm of x makes, or that of its sum with a residual, which the sum overwrites."""
        if self._norm.kind is NormKind.RMS:
            return self._ops.rms_norm_float8(x, residual, self.weight, self._norm.eps)
        return self._ops.float8(self(x if residual is None else residual.add_(x)))

    def __call__(self, x: Tensor) -> Tensor:
        if self._norm.kind is NormKind.RMS:
            return self._ops.rms_norm(x, self.weight, self._norm.eps)
        return F.layer_norm(x, x.shape[-1:], self.weight, self._bias, self._norm.eps)

    def by_group(self, x: Tensor, groups: int, collectives: Collectives | None) -> Tensor:
        """The norm of [T, width], whose equal parts are normed apart. Where the weight is that of all ranks, each of which has as many
        columns, all of these are normed together."""
        assert self._norm.kind is NormKind.RMS, "the only kind that models have"
        wide, weight = x.float().view(len(x), groups, -1), self.weight
        mean = wide.square().mean(-1, keepdim=True)
        if collectives is not None and len(weight) > x.shape[-1]:
            size, width = collectives.shard.size, x.shape[-1]
            mean = collectives.summed(mean.flatten(1)).unsqueeze(-1) / size
            first = collectives.shard.index * len(weight) // size  # several ranks may have the same head
            weight = weight[first // width * width :][:width]
        return (weight * (wide * torch.rsqrt(mean + self._norm.eps)).flatten(1).to(weight.dtype)).to(x.dtype)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the sum of both, and the sum. Both are given up."""
        if self._norm.kind is NormKind.RMS:
            return self._ops.add_rms_norm(x, residual, self.weight, self._norm.eps)
        total = residual + x
        return self(total), total


class NormalizeHeads(Normalize):
    """A norm of [T, heads, head_dim] queries or keys, as `attention.qk_norm` says."""

    def __init__(self, attention: Attention, weights: Weights, name: str, ops: LayerOps, collectives: Collectives | None = None) -> None:
        """`collectives`: of ranks that have some of the heads each. The weight of a norm over all heads is that of all."""
        assert attention.qk_norm is not None
        super().__init__(attention.qk_norm.norm, weights, name, ops, attention.head_dim)
        self._qk_norm = attention.qk_norm
        self._collectives = collectives

    def __call__(self, heads: Tensor) -> Tensor:
        tokens, num_heads, head_dim = heads.shape
        if self._qk_norm.whole and self._collectives is not None:
            return self.by_group(heads.flatten(1), 1, self._collectives).view(heads.shape)
        if self._qk_norm.whole:
            return super().__call__(heads.flatten(1)).view(tokens, num_heads, head_dim)
        if self._qk_norm.head_weights:
            assert self._norm.kind is NormKind.LAYER, "the only kind that models have with weights for each head"
            return F.layer_norm(heads, (head_dim,), eps=self._norm.eps) * self.weight.view(num_heads, head_dim)
        return super().__call__(heads.reshape(-1, head_dim)).view(tokens, num_heads, head_dim)


class AttentionBlock:
    """Grouped-query attention of one layer, or a rank's heads of it."""

    def __init__(
        self,
        attention: Attention,
        index: int,
        weights: Weights,
        cos_sin: Tensor | None,
        ops: LayerOps,
        row_parallel: RowParallel,
        query_scales: Tensor | None = None,
    ) -> None:
        """`cos_sin` [num_positions, rotary_dim] is the table of the layer's rope, `query_scales` [num_positions] that of its
        `Attention.query_scale`. Of several ranks each has some of the heads, whose
        outputs `row_parallel` joins."""
        self._index = index
        self._ops = ops
        self._row_parallel = row_parallel
        self._head_dim, self._value_dim, kv_heads = attention.head_dim, attention.value_dim, attention.num_kv_heads
        q_size, self._has_kv, self._is_gated = attention.num_heads * attention.head_dim, not attention.kv_distance, attention.output_gate
        kv_sizes = [kv_heads * width for width in attention.kv_widths]
        self._qkv_sizes, self._num_kv = [q_size, *kv_sizes, *((q_size,) if attention.output_gate else ())], len(kv_sizes)
        self._qkv, self._output = weights.linear("qkv"), weights.linear("output")
        self.takes_float8 = weights.takes_float8("qkv")
        self._sinks, self._query_scales = weights.get("sinks"), query_scales
        self._norms: tuple[NormalizeHeads, NormalizeHeads] | None = None
        self._rotation = None if cos_sin is None else Rotation(cos_sin)
        qk_norm, self._value_norm = attention.qk_norm, None
        if attention.value_eps is not None and self._has_kv:
            ones = torch.ones_like(weights["q_norm.weight"][:1]).expand(attention.value_dim).contiguous()
            self._value_norm = partial(ops.rms_norm, weight=ones, eps=attention.value_eps)
        if qk_norm is not None:
            names = ("q_norm", "k_norm" if self._has_kv else "q_norm")
            q_norm, k_norm = (NormalizeHeads(attention, weights, name, ops, row_parallel.collectives) for name in names)
            if cos_sin is None or qk_norm.whole or qk_norm.norm.kind is not NormKind.RMS:
                self._norms = q_norm, k_norm
            else:  # the norm of each head alone is fused with the rotation
                self._rotation = Rotation(cos_sin, q_norm.weight, k_norm.weight, qk_norm.norm.eps)

    def __call__(self, x: Activations, positions: Tensor, step: AttentionStep) -> Tensor:
        qkv = torch.split(self._qkv(x), self._qkv_sizes, dim=-1)
        q = qkv[0].view(len(x), -1, self._head_dim)
        q = self._with_kv(q, qkv[1], qkv[self._num_kv], positions, step) if self._has_kv else self._query_alone(q, positions)
        if self._query_scales is not None:
            q = (q.float() * self._query_scales[positions, None, None]).to(q.dtype)
        attended = step.attend(self._index, q, self._sinks).flatten(1)
        if self._is_gated:
            attended = attended * torch.sigmoid(qkv[-1])
        return self._row_parallel.after(self._output(self._row_parallel.before(attended)))

    def _with_kv(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """The queries, normed and rotated; keys and values are written."""
        k, v = k.view(len(q), -1, self._head_dim), v.view(len(q), -1, self._value_dim)
        if self._norms is not None:
            q, k = self._norms[0](q), self._norms[1](k)
        if self._value_norm is not None:
            v = self._value_norm(v.reshape(-1, self._value_dim)).view(v.shape)
        target = step.target(self._index)
        if self._rotation is not None and target is not None:
            return self._ops.rotate_and_write(q, k, v, self._rotation, positions, target)
        if self._rotation is not None:
            q, k = self._ops.rotate(q, k, self._rotation, positions)
        step.write(self._index, k, v)
        return q

    def _query_alone(self, q: Tensor, positions: Tensor) -> Tensor:
        if self._norms is not None:
            q = self._norms[0](q)
        return q if self._rotation is None else self._ops.rotate(q, q[:, :0], self._rotation, positions)[0]


class ConvolutionBlock:
    """A gated short convolution, which stands where other layers have attention."""

    def __init__(self, convolution: ShortConvolution, places: range, weights: Weights, row_parallel: RowParallel) -> None:
        """`places`: those of its inputs in KV pages. Of several ranks each has some of the channels, whose outputs `row_parallel` joins."""
        self._row_parallel = row_parallel
        self._channels, self._places = convolution.channels, places
        self._inputs, self._output = weights.linear("conv_in"), weights.linear("conv_out")
        self._weight, self._bias = weights["conv.weight"], weights.get("conv.bias")
        self.takes_float8 = weights.takes_float8("conv_in")

    def __call__(self, x: Activations, positions: Tensor, step: AttentionStep) -> Tensor:
        b, c, x = torch.split(self._inputs(x), self._channels, dim=-1)
        convolved = c * step.convolve(self._places, b * x, self._weight, self._bias)
        return self._row_parallel.after(self._output(self._row_parallel.before(convolved)))


class RecurrenceBlock:
    """The recurrence of one layer, or a rank's heads of it."""

    takes_float8 = False

    def __init__(self, recurrence: Recurrence, index: int, weights: Weights, ops: LayerOps, row_parallel: RowParallel) -> None:
        """`index`: among the recurrent layers. Of several ranks each has some of the heads, whose outputs `row_parallel` joins."""
        self._recurrence, self._index = recurrence, index
        self._row_parallel = row_parallel
        is_mamba1, is_kimi = recurrence.kind is RecurrenceKind.MAMBA1, recurrence.kind is RecurrenceKind.KIMI_DELTA
        self._in, self._out = weights.linear("recur_in"), weights.linear("recur_out")
        self._gates = weights.linear("recur_gates") if recurrence.num_gates else None
        self._decay = [weights.linear(name) for name in ("decay_down", "decay_up") if is_mamba1 or is_kimi]
        self._z = [weights.linear(name) for name in ("z_down", "z_up") if is_kimi]
        self._norm = None if recurrence.norm is None else Normalize(recurrence.norm, weights, "recur_norm", ops)
        names, norm = ("gate_q_norm", "gate_k_norm", "decay_norm"), recurrence.gate_norm
        self._gate_norms = [] if norm is None else [Normalize(norm, weights, name, ops) for name in names]
        if recurrence.kind is RecurrenceKind.LIGHTNING:
            device = weights["recur_norm.weight"].device
            conv, log_decay = torch.ones(recurrence.channels, 1, device=device), torch.tensor(recurrence.slopes, device=device).log()
        else:
            conv, log_decay = weights["conv.weight"], weights["log_decay"]
        self._rule = RecurrentRule(
            *(recurrence.num_heads, recurrence.num_key_heads, recurrence.key_dim, recurrence.value_dim),
            conv,
            weights.get("conv.bias"),
            log_decay,
            weights.get("step_bias"),
            weights.get("skip"),
            delta=is_kimi or recurrence.kind is RecurrenceKind.GATED_DELTA,
        )

    def __call__(self, x: Activations, positions: Tensor, step: AttentionStep) -> Tensor:
        assert isinstance(x, Tensor)
        recurrence, made_in = self._recurrence, self._in(x)
        mixed, z = made_in[:, : recurrence.channels], made_in[:, recurrence.channels :]
        for linear in self._z:
            z = linear(x if linear is self._z[0] else z)
        gates = self._gates_of_convolved if recurrence.kind is RecurrenceKind.MAMBA1 else self._gates_of(x)
        made = step.recur(self._index, self._rule, mixed, gates)
        gate = z.float().sigmoid() if recurrence.gated_by_sigmoid else F.silu(z.float())
        if recurrence.gated_first:
            gated = self._normed((made.float() * gate).to(x.dtype))
        else:
            gated = (self._normed(made).float() * gate).to(x.dtype)
        return self._row_parallel.after(self._out(self._row_parallel.before(gated)))

    def _gates_of(self, x: Tensor) -> Tensor:
        if self._gates is None:
            return x[:, :0]
        gates = self._gates(x)
        if not self._decay:
            return gates
        down, up = self._decay
        return torch.cat((gates, up(down(x))), -1)

    def _gates_of_convolved(self, convolved: Tensor) -> Tensor:
        """The gates of MAMBA1."""
        assert self._gates is not None
        x, (down, up) = self._row_parallel.gathered(convolved), self._decay
        (q, k), a = self._gates(x).chunk(2, -1), down(x)
        if self._gate_norms:
            q, k, a = (norm(part.contiguous()) for norm, part in zip(self._gate_norms, (q, k, a), strict=True))
        return torch.cat((q, k, up(a)), -1)

    def _normed(self, x: Tensor) -> Tensor:
        """`x` is [T, width]."""
        norm, groups = self._norm, self._recurrence.norm_groups
        if norm is None:
            return x
        if groups is None:
            return norm(x.reshape(-1, self._recurrence.value_dim)).view(x.shape)
        return norm.by_group(x, groups, self._row_parallel.collectives)


class _Indexer:
    """What chooses the tokens that queries see, from the hidden states and from what queries are projected from; and [T, 1, head_dim] keys
    of the index, which are kept."""

    def __init__(self, index: SparseIndex, weights: Weights, rotation: Rotation, ops: LayerOps) -> None:
        self._index, self._rotation, self._ops = index, rotation, ops
        self._q, self._k, self._weights = (weights.linear(name) for name in ("index_q", "index_k", "index_weights"))
        self._norm = Normalize(index.norm, weights, "index_k_norm", ops)

    def __call__(self, x: Tensor, q: Tensor, positions: Tensor) -> tuple[IndexQuery, Tensor]:
        index = self._index
        query = self._q(q).view(len(x), index.num_heads, index.head_dim)
        query, key = self._ops.rotate(query, self._norm(self._k(x)).unsqueeze(1), self._rotation, positions)
        return IndexQuery(query, self._weights(x).float() * index.num_heads**-0.5), key


class LatentAttentionBlock:
    """Multi-head latent attention of one layer."""

    takes_float8 = False

    def __init__(
        self, attention: LatentAttention, index: int, weights: Weights, cos_sin: Tensor, ops: LayerOps, row_parallel: RowParallel
    ) -> None:
        """`cos_sin` [num_positions, rope_dim] is the table of the layer's rope. Of several ranks each has some of the heads, whose outputs
        `row_parallel` joins."""
        self._attention = attention
        self._index = index
        self._ops = ops
        self._row_parallel = row_parallel
        self._q: tuple[Linear | Normalize, ...]
        if attention.q_lora_rank is None:
            self._q = (weights.linear("q"),)
        else:
            self._q = weights.linear("q_down"), Normalize(attention.norm, weights, "q_down_norm", ops), weights.linear("q_up")
        assert attention.norm.kind is NormKind.RMS, "the only kind that models have"
        norm = Normalize(attention.norm, weights, "kv_down_norm", ops)  # fused with the rotation
        self._kv_down, self._rotation = weights.linear("kv_down"), Rotation(cos_sin, key_norm=norm.weight, eps=attention.norm.eps)
        self._key_up, self._value_up = weights["key_up.weight"], weights["value_up.weight"]
        self._output = weights.linear("output")
        self._indexer = None if attention.index is None else _Indexer(attention.index, weights, Rotation(cos_sin), ops)

    def __call__(self, x: Activations, positions: Tensor, step: AttentionStep) -> Tensor:
        attention, q = self._attention, x
        assert isinstance(q, Tensor)
        *before, last = self._q
        for layer in before:
            q = layer(q)
        index, found = 0, None
        if self._indexer is not None:
            assert isinstance(x, Tensor)
            found = self._indexer(x, q, positions)
            index = found[1].shape[-1]
        heads = last(q).view(len(x), attention.num_heads, attention.rope_dim + attention.nope_dim)
        query = heads.new_empty(len(x), attention.num_heads, index + attention.rope_dim + attention.kv_lora_rank)
        if index:
            query[..., :index] = 0.0
        latent = query[..., index:]  # what is before it multiplies the keys of the index
        rope, target, key = slice(attention.rope_dim), step.target(self._index) if found is None else None, self._kv_down(x).unsqueeze(1)
        self._ops.rotate_latent(heads[..., rope], latent[..., rope], key, self._rotation, positions, target)
        if target is None:
            written = key if found is None else torch.cat((found[1], key), -1)
            step.write(self._index, written, key[..., attention.rope_dim :])
        _by_head(heads[..., attention.rope_dim :], self._key_up, latent[..., attention.rope_dim :])
        attended = step.attend(self._index, query, index=None if found is None else found[0])
        values = attended.new_empty(len(x), attention.num_heads, attention.v_dim)
        _by_head(attended, self._value_up, values)
        return self._row_parallel.after(self._output(self._row_parallel.before(values.flatten(1))))


def _by_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """[T, heads, in] times [heads, out, in] to `out` [T, heads, out], whose last dimension is contiguous."""
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))


class HeadInputs:
    def __init__(self, head: DraftHead, weights: Weights, ops: LayerOps) -> None:
        self._norms = [Normalize(head.norm, weights, name, ops) for name in ("embedding_norm", "hidden_norm")]
        self._combine = weights.linear("combine") if head.kind is HeadKind.MTP else None
        self._normed_residual = head.normed_residual

    def __call__(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """[T, hidden_size] each, given up -> what q, k and v of the layer are projected from, and the residual it begins with. None: they
        are projected from the normed residual."""
        normed = self._norms[1](hidden)
        x = torch.cat((self._norms[0](embedded), normed), -1)
        if self._combine is not None:
            return None, self._combine(x)
        return x, normed if self._normed_residual else hidden
