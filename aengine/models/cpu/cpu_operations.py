"""What the programs of the CPU kernels are written with: a list of operations, and the buffers of activations by name. And the operations
of recurrent layers: the projections around their states, and what is done to these, in the order that `Recurrence` says.

Owns the structs of the operations, which are those of `kernels/cpu/src/abi.h`, and all that they point to besides the weights.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import Structure
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.cache import LayerGroups
from aengine.kernels.arrays import Array, data_address
from aengine.kernels.cpu import library
from aengine.kernels.cpu.library import (
    BLOCK,
    MAX_BUFFERS,
    PANEL,
    CCopyOp,
    CGateOp,
    CGatherOp,
    CGatherRanksOp,
    CHeadsOp,
    CLinearOp,
    CNorm,
    CNormOp,
    CRecurOp,
    CStateLayer,
    CSumRanksOp,
)
from aengine.kernels.cpu.ops import PageParts, norm_weight
from aengine.kernels.paged_cache import StateLayout
from aengine.kernels.params import Activation, RouterScoring
from aengine.models.cpu.packed_weights import PackedWeights
from aengine.models.sharding import Bounds, is_normed_whole, recurrence_bounds
from aengine.models.spec import Experts, ModelSpec, Norm, NormKind, QkNorm, Recurrence, RecurrenceKind

_NORM_KINDS = {NormKind.RMS: library.RMS_NORM, NormKind.LAYER: library.LAYER_NORM}

ACTIVATIONS = {
    Activation.SILU: library.SILU,
    Activation.GELU: library.GELU,
    Activation.GELU_TANH: library.GELU_TANH,
    Activation.RELU: library.RELU,
    Activation.RELU_SQUARED: library.RELU_SQUARED,
    Activation.CLIPPED_SWIGLU: library.CLIPPED_SWIGLU,
}
SCORINGS = {RouterScoring.SOFTMAX: library.SOFTMAX, RouterScoring.SIGMOID: library.SIGMOID}


def page_parts(spec: ModelSpec, groups: LayerGroups) -> PageParts:
    """The parts of pages that a pool for the model has, with these groups."""
    return list(zip(groups.parts, (each.heads for each in spec.attentions), strict=False))


@dataclass(frozen=True, slots=True)
class Captured:
    """What steps bring of each token beside its hidden state, in columns behind it: of each layer with experts the numbers of those that it
    chose, in the bits of an element, and then residuals. All tokens of these steps are at logits indices."""

    layers: tuple[int, ...] = ()  # before which the residual is; ascending
    experts: bool = False

    def experts_of(self, spec: ModelSpec) -> dict[int, slice]:
        """The columns of each layer with experts."""
        found, first = {}, _padded(spec.hidden_size)
        for index, layer in enumerate(spec.layers if self.experts else ()):
            if isinstance(layer.mlp, Experts):
                found[index] = slice(first, first + layer.mlp.routing.top_k)
                first += layer.mlp.routing.top_k
        return found

    def residuals(self, spec: ModelSpec) -> dict[int, slice]:
        """The columns of each of the layers."""
        first = max([_padded(spec.hidden_size), *(_padded(columns.stop) for columns in self.experts_of(spec).values())])
        firsts = range(first, first + len(self.layers) * _padded(spec.hidden_size), _padded(spec.hidden_size))
        return {index: slice(first, first + spec.hidden_size) for index, first in zip(self.layers, firsts, strict=True)}


def _padded(width: int) -> int:
    return -(-width // BLOCK) * BLOCK


class Operations:
    """The base of `CpuProgram`, which calls these methods in the order of the operations."""

    def __init__(self, weights: PackedWeights, captured: Captured | None = None) -> None:
        self._captured = captured or Captured()
        self._chosen = library.NO_BUFFER, 0  # where the experts that a layer chooses go
        self._spec = weights.spec
        self._weights = weights
        self._kept_arrays: list[Array] = []  # what the operations point to besides the weights
        self._structures: list[ctypes.Array[Any]] = []
        self._norms: list[CNormOp] = []
        self._ops: list[tuple[int, Structure]] = []
        self._buffers: dict[str, int] = {}
        self._strides: list[int] = []
        self.matrices = {"embedding": library.EMBEDDING, "head": library.HEAD}
        """The numbers of the matrices that adapters add to, by name without `.weight`."""

    def _norm(
        self,
        name: str,
        norm: Norm | None,
        source: str,
        out: str,
        *,
        first: int = 0,
        width: int | None = None,
        factor: float = 1.0,
        adds: bool = False,
        multiplier: float = 1.0,
        scale: float = 1.0,
    ) -> str:
        """Writes `factor` times the norm of `width` columns (None: of hidden_size) to `out`. Or adds it, times the `multiplier`, and
        multiplies the sum by `scale`. Returns where the normed rows are: in `source` if there is no norm."""
        if norm is None:
            return source
        size = self._spec.hidden_size if width is None else width
        c_norm = self._c_norm(name, norm, size, factor=factor)
        into = self._buffers[out] if out == source else self._buffer(out, size)
        self._add(library.NORM, CNormOp(c_norm, None, first, self._buffers[source], into, adds, multiplier, scale))
        return out

    def _norm_parts(self, name: str, norm: Norm, rows: str, width: int, parts: int) -> None:
        """Normalises each of the equal parts of a buffer's `width` columns, in place."""
        size, buffer = width // parts, self._buffers[rows]
        first = self._c_norm(name, norm, size, rows=parts)
        for part in range(parts):
            c_norm = CNorm(first.weight + part * 4 * size, None, size, norm.eps, first.kind)
            self._add(library.NORM, CNormOp(c_norm, None, part * size, buffer, buffer, False, 1.0, 1.0))

    def _linear(
        self,
        name: str,
        source: str,
        out: str,
        epilogue: int = library.STORE,
        *,
        activation: int = library.SILU,
        multiplier: float = 1.0,
        weights: PackedWeights | None = None,
    ) -> None:
        """`weights`: None: the model's."""
        weight = (weights or self._weights).linears[name]
        into = self._buffer(out, weight.out_features // (2 if weight.interleaved else 1))
        matrix = library.NO_MATRIX if weights is not None else self._number(name)
        op = CLinearOp(ctypes.pointer(weight.c), matrix, self._buffers[source], into, epilogue, activation, multiplier)
        self._add(library.LINEAR, op)

    def _number(self, name: str) -> int:
        return self.matrices.setdefault(name, len(self.matrices))

    def _head_norm(self, name: str, qk_norm: QkNorm, dim: int) -> CNorm:
        return self._c_norm(name, qk_norm.norm, dim, rows=-1 if qk_norm.head_weights else 1)

    def _c_norm(self, name: str, norm: Norm, size: int, *, factor: float = 1.0, rows: int = 1) -> CNorm:
        """A norm of `size` elements, whose weights are multiplied by a factor; they are `rows` of that size (-1: as many as there are)."""
        weight = self._weights.vectors[f"{name}.weight"] if norm.weighted else np.ones(size, np.float32)
        bias = self._weights.vectors.get(f"{name}.bias")
        weights = [(weight + 1.0 if norm.unit_offset else weight) * np.float32(factor), None if bias is None else bias * np.float32(factor)]
        pointers = [None if one is None else self._keep(norm_weight(one.reshape(rows, size))) for one in weights]
        return CNorm(*pointers, size, norm.eps, _NORM_KINDS[norm.kind])

    def _gather(self, name: str) -> None:
        """From here on `name` is a buffer that has the rows of the old one at the logits indices."""
        old = self._buffers.pop(name)
        new = self._buffer(name, self._strides[old])
        self._add(library.GATHER, CGatherOp(old, new))

    def _copy(self, source: str, first: int, out: str, out_first: int, width: int) -> None:
        self._add(library.COPY, CCopyOp(first, out_first, width, self._buffers[source], self._buffer(out, out_first + width)))

    def _heads(self, name: str, num_heads: int, copied: int, source: str, out: str) -> str:
        """Multiplies what follows the first `copied` elements of each head. Returns `out`."""
        weights = self._weights.grouped[name]
        first = weights.linears[0]
        widths = copied + first.in_features, copied + first.out_features
        into = self._buffer(out, num_heads * widths[1])
        op = CHeadsOp(ctypes.addressof(weights.c), num_heads, copied, copied, widths[0], copied, widths[1], self._buffers[source], into)
        self._add(library.HEADS, op)
        return out

    def _capture(self, index: int) -> None:
        """Keeps the residual before a layer, and later its experts, in columns of the hidden states."""
        self._chosen = library.NO_BUFFER, 0
        hidden = "residual" if self._spec.norm is None else "hidden"
        if (experts := self._captured.experts_of(self._spec).get(index)) is not None:
            self._chosen = self._buffer(hidden, experts.stop), experts.start
        if (residual := self._captured.residuals(self._spec).get(index)) is not None:
            self._copy("residual", 0, hidden, residual.start, self._spec.hidden_size)

    def _gather_ranks(self, source: str, bounds: Bounds, out: str, *, first: int = 0, out_first: int = 0) -> None:
        """The columns of all ranks, which are in `source` from column `first` on, become those of `out` from `out_first` on."""
        into = self._buffer(out, out_first + bounds[-1])
        self._add(library.GATHER_RANKS, CGatherRanksOp(self._keep_bounds(bounds), first, out_first, self._buffers[source], into))

    def _sum_ranks(self, out: str, epilogue: int, multiplier: float) -> None:
        """What the operation before made as a partial result becomes the sum of all ranks."""
        size = self._spec.hidden_size
        self._add(library.SUM_RANKS, CSumRanksOp(size, self._buffer(out, size), epilogue, multiplier))

    def _keep_bounds(self, bounds: Bounds) -> int:
        return self._keep(np.array(bounds, np.int64))

    def _buffer(self, name: str, width: int) -> int:
        """The number of a buffer of activations whose rows have `width` elements at least."""
        if name not in self._buffers:
            assert len(self._strides) < MAX_BUFFERS
            self._buffers[name] = len(self._strides)
            self._strides.append(0)
        buffer = self._buffers[name]
        self._strides[buffer] = max(self._strides[buffer], -(-width // PANEL) * PANEL)
        return buffer

    def _keep(self, array: Array) -> int:
        """The address of an array, which lives as long as the program."""
        self._kept_arrays.append(array)
        return data_address(array)

    def _vector(self, name: str) -> int:
        """The address of a vector of the weights."""
        return self._keep(self._weights.vectors[name])

    def _keep_structures(self, array: ctypes.Array[Any]) -> int:
        """The address of structs, which live as long as the program."""
        self._structures.append(array)
        return ctypes.addressof(array)

    def _add(self, kind: int, item: Structure) -> None:
        """Norms that follow each other are one pass over the rows."""
        if isinstance(item, CNormOp) and self._ops and isinstance(self._ops[-1][1], CNormOp):
            self._norms[-1].next = ctypes.addressof(item)
        else:
            self._ops.append((kind, item))
        if isinstance(item, CNormOp):
            self._norms.append(item)


_RULES = {
    RecurrenceKind.GATED_DELTA: library.DELTA,
    RecurrenceKind.KIMI_DELTA: library.KIMI_DELTA,
    RecurrenceKind.MAMBA1: library.MAMBA1,
    RecurrenceKind.MAMBA2: library.MAMBA2,
    RecurrenceKind.LIGHTNING: library.MAMBA2,
}


class RecurrentOperations(Operations):
    def __init__(self, weights: PackedWeights, states: StateLayout | None, captured: Captured | None = None) -> None:
        """`states`: where recurrent layers have theirs; None: there are none."""
        super().__init__(weights, captured)
        self._shard = weights.shard
        self._states, self._num_recurrent = states, 0

    def _recur(self, name: str, recurrence: Recurrence, whole: Recurrence, source: str) -> None:
        """From `source` to `recurred`. `whole`: of all ranks."""
        self._linear(f"{name}recur_in", source, "mixed")
        kind, channels, width = recurrence.kind, recurrence.channels, recurrence.width
        self._buffer("gates", recurrence.num_gates)
        op = self._recur_op(name, recurrence)
        if kind is RecurrenceKind.MAMBA1:
            self._add(library.CONVOLVE_STATES, op)
            self._gates_of_convolved(name, recurrence, recurrence_bounds(whole, self._shard))
        elif kind is not RecurrenceKind.LIGHTNING:
            self._linear(f"{name}recur_gates", source, "gates")
        if kind is RecurrenceKind.KIMI_DELTA:
            self._linear(f"{name}decay_down", source, "rank")
            self._linear(f"{name}decay_up", "rank", "decays")
            self._copy("decays", 0, "gates", recurrence.num_heads, recurrence.num_heads * recurrence.key_dim)
            self._linear(f"{name}z_down", source, "rank")
            self._linear(f"{name}z_up", "rank", "z")
        if kind is not RecurrenceKind.MAMBA1:
            self._add(library.CONVOLVE_STATES, op)
        self._add(library.RECUR, op)
        self._add(library.KEEP_INPUTS, op)
        norm, groups, no_norm = recurrence.norm, recurrence.norm_groups, CNorm()
        first, z = (0, "z") if kind is RecurrenceKind.KIMI_DELTA else (channels, "mixed")
        gate = first, self._buffers[z], self._buffers["recurred"], recurrence.gated_by_sigmoid
        if norm is not None and groups is None:
            each = self._c_norm(f"{name}recur_norm", norm, recurrence.value_dim)
            self._add(library.GATE, CGateOp(each, recurrence.num_heads, recurrence.value_dim, *gate))
            return
        if recurrence.gated_first or norm is None:
            self._add(library.GATE, CGateOp(no_norm, 1, width, *gate))
        if norm is not None and groups is not None:
            self._norm_groups(name, norm, groups, whole, width)
        if norm is not None and not recurrence.gated_first:
            self._add(library.GATE, CGateOp(no_norm, 1, width, *gate))

    def _recur_op(self, name: str, recurrence: Recurrence) -> CRecurOp:
        """The operation of the next recurrent layer."""
        vectors, layout, channels = self._weights.vectors, self._states, recurrence.channels
        assert layout is not None
        at = layout.layers[self._num_recurrent]
        self._num_recurrent += 1
        stride = -(-channels // library.CHANNELS) * library.CHANNELS
        conv = vectors[f"{name}conv.weight"].T if recurrence.taps > 1 else np.ones((1, channels), np.float32)
        conv_bias, step_bias, skip = (vectors.get(f"{name}{which}") for which in ("conv.bias", "step_bias", "skip"))
        rates = np.array(recurrence.slopes, np.float32) if recurrence.slopes else _exp(vectors[f"{name}log_decay"])
        state = CStateLayer(
            *(at.first, at.blocks_per_piece, at.pieces_per_block, at.tail, layout.lines_per_piece, layout.pieces_per_page, at.width),
            *(recurrence.num_heads, recurrence.num_key_heads, recurrence.key_dim, recurrence.value_dim, channels, recurrence.num_gates),
            *(recurrence.taps, at.num_inputs),
        )
        return CRecurOp(
            *(state, self._keep(np.pad(np.ascontiguousarray(conv), ((0, 0), (0, stride - channels))))),
            None if conv_bias is None else self._keep(np.pad(conv_bias, (0, stride - channels))),
            self._keep(np.ascontiguousarray(rates.T) * np.float32(-math.log2(math.e)) if rates.ndim > 1 else rates),
            *(None if vector is None else self._keep(vector) for vector in (step_bias, skip)),
            *(stride, self._buffers["mixed"], self._buffer("convolved", stride), self._buffers["gates"]),
            self._buffer("recurred", recurrence.width),
            _RULES[recurrence.kind],
        )

    def _gates_of_convolved(self, name: str, recurrence: Recurrence, bounds: Bounds) -> None:
        """The gates of MAMBA1, from `convolved`, of which the ranks have some columns by `bounds`."""
        source, keys, norm = "convolved", recurrence.num_key_heads * recurrence.key_dim, recurrence.gate_norm
        if self._shard.size > 1:
            source = f"all_{source}"
            self._gather_ranks("convolved", bounds, source)
        self._linear(f"{name}recur_gates", source, "gates")
        self._linear(f"{name}decay_down", source, "rank")
        for which, rows, first in (("gate_q_norm", "gates", 0), ("gate_k_norm", "gates", keys), ("decay_norm", "rank", 0)):
            self._norm(f"{name}{which}", norm, rows, rows, first=first, width=recurrence.gate_rank if rows == "rank" else keys)
        self._linear(f"{name}decay_up", "rank", "decays")
        self._copy("decays", 0, "gates", 2 * keys, recurrence.width)

    def _norm_groups(self, name: str, norm: Norm, groups: int, whole: Recurrence, width: int) -> None:
        """Normalises equal parts of what `recurred`; of all ranks together if the parts are those of all."""
        shard = self._shard
        if not is_normed_whole(whole, shard):
            self._norm_parts(f"{name}recur_norm", norm, "recurred", width, groups)
            return
        bounds = recurrence_bounds(whole, shard)
        self._gather_ranks("recurred", bounds, "all_recurred")
        self._norm_parts(f"{name}recur_norm", norm, "all_recurred", whole.width, groups)
        self._copy("all_recurred", bounds[shard.index], "recurred", 0, width)


def _exp(logs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded from float64, so that it has the same bits on every machine."""
    return np.exp(logs.astype(np.float64)).astype(np.float32)
