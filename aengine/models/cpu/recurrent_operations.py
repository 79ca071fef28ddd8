"""What recurrent layers are in the programs of the CPU kernels: the projections around their states, and the operations on these.

Owns the order of these operations, which is that of `Recurrence`. Knows nothing of what stands before and behind a layer's mixers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.cpu import library
from aengine.kernels.cpu.library import CGateOp, CNorm, CRecurOp, CStateLayer
from aengine.kernels.recurrence import StateLayout
from aengine.models.cpu.cpu_operations import Captured, Operations
from aengine.models.cpu.packed_weights import PackedWeights
from aengine.models.sharding import Bounds, is_normed_whole, recurrence_bounds
from aengine.models.spec import Norm, Recurrence, RecurrenceKind

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
