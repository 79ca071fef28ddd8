"""How large the workspaces of FlashInfer's planner must be: it raises an error during a step if one is too small.

Owns the bounds on what a plan of its fa2 kernels reserves (`PrefillPlan` in scheduler.cuh, which tensor-core decoding uses too). They are
those of 0.6.13; up to 0.7.2 later versions reserve less. Knows nothing of wrappers, steps or memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aengine.attention.base import AttentionSpec

_WIDEST, _WIDE, _NARROW = 128, 64, 16  # sizes of a tile: pairs of query and head of one KV head that a thread block computes
_SLACK = 1 << 10  # bytes for the alignment of a plan's arrays


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """Upper bounds for all plans of the attention of `spec` on a device. All sizes are bytes."""

    spec: AttentionSpec
    device: Any  # as `torch.cuda.get_device_properties` describes it

    def float_bytes(self) -> int:
        """Of partial results for any rows without a graph. Rows are split only while all parts run at once."""
        return self._float_bytes(self._most_parts, self._tile(1 << 30))

    def graph_float_bytes(self, rows: int) -> int:
        """Of partial results for a graph of so many decode rows, whose rows may always be split."""
        return self._float_bytes(self._graph_tiles(rows), self._tile(self._group))

    def graph_int_bytes(self, rows: int) -> int:
        """Of the plan's indices for a graph of so many decode rows: three int32 and a byte for each tile, two int32 for each row."""
        return self._graph_tiles(rows) * (3 * 4 + 1) + (rows + 1) * 2 * 4 + _SLACK

    @property
    def _group(self) -> int:
        return self.spec.num_heads // self.spec.num_kv_heads

    @property
    def _most_parts(self) -> int:
        return 2 * int(self.device.multi_processor_count) // self.spec.num_kv_heads

    def _graph_tiles(self, rows: int) -> int:
        return max(self._most_parts, -(-rows * self._group // self._tile(self._group)) + rows - 1)

    def _tile(self, queries: int) -> int:
        if queries > _WIDE and self.spec.head_dim < 256:
            return _WIDEST
        return _WIDE if queries > _NARROW or self.device.major < 8 else _NARROW

    def _float_bytes(self, tiles: int, tile: int) -> int:
        """Of the float32 partial results of each query of a tile in each head: its output and its log-sum-exp."""
        return self.spec.num_heads * tiles * tile * (self.spec.head_dim + 1) * 4 + _SLACK
