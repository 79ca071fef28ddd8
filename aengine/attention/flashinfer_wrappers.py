"""FlashInfer's two paged attention wrappers as this engine uses them: planned with host arrays, run over NHD pages.

Owns the arguments of every `plan` and `run`, the workspaces, and the event that keeps a plan from overwriting the host buffer of the one
before while it is copied. Knows nothing of steps, layers or where KV comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aengine.attention.base import AttentionSpec
from aengine.attention.flashinfer_library import host_tensors, require_int32
from aengine.attention.flashinfer_workspace import PlanBounds
from aengine.attention.metadata import AttentionMetadata, StepLayout
from aengine.kernels.paged_cache import PagedCache, Scoring


@dataclass(frozen=True, slots=True)
class Rows:
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
    def of(cls, host: StepLayout, kv_indices: Tensor, begin: int, end: int) -> Rows:
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

    def plan(self, rows: Rows, group: int) -> None:
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

    def plan(self, rows: Rows, group: int) -> None:
        """For the rows' pages in a group."""
        self._plan(
            qo_indptr=rows.qo_indptr,
            paged_kv_indptr=rows.kv_indptr,
            paged_kv_indices=rows.kv_indices[group],
            paged_kv_last_page_len=rows.last_page_len,
            seq_lens=rows.seq_lens if self._needs_seq_lens else rows.longest,
            max_token_per_sequence=rows.most_queries,
        )
