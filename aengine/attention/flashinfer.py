"""Attention through FlashInfer: decode rows by its decode wrapper on tensor cores, all others by a prefill wrapper, of fa3 where that is
built and the prompts are long, else of fa2.

Owns what is planned when, over caches [num_pages, page_size, num_kv_heads, head_dim]. Wrappers hold the plan of one step, so everything
here belongs to one thread and one stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aengine.attention.base import AttentionBackend, AttentionSpec, AttentionStep, BackendUnavailableError, GraphStep, check_graph_layout
from aengine.attention.flashinfer_fa3 import missing_fa3, suits_fa3
from aengine.attention.flashinfer_library import building, load_flashinfer, require_int32, require_kernels
from aengine.attention.flashinfer_wrappers import DecodeWrapper, PrefillWrapper, Rows, WrapperSetup
from aengine.attention.metadata import AttentionMetadata, StepLayout
from aengine.kernels.paged_cache import KvTarget, Scoring, write_torch

_log = logging.getLogger("aengine")

Kind = tuple[int, Scoring]
"""The group of a layer, and how it scores keys: layers of a kind have one wrapper."""
Decodes = dict[Kind, DecodeWrapper]
Prefills = dict[Kind, PrefillWrapper]
KvWrite = Callable[[Tensor, Tensor, KvTarget], None]
"""(key, value, target): stores [T, num_kv_heads, head_dim] keys and values. What is launched does not depend on what the tensors hold, so
it may be captured in a graph."""


class FlashInferBackend(AttentionBackend):
    """See the module.

    Construction builds and loads what the model needs and runs every call once. `library`, `event` and `device` stand in for the
    installed package, its device's events and that device's properties in tests.
    """

    name = "flashinfer"

    def __init__(
        self,
        spec: AttentionSpec,
        library: ModuleType | None = None,
        event: Callable[[], torch.cuda.Event] = torch.cuda.Event,
        device: Any = None,
    ) -> None:
        """Raises BackendUnavailableError for a model without kernels, and where FlashInfer is missing or cannot be built."""
        require_kernels(spec.dtype, spec.head_dim)
        if spec.value_dim != spec.head_dim:
            raise BackendUnavailableError(
                f"FlashInfer has no kernels here for keys of {spec.head_dim} and values of {spec.value_dim} numbers"
            )
        if any(scoring.sinks for scoring in spec.scoring):
            raise BackendUnavailableError("FlashInfer's paged attention has no sinks here")
        if spec.cache_dtype not in (spec.dtype, torch.float8_e4m3fn):
            raise BackendUnavailableError(f"FlashInfer reads a KV cache of {spec.dtype} or float8_e4m3fn here, not {spec.cache_dtype}")
        library = library or load_flashinfer(spec.device)
        super().__init__(spec)
        self.kv_write = _kv_write_for(spec.device)
        with building(library, "attention", spec.device):
            self._device = device or torch.cuda.get_device_properties(spec.device)
            self._setup = WrapperSetup(library, spec, event, self._device)
            self.kinds = [(spec.places[layer][0], scoring) for layer, scoring in enumerate(spec.scoring)]  # by layer
            self._decodes = {kind: DecodeWrapper(self._setup, kind[1]) for kind in dict.fromkeys(self.kinds)}
            self._prefills = {kind: PrefillWrapper(self._setup, kind[1]) for kind in self._decodes}
            self._run_once(lambda metadata: self._planned(metadata, self._prefills))
        self._fa3_prefills = self._make_fa3(library)

    def _make_fa3(self, library: ModuleType) -> Prefills:
        """Wrappers of the fa3 kernels, which have run once; none where they cannot be had. One log line says which and why."""
        missing = missing_fa3(library, self.spec, self._device)
        if missing is None:
            try:
                with building(library, "long prompts", self.spec.device):
                    prefills = {kind: PrefillWrapper(self._setup, kind[1], "fa3") for kind in self._decodes}
                    self._run_once(lambda metadata: self._planned(metadata, prefills))
                _log.info("prompts: FlashInfer's fa3 kernels where they are long, fa2 else")
                return prefills
            except BackendUnavailableError as reason:
                self.free()
                missing = str(reason)
        _log.info("prompts: FlashInfer's fa2 kernels (not fa3: %s)", missing)
        return {}

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        host = metadata.host
        queries = np.diff(host.qo_indptr[host.num_decodes :])
        long = self._fa3_prefills and len(queries) and suits_fa3(queries, self.spec, self._device)
        return self._planned(metadata, self._fa3_prefills if long else self._prefills)

    def _planned(self, metadata: AttentionMetadata, prefills: Prefills) -> AttentionStep:
        # All wrappers are planned here and not by the first layer that needs them: the next plan waits for the copies of this one, which
        # must therefore be the first work of the step, and nothing may be planned within a captured forward pass.
        host = metadata.host
        require_int32(kv_indices=metadata.kv_indices, slot_mapping=metadata.slot_mapping)
        if host.num_decodes:
            rows = Rows.of(host, metadata.kv_indices, 0, host.num_decodes)
            for (group, _), decode in self._decodes.items():
                decode.plan(rows, group)
        if host.num_decodes < host.num_rows:
            rows = Rows.of(host, metadata.kv_indices, host.num_decodes, host.num_rows)
            for (group, _), prefill in prefills.items():
                prefill.plan(rows, group)
        return _Step(self, metadata.slot_mapping, self._decodes, host.num_decodes, prefills)

    def graph_step(self, buffers: AttentionMetadata) -> GraphStep | None:
        require_int32(
            kv_indptr=buffers.kv_indptr,
            kv_indices=buffers.kv_indices,
            last_page_len=buffers.last_page_len,
            slot_mapping=buffers.slot_mapping,
        )
        decodes = {(group, scoring): DecodeWrapper(self._setup, scoring, buffers, group) for group, scoring in self._decodes}
        return _GraphStep(self, buffers, decodes)


class _Step:
    """The first `num_decodes` queries are computed by `decodes`, the others by `prefills`."""

    def __init__(self, backend: FlashInferBackend, slots: Tensor, decodes: Decodes, num_decodes: int, prefills: Prefills) -> None:
        self._backend = backend
        self._slots = slots
        self._decodes = decodes
        self._num_decodes = num_decodes
        self._prefills = prefills

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._backend.kv_write(key, value, self.target(layer))

    def target(self, layer: int) -> KvTarget:
        group, _ = self._backend.kinds[layer]
        return KvTarget(self._backend.caches[layer], self._slots[group])

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        kind, cache, decodes = self._backend.kinds[layer], self._backend.caches[layer], self._num_decodes
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if decodes:
            self._decodes[kind].run(query[:decodes], cache, out[:decodes])
        if decodes < len(query):
            self._prefills[kind].run(query[decodes:], cache, out[decodes:])
        return out


class _GraphStep(_Step):
    def __init__(self, backend: FlashInferBackend, buffers: AttentionMetadata, decodes: Decodes) -> None:
        super().__init__(backend, buffers.slot_mapping, decodes, len(buffers.last_page_len), {})
        self._buffers = buffers

    def prepare(self, layout: StepLayout) -> None:
        check_graph_layout(layout, self._buffers)
        # The page ids are in the wrapper's own buffer already, so they are not copied.
        rows = Rows.of(layout, self._buffers.kv_indices, 0, self._num_decodes)
        for (group, _), decode in self._decodes.items():
            decode.plan(rows, group)


def _kv_write_for(device: torch.device) -> KvWrite:
    """Our Triton kernel on CUDA where triton is installed, else plain torch."""
    if device.type != "cuda":
        return write_torch
    try:
        from aengine.kernels.triton.kv_write import write
    except ImportError:
        return write_torch
    return write
