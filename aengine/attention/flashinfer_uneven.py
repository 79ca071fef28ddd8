"""Which decodes our Triton kernel computes faster than FlashInfer's: those of rows that differ much in length or share their first pages.

FlashInfer divides work into at most two thread blocks for each multiprocessor. So where rows times KV heads are as many, no row is split,
and a long one is the work of a single block. Our kernel divides work by length, and reads shared pages once for several rows. Owns the
estimate of both, in keys that a multiprocessor reads one after another; numpy on the host. Knows nothing of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aengine.attention.base import AttentionSpec
from aengine.attention.metadata import StepLayout

_LEAST_GAIN = 512
"""Keys: a tenth of a millisecond in ten layers. Our kernel has one more launch, and graphs of uneven steps have more padding rows."""
_LEAST_RATIO = 1.5
_LEAST_CHUNK = 128  # keys: FlashInfer splits rows into no smaller parts


@dataclass(frozen=True, slots=True)
class UnevenDecodes:
    """The estimate for a model on a device with so many multiprocessors."""

    spec: AttentionSpec
    processors: int

    def has(self, layout: StepLayout) -> bool:
        """Whether our kernel is worth it for the decode rows of a layout, at least one."""
        count = layout.num_decodes
        lengths = self._seen(layout.seq_lens[:count])
        total, longest = int(lengths.sum()), int(lengths.max())
        even, ours = self._evenly(total), self._evenly(total - self._shared(layout))
        if not _worth(max(even, longest), ours):
            return False
        return _worth(max(even, self.longest_part(lengths)), ours)

    def _seen(self, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """Keys that rows of these lengths read in the layers that read most."""
        windows = [scoring.window for scoring in self.spec.scoring]
        return lengths if None in windows else np.minimum(lengths, max(window for window in windows if window))

    def _evenly(self, keys: int) -> float:
        """What a multiprocessor reads if all read as much."""
        return keys * self.spec.num_kv_heads / self.processors

    def longest_part(self, lengths: NDArray[np.int32]) -> int:
        """The part of a row that FlashInfer's fa2 planner gives a thread block: the shortest for which there are few enough parts."""
        most_parts = 2 * self.processors // self.spec.num_kv_heads
        low, high = _LEAST_CHUNK, int(lengths.max())
        if len(lengths) >= most_parts:
            return high
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if int((-(-lengths // middle)).sum()) > most_parts else (low, middle)
        return min(low, int(lengths.max()))

    def _shared(self, layout: StepLayout) -> int:
        """How many keys need not be read again, where rows share the first half of an average row: those with the same page at its end,
        because pages are shared as prefixes."""
        group = next(
            (group for (group, _), scoring in zip(self.spec.places, self.spec.scoring, strict=True) if scoring.window is None), None
        )
        begins = layout.kv_indptr[: layout.num_decodes]
        column = int(layout.kv_indptr[layout.num_decodes]) // (2 * layout.num_decodes) - 1
        if group is None or (column + 1) * layout.page_size < _LEAST_CHUNK:
            return 0
        reached = begins[np.diff(layout.kv_indptr[: layout.num_decodes + 1]) > column]
        distinct = len(np.unique(layout.kv_indices[group].take(reached + column)))
        return (len(reached) - distinct) * (column + 1) * layout.page_size


def _worth(theirs: float, ours: float) -> bool:
    return theirs >= _LEAST_RATIO * ours + _LEAST_GAIN
