"""Our own paged attention in Triton: for CUDA where FlashInfer is missing or has no kernels for a model.

Owns what a step launches; the kernels are in `aengine/kernels/triton`. Importing this needs triton.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aengine.attention.base import (
    AttentionBackend,
    AttentionSpec,
    AttentionStep,
    BackendUnavailableError,
    GraphStep,
    check_graph_layout,
    first_line,
)
from aengine.attention.metadata import AttentionMetadata, StepLayout
from aengine.attention.triton_decodes import GraphDecodes, PlannedDecodes, TritonDecodes, blocks_of
from aengine.kernels.paged_cache import KvTarget
from aengine.kernels.triton import attention as kernels
from aengine.kernels.triton import kv_write
from aengine.kernels.upload import to_device

_INTERPRETED_PROCESSORS = 16  # of a small device, so that work is divided in tests as it is on one


class TritonBackend(AttentionBackend):
    """Runs on CUDA, and on a CPU in Triton's interpreter, which is for tests. Caches are [num_pages, page_size, num_kv_heads, width]."""

    name = "triton"

    def __init__(self, spec: AttentionSpec, blocks: kernels.Blocks | None = None) -> None:
        """Compiles and runs every kernel of the model once.

        Raises BackendUnavailableError where Triton cannot compile, and for a model it has no kernels for.
        """
        if not kernels.runs_on(spec.device):
            raise BackendUnavailableError(f"Triton has no kernels for device {spec.device.type}")
        if spec.cache_dtype is torch.int8:
            raise BackendUnavailableError(f"our Triton kernels read a KV cache of {spec.dtype} or float8_e4m3fn, not {spec.cache_dtype}")
        if not kernels.fits(spec.head_dim, spec.value_dim):
            widths = f"keys of {spec.head_dim} and values of {spec.value_dim} numbers"
            raise BackendUnavailableError(f"our Triton kernels have no room for {widths}")
        super().__init__(spec)
        on_cuda = spec.device.type == "cuda"
        try:
            self.blocks = blocks or blocks_of(spec)
            processors = torch.cuda.get_device_properties(spec.device).multi_processor_count if on_cuda else _INTERPRETED_PROCESSORS
            self.decodes = TritonDecodes(spec, processors, self.blocks)
            self._run_once(self.plan, decoded=self.decodes.bounds.least_keys + 1)  # a row that is split, if any is
        except Exception as error:  # whatever a compiler, its absence, or a driver has to say
            raise BackendUnavailableError(f"our Triton kernels do not run here: {first_line(error)}") from error

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        return _Step(self, metadata, self.decodes.plan(metadata) if metadata.host.num_decodes else None)

    def graph_step(self, buffers: AttentionMetadata) -> GraphStep | None:
        check_graph_layout(buffers.host, buffers)
        return _GraphStep(self, buffers, self.decodes.graph(buffers))


class _Step:
    def __init__(self, backend: TritonBackend, metadata: AttentionMetadata, decodes: PlannedDecodes | None) -> None:
        host, spec = metadata.host, backend.spec
        self._backend = backend
        self._metadata = metadata
        self._decodes = decodes
        self._lists = [kernels.PageLists(metadata.kv_indptr, indices, metadata.last_page_len) for indices in metadata.kv_indices]
        self._tiles: Tensor | None = None  # of all rows that are not decoding
        if host.num_decodes < host.num_rows:
            lengths = np.diff(host.qo_indptr[host.num_decodes :])
            seq_lens = host.seq_lens[host.num_decodes :]
            tiles = kernels.prefill_tiles(lengths, seq_lens, host.num_decodes, spec.num_heads // spec.num_kv_heads, backend.blocks)
            self._tiles = to_device(tiles, spec.device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        kv_write.write(key, value, self.target(layer))

    def target(self, layer: int) -> KvTarget:
        group, _ = self._backend.spec.places[layer]
        return KvTarget(self._backend.caches[layer], self._metadata.slot_mapping[group])

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        backend = self._backend
        cache, scoring, blocks = backend.caches[layer], backend.spec.scoring[layer], backend.blocks
        out = query.new_empty(*query.shape[:2], backend.spec.value_dim) if out is None else out
        if self._decodes is not None:
            self._decodes.attend(layer, query, out, cache, sinks)
        if self._tiles is not None:
            lists = self._lists[backend.spec.places[layer][0]]
            kernels.attend_prefills(query, out, cache, lists, self._metadata.qo_indptr, self._tiles, scoring, sinks, blocks)
        return out


class _GraphStep(_Step):
    def __init__(self, backend: TritonBackend, buffers: AttentionMetadata, decodes: GraphDecodes) -> None:
        super().__init__(backend, buffers, decodes)
        self._graph_decodes = decodes

    def prepare(self, layout: StepLayout) -> None:
        check_graph_layout(layout, self._metadata)
        self._graph_decodes.prepare(layout)
