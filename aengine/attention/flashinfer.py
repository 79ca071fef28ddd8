"""Attention through FlashInfer: decode rows by its decode wrapper on tensor cores, all others by its prefill wrapper.

Owns the KV tensors, per layer K and V each [num_pages, page_size, num_kv_heads, head_dim], and what is planned when. Wrappers
hold the plan of one step, so everything here belongs to one thread and one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention.base import AttentionSpec, AttentionStep, BackendUnavailableError, GraphStep
from aengine.attention.flashinfer_library import (
    Event,
    FlashInfer,
    building,
    host_tensors,
    load_flashinfer,
    new_event,
    require_int32,
    require_kernels,
)
from aengine.attention.flashinfer_workspace import Processors
from aengine.attention.flashinfer_wrappers import DecodeWrapper, PrefillWrapper, Rows, WrapperSetup
from aengine.attention.kv_write import kv_write_for
from aengine.attention.metadata import AttentionMetadata, StepLayout, build_layout

Decodes = dict[int | None, DecodeWrapper]  # by window


class FlashInferBackend:
    """See the module. Satisfies `AttentionBackend`.

    Construction builds and loads what the model needs and runs every call once, so that nothing is compiled or allocated for the first time
    while a graph is captured. `library`, `event` and `processors` stand in for the installed package, its device's events and its device in
    tests.
    """

    name = "flashinfer"

    def __init__(
        self,
        spec: AttentionSpec,
        library: FlashInfer | None = None,
        event: Callable[[], Event] | None = None,
        processors: Processors | None = None,
    ) -> None:
        """Raises BackendUnavailableError for a model it has no kernels for, and where FlashInfer is missing or cannot be built."""
        require_kernels(spec.dtype, spec.head_dim)
        if spec.cache_dtype not in (spec.dtype, torch.float8_e4m3fn):
            raise BackendUnavailableError(f"FlashInfer reads a KV cache of {spec.dtype} or float8_e4m3fn here, not {spec.cache_dtype}")
        library = library or load_flashinfer(spec.device)
        self.spec = spec
        self._caches: list[tuple[Tensor, Tensor]] = []
        self._kv_write = kv_write_for(spec.device)
        with building(library, "attention", spec.device):
            self._setup = WrapperSetup(library, spec, event or partial(new_event, spec.device), processors or Processors.of(spec.device))
            windows = dict.fromkeys(spec.windows)
            self._decodes = {window: DecodeWrapper(self._setup, window) for window in windows}
            self._prefills = {window: PrefillWrapper(self._setup, window) for window in windows}
            self._run_once()

    def bytes_per_page(self) -> int:
        spec = self.spec
        return 2 * len(spec.windows) * spec.page_size * spec.num_kv_heads * spec.head_dim * spec.cache_dtype.itemsize

    def allocate(self, num_pages: int) -> None:
        self._caches = []  # the old pool goes before the new one comes
        spec = self.spec
        shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)

        def zeros() -> Tensor:
            return torch.zeros(shape, dtype=spec.cache_dtype, device=spec.device)

        self._caches = [(zeros(), zeros()) for _ in spec.windows]

    def copy_pages(self, sources: NDArray[np.int32], destinations: NDArray[np.int32]) -> None:
        host = host_tensors({"sources": sources, "destinations": destinations}, self.spec.device)
        read, write = (pages.to(self.spec.device, non_blocking=True).long() for pages in host)
        for cache in (tensor for pair in self._caches for tensor in pair):
            words = cache.view(len(cache), -1).view(torch.int64)  # the same copy for every dtype; a page is a multiple of 8 bytes
            words.index_copy_(0, write, words.index_select(0, read))

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        # All windows are planned here and not by the first layer that asks: the next plan waits for the copies of this one, which must
        # therefore lie at the head of the step, and nothing is planned within a captured forward pass.
        host = metadata.host
        require_int32(kv_indices=metadata.kv_indices, slot_mapping=metadata.slot_mapping)
        if host.num_decodes:
            rows = Rows.of(host, metadata.kv_indices, 0, host.num_decodes)
            for decode in self._decodes.values():
                decode.plan(rows)
        if host.num_decodes < host.num_rows:
            rows = Rows.of(host, metadata.kv_indices, host.num_decodes, host.num_rows)
            for prefill in self._prefills.values():
                prefill.plan(rows)
        return _Step(self, metadata.slot_mapping, self._decodes, host.num_decodes)

    def graph_step(self, buffers: AttentionMetadata) -> GraphStep | None:
        require_int32(
            kv_indptr=buffers.kv_indptr,
            kv_indices=buffers.kv_indices,
            last_page_len=buffers.last_page_len,
            slot_mapping=buffers.slot_mapping,
        )
        decodes = {window: DecodeWrapper(self._setup, window, buffers) for window in self._decodes}
        return _GraphStep(self, buffers, decodes)

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """As `AttentionStep.write`, at `slots`."""
        key_cache, value_cache = self._caches[layer]
        self._kv_write(key, value, key_cache, value_cache, slots, self.spec.scales(layer))

    def attend(self, layer: int, query: Tensor, decodes: Decodes, num_decodes: int) -> Tensor:
        """As `AttentionStep.attend`: the first `num_decodes` queries by `decodes`, the others by the prefill wrappers, as planned last."""
        window, scales = self.spec.windows[layer], self.spec.scales(layer)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if num_decodes:
            decodes[window].run(query[:num_decodes], *self._caches[layer], scales, out[:num_decodes])
        if num_decodes < len(query):
            self._prefills[window].run(query[num_decodes:], *self._caches[layer], scales, out[num_decodes:])
        return out

    def _run_once(self) -> None:
        """A step of a decoding row and a prefill of two tokens, on a pool of its own, in one layer of every window."""
        spec = self.spec
        table = np.array([[1, 0], [2, 3]], dtype=np.int32)
        starts, lengths = np.zeros(2, dtype=np.int32), np.array([1, 2], dtype=np.int32)
        layout = build_layout(np.arange(2, dtype=np.int32), 1, starts, lengths, table, spec.page_size)
        names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")
        tensors = [torch.from_numpy(getattr(layout, name)).to(spec.device) for name in names]
        self.allocate(4)
        step = self.plan(AttentionMetadata(layout, *tensors))
        query = torch.zeros(3, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
        new = query[:, : spec.num_kv_heads]
        for layer in (spec.windows.index(window) for window in self._decodes):
            step.write(layer, new, new)
            step.attend(layer, query)
        self._caches = []


@dataclass(frozen=True, slots=True)
class _Step:
    backend: FlashInferBackend
    slots: Tensor
    decodes: Decodes
    num_decodes: int

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.backend.write(layer, key, value, self.slots)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        return self.backend.attend(layer, query, self.decodes, self.num_decodes)


class _GraphStep:
    def __init__(self, backend: FlashInferBackend, buffers: AttentionMetadata, decodes: Decodes) -> None:
        self._backend = backend
        self._buffers = buffers
        self._num_rows = len(buffers.last_page_len)
        self._decodes = decodes

    def prepare(self, layout: StepLayout) -> None:
        """Raises ValueError for a layout that is not one query for each row of the buffers."""
        if not layout.num_rows == layout.num_decodes == layout.num_tokens == self._num_rows:
            found = f"{layout.num_rows} rows, {layout.num_decodes} decodes, {layout.num_tokens} tokens"
            raise ValueError(f"layout: {found}; the graph is for {self._num_rows} decode rows")
        # Page ids are handed over in the very buffer that they are wanted in, so nothing is copied for them.
        rows = Rows.of(layout, self._buffers.kv_indices, 0, self._num_rows)
        for decode in self._decodes.values():
            decode.plan(rows)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._backend.write(layer, key, value, self._buffers.slot_mapping)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        return self._backend.attend(layer, query, self._decodes, self._num_rows)
