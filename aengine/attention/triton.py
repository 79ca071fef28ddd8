"""Our own paged attention in Triton: for CUDA where FlashInfer is missing or has no kernels for a model.

Owns the KV tensors and what a step launches; the kernels are in `aengine/kernels/triton`. Layout per layer, for K and V each:
[num_pages, page_size, num_kv_heads, head_dim]. The kernels read pages and lengths on the device, so decode steps are not planned at all:
a graph of them needs new index arrays in its buffers and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention.base import AttentionSpec, AttentionStep, BackendUnavailableError, GraphStep
from aengine.attention.metadata import AttentionMetadata, StepLayout, build_layout
from aengine.kernels.upload import to_device

if TYPE_CHECKING:
    from aengine.kernels.triton.attention import PagedCache, PageLists


class TritonBackend:
    """See the module. Satisfies `AttentionBackend`. Runs on CUDA, and on a CPU in Triton's interpreter, which is for tests."""

    name = "triton"

    def __init__(self, spec: AttentionSpec) -> None:
        """Compiles and runs every kernel of the model once, so that nothing is compiled in a step.

        Raises BackendUnavailableError where Triton is missing or cannot compile, and for a model it has no kernels for.
        """
        try:
            from aengine.kernels.triton import attention as kernels
        except ImportError as error:
            raise BackendUnavailableError(f"Triton cannot be imported: {error}") from error
        if not kernels.runs_on(spec.device):
            raise BackendUnavailableError(f"Triton has no kernels for device {spec.device.type}")
        if spec.head_dim > kernels.MAX_HEAD_DIM:
            raise BackendUnavailableError(f"head_dim {spec.head_dim} is more than the {kernels.MAX_HEAD_DIM} of our Triton kernels")
        self.spec = spec
        self.blocks = kernels.Blocks.of(spec.head_dim, spec.dtype)
        self.scoring = [kernels.Scoring(spec.scale, window, spec.soft_cap) for window in spec.windows]
        self.caches: list[PagedCache] = []
        self.write = kernels.write
        self.attend_decodes = kernels.attend_decodes
        self.attend_prefills = kernels.attend_prefills
        self._new_cache = kernels.PagedCache
        self._prefill_tiles = kernels.prefill_tiles
        self._page_lists = kernels.PageLists
        on_cuda = spec.device.type == "cuda"
        try:
            self._processors = torch.cuda.get_device_properties(spec.device).multi_processor_count if on_cuda else 1
            self._run_once()
        except Exception as error:  # whatever a compiler, its absence, or a driver has to say
            raise BackendUnavailableError(f"our Triton kernels do not run here: {_first_line(error)}") from error

    def bytes_per_page(self) -> int:
        spec = self.spec
        return 2 * len(spec.windows) * spec.page_size * spec.num_kv_heads * spec.head_dim * spec.cache_dtype.itemsize

    def allocate(self, num_pages: int) -> None:
        self.caches = []  # the old pool goes before the new one comes
        self.caches = [self._cache(num_pages, layer) for layer in range(len(self.spec.windows))]

    def copy_pages(self, sources: NDArray[np.int32], destinations: NDArray[np.int32]) -> None:
        read, write = to_device(np.stack((sources, destinations)).astype(np.int64), self.spec.device)
        for cache in self.caches:
            for pages in (cache.keys, cache.values):
                raw = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages  # torch indexes no float8
                raw.index_copy_(0, write, raw.index_select(0, read))

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        return _Step(self, metadata)

    def graph_step(self, buffers: AttentionMetadata) -> GraphStep | None:
        return _GraphStep(self, buffers)

    def num_splits(self, num_rows: int) -> int:
        """Shares of each of `num_rows` decoding rows."""
        return self.blocks.num_splits(num_rows, self.spec.num_kv_heads, self._processors) if num_rows else 0

    def page_lists(self, metadata: AttentionMetadata) -> PageLists:
        return self._page_lists(metadata.kv_indptr, metadata.kv_indices, metadata.last_page_len)

    def prefill_tiles(self, host: StepLayout) -> Tensor | None:
        """Of all rows that are not decoding, on the device; None: there are none."""
        if host.num_decodes == host.num_rows:
            return None
        lengths = np.diff(host.qo_indptr[host.num_decodes :])
        group = self.spec.num_heads // self.spec.num_kv_heads
        return to_device(self._prefill_tiles(lengths, host.num_decodes, group, self.blocks), self.spec.device)

    def _cache(self, num_pages: int, layer: int) -> PagedCache:
        spec = self.spec
        shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
        float8 = spec.cache_dtype.itemsize == 1

        def zeros() -> Tensor:
            plain = torch.zeros(shape, dtype=torch.uint8 if float8 else spec.cache_dtype, device=spec.device)
            return plain.view(spec.cache_dtype)

        return self._new_cache(zeros(), zeros(), *(spec.scales(layer) if float8 else (1.0, 1.0)))

    def _run_once(self) -> None:
        """One decoding row and one of two queries, on a pool of their own, in one layer of every window."""
        spec = self.spec
        self.allocate(4)
        rows, one = np.arange(2, dtype=np.int32), np.ones(2, dtype=np.int32)
        layout = build_layout(rows, 1, 0 * one, one + rows, np.array([[1, 0], [2, 3]], dtype=np.int32), spec.page_size)
        names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")
        step = self.plan(AttentionMetadata(layout, *(to_device(getattr(layout, name), spec.device) for name in names)))
        heads = spec.num_heads + 2 * spec.num_kv_heads
        fused = torch.zeros((layout.num_tokens, heads, spec.head_dim), dtype=spec.dtype, device=spec.device)
        query, key, value = torch.split(fused, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        for layer in {window: layer for layer, window in enumerate(spec.windows)}.values():
            step.write(layer, key, value)
            step.attend(layer, query)
        self.caches = []


class _Step:
    def __init__(self, backend: TritonBackend, metadata: AttentionMetadata) -> None:
        host = metadata.host
        self._backend = backend
        self._slots = metadata.slot_mapping
        self._lists = backend.page_lists(metadata)
        self._num_decodes = host.num_decodes
        self._num_splits = backend.num_splits(host.num_decodes)
        self._qo_indptr = metadata.qo_indptr
        self._tiles = backend.prefill_tiles(host)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._backend.write(key, value, self._backend.caches[layer], self._slots)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        backend = self._backend
        cache, scoring, blocks = backend.caches[layer], backend.scoring[layer], backend.blocks
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._num_decodes:
            backend.attend_decodes(query, out, cache, self._lists, scoring, blocks, num_rows=self._num_decodes, num_splits=self._num_splits)
        if self._tiles is not None:
            backend.attend_prefills(query, out, cache, self._lists, self._qo_indptr, self._tiles, scoring, blocks)
        return out


class _GraphStep(_Step):
    """What it launches depends on the number of rows alone."""

    def __init__(self, backend: TritonBackend, buffers: AttentionMetadata) -> None:
        self._num_rows, self._num_pages = len(buffers.last_page_len), len(buffers.kv_indices)
        self.prepare(buffers.host)
        super().__init__(backend, buffers)

    def prepare(self, layout: StepLayout) -> None:
        if not layout.num_rows == layout.num_decodes == layout.num_tokens == self._num_rows:
            raise ValueError(
                f"a graph of {self._num_rows} decoding rows was given {layout.num_rows} rows, {layout.num_decodes} of them decoding, "
                f"with {layout.num_tokens} tokens"
            )
        if len(layout.kv_indices) > self._num_pages:
            raise ValueError(f"a graph with room for {self._num_pages} pages was given {len(layout.kv_indices)}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
