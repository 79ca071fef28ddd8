"""FlashInfer's two paged attention wrappers as this engine uses them: planned with host arrays, run over NHD pages.

Owns the arguments of every `plan` and `run`, the workspaces, and the event that keeps a plan from overwriting the host buffer of the one
before while it is copied. Knows nothing of steps, layers or where KV comes from.

Which decodes our Triton kernel computes faster than FlashInfer's: those of rows that differ much in length or share their first pages.

FlashInfer divides work into at most two thread blocks for each multiprocessor. So where rows times KV heads are as many, no row is split,
and a long one is the work of a single block. Our kernel divides work by length, and reads shared pages once for several rows. Owns the
estimate of both, in keys that a multiprocessor reads one after another; numpy on the host. Knows nothing of kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.attention.flashinfer.library import PlanBounds, host_tensors, require_int32
from aengine.attention.metadata import AttentionMetadata, AttentionSpec, StepLayout
from aengine.kernels.paged_cache import PagedCache, Scoring


@dataclass(frozen=True, slots=True)
class WrapperRows:
    """The n consecutive rows of a step that one wrapper computes, int32; host tensors are read until the plan is on the device.

    fa2's planner reads no `seq_lens` but their number of pages. Before that a wrapper takes their maximum, up to 0.6 with Python's max(),
    which costs microseconds for each row: so it is given `longest` instead.
    """

    qo_indptr: Tensor  # [n+1] host, from 0
    kv_indptr: Tensor  # [n+1] host, from 0, in pages
    kv_indices: Tensor  # [groups, kv_indptr[n]] device
    last_page_len: Tensor  # [n] host, 1..page_size
    seq_lens: Tensor  # [n] host
    longest: Tensor  # [1] host, the largest of `seq_lens`
    most_queries: int  # of a row

    @classmethod
    def of(cls, host: StepLayout, kv_indices: Tensor, begin: int, end: int) -> WrapperRows:
        """Rows begin..end-1 of a layout, at least one, whose `kv_indices` are on the device, too."""
        first_page, last_page = int(host.kv_indptr[begin]), int(host.kv_indptr[end])
        require_int32(kv_indices=kv_indices)
        queries = host.qo_indptr[begin : end + 1] - host.qo_indptr[begin]
        arrays = {
            "qo_indptr": queries,
            "kv_indptr": host.kv_indptr[begin : end + 1] - host.kv_indptr[begin],
            "last_page_len": host.last_page_len[begin:end],
            "seq_lens": host.seq_lens[begin:end],
            "longest": host.seq_lens[begin:end].max(keepdims=True),
        }
        qo_indptr, kv_indptr, last_page_len, seq_lens, longest = host_tensors(arrays, kv_indices.device)
        most_queries = int(np.diff(queries).max())
        return cls(qo_indptr, kv_indptr, kv_indices[:, first_page:last_page], last_page_len, seq_lens, longest, most_queries)


class WrapperSetup:
    """What wrappers are built from. All wrappers of a setup share the float workspace, so they run on one stream."""

    def __init__(self, library: ModuleType, spec: AttentionSpec, new_event: Callable[[], torch.cuda.Event], device: Any) -> None:
        """`device`: its properties, as in `PlanBounds`."""
        self.library = library
        self.spec = spec
        self.new_event = new_event
        self.bounds = PlanBounds(spec, device)
        self.float_workspace = self._zeros(self.bounds.float_bytes())
        self._for_graphs = self.float_workspace

    def graph_workspace(self, size: int) -> Tensor:
        """A float workspace of at least `size` bytes. If it must be a new one, graphs that are captured already keep theirs."""
        if len(self._for_graphs) < size:
            self._for_graphs = self._zeros(size)
        return self._for_graphs

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.spec.device)


class _PagedWrapper:
    """One wrapper of FlashInfer for the layers of one `Scoring`.

    Its `plan` fills a pinned buffer and starts a copy of it to the device on the current stream. If it planned again before that copy has
    run, the earlier step would read the later plan. So an event is recorded after every plan and waited for before the next; the copy is
    the first work of its step, so with one step of look-ahead the wait is short.
    """

    def __init__(self, setup: WrapperSetup, scoring: Scoring, wrapper: Any, **plan_arguments: Any) -> None:
        """`plan_arguments` are passed to each plan, beside those that all wrappers have."""
        spec = setup.spec
        self._wrapper = wrapper
        self._copied = setup.new_event()
        self._plan_arguments = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "page_size": spec.page_size,
            "pos_encoding_mode": "NONE",
            "window_left": -1 if scoring.window is None else scoring.window - 1,  # FlashInfer's does not count the query itself
            "logits_soft_cap": scoring.soft_cap or None,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.cache_dtype,
            "o_data_type": spec.dtype,
            "sm_scale": scoring.scale,
            "non_blocking": True,
        } | plan_arguments

    def _plan(self, **arguments: Any) -> None:
        self._copied.synchronize()
        try:
            self._wrapper.plan(**arguments, **self._plan_arguments)
        finally:
            self._copied.record()

    def run(self, query: Tensor, cache: PagedCache, out: Tensor) -> None:
        """Attention of the planned rows' [t, num_heads, head_dim] queries, last dimension contiguous, into `out`, contiguous."""
        # Scales are floats: a tensor would be read by the host, and a 1 that is no float costs a kernel.
        scales = {"k_scale": float(cache.key_scale), "v_scale": float(cache.value_scale)}
        self._wrapper.run(q=query, paged_kv_cache=(cache.keys, cache.values), **scales, out=out)


class DecodeWrapper(_PagedWrapper):
    """Computes rows of one query each. With `buffers` (device arrays of a fixed number of rows) it is for graphs that read those of a
    group: a plan updates the buffers, and what is launched depends on their sizes alone."""

    def __init__(self, setup: WrapperSetup, scoring: Scoring, buffers: AttentionMetadata | None = None, group: int = 0) -> None:
        # Not "auto": tensor cores support every number of query heads per KV head, and fa2 decodes faster than fa3.
        arguments: dict[str, Any] = {"kv_layout": "NHD", "use_tensor_cores": True, "backend": "fa2"}
        if buffers is not None:
            arguments |= {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": buffers.kv_indptr,
                "paged_kv_indices_buffer": buffers.kv_indices[group],
                "paged_kv_last_page_len_buffer": buffers.last_page_len,
            }
        wrapper = setup.library.BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer=setup.float_workspace, **arguments)
        if buffers is not None:
            rows = len(buffers.last_page_len)
            own = torch.empty(setup.bounds.graph_int_bytes(rows), dtype=torch.uint8, device=setup.spec.device)  # instead of 8 MiB
            shared = setup.graph_workspace(setup.bounds.graph_float_bytes(rows))
            wrapper.reset_workspace_buffer(float_workspace_buffer=shared, int_workspace_buffer=own)
        super().__init__(setup, scoring, wrapper, head_dim=setup.spec.head_dim)

    def plan(self, rows: WrapperRows, group: int) -> None:
        """For the rows' pages in a group."""
        self._plan(indptr=rows.kv_indptr, indices=rows.kv_indices[group], last_page_len=rows.last_page_len, seq_lens=rows.longest)


class PrefillWrapper(_PagedWrapper):
    """Computes rows of any number of queries, which are the last tokens of their row, by FlashInfer's kernels `kernel`: fa2 or fa3."""

    def __init__(self, setup: WrapperSetup, scoring: Scoring, kernel: str = "fa2") -> None:
        wrapper = setup.library.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=setup.float_workspace, kv_layout="NHD", backend=kernel
        )
        super().__init__(setup, scoring, wrapper, head_dim_qk=setup.spec.head_dim, causal=True)
        self._needs_seq_lens = kernel == "fa3"

    def plan(self, rows: WrapperRows, group: int) -> None:
        """For the rows' pages in a group."""
        self._plan(
            qo_indptr=rows.qo_indptr,
            paged_kv_indptr=rows.kv_indptr,
            paged_kv_indices=rows.kv_indices[group],
            paged_kv_last_page_len=rows.last_page_len,
            seq_lens=rows.seq_lens if self._needs_seq_lens else rows.longest,
            max_token_per_sequence=rows.most_queries,
        )


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
            (group for (group, _), scoring in zip(self.spec.places, self.spec.scoring, strict=False) if scoring.window is None), None
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
