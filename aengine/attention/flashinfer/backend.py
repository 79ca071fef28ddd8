"""Attention through FlashInfer: decode rows by its decode wrapper on tensor cores, all others by a prefill wrapper, of fa3 where that is
built and the prompts are long, else of fa2. Decode rows of uneven lengths are computed by our Triton kernel.

Owns what is planned when, over caches [num_pages, page_size, num_kv_heads, head_dim]. Wrappers hold the plan of one step, so everything
here belongs to one thread and one stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from aengine.attention.base import (
    AttentionBackend,
    AttentionStep,
    BackendUnavailableError,
    Gates,
    GraphStep,
    IndexQuery,
    check_graph_layout,
    convolve_torch,
    first_line,
    recur_torch,
)
from aengine.attention.flashinfer.library import building, load_flashinfer, missing_fa3, require_int32, require_kernels, suits_fa3
from aengine.attention.flashinfer.wrappers import DecodeWrapper, PrefillWrapper, UnevenDecodes, WrapperRows, WrapperSetup
from aengine.attention.metadata import AttentionMetadata, AttentionSpec, StepLayout
from aengine.kernels.paged_cache import KvTarget, PagedCache, Scoring, write_torch
from aengine.kernels.recurrence import RecurrentRule

if TYPE_CHECKING:
    from aengine.attention.triton import GraphStates, TritonDecodes, TritonStates

_log = logging.getLogger("aengine")

Kind = tuple[int, Scoring]
"""The group of a layer, and how it scores keys: layers of a kind have one wrapper."""
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
        event: Callable[[], torch.cuda.Event] | None = None,
        device: Any = None,
    ) -> None:
        """Raises BackendUnavailableError for a model without kernels, and where FlashInfer is missing or cannot be built."""
        require_kernels(spec.dtype, spec.head_dim)
        if spec.value_dim != spec.head_dim:
            raise BackendUnavailableError(
                f"FlashInfer has no kernels here for keys of {spec.head_dim} and values of {spec.value_dim} numbers"
            )
        if spec.heads_differ:
            raise BackendUnavailableError("FlashInfer is planned here for layers with the same heads")
        if any(scoring.sinks for scoring in spec.scoring):
            raise BackendUnavailableError("FlashInfer's paged attention has no sinks here")
        if any(scoring.slopes for scoring in spec.scoring):
            raise BackendUnavailableError("FlashInfer's paged attention has no slopes (ALiBi) here")
        if any(scoring.within_images for scoring in spec.scoring):
            raise BackendUnavailableError("FlashInfer's paged attention is causal here, also within images")
        if any(scoring.chunked for scoring in spec.scoring):
            raise BackendUnavailableError("FlashInfer's paged attention has windows here, none that begin at multiples of their size")
        if spec.cache_dtype not in (spec.dtype, torch.float8_e4m3fn):
            raise BackendUnavailableError(f"FlashInfer reads a KV cache of {spec.dtype} or float8_e4m3fn here, not {spec.cache_dtype}")
        library = library or load_flashinfer(spec.device)
        super().__init__(spec)
        self.kv_write, self.convolve, self.triton_states = _kv_write_for(spec.device), _convolve_for(spec.device), _triton_states(spec)
        with building(library, "attention", spec.device):
            self._device = device or torch.cuda.get_device_properties(spec.device)
            self._setup = WrapperSetup(library, spec, event or torch.cuda.Event, self._device)
            self.kinds = [(spec.places[layer][0], scoring) for layer, scoring in enumerate(spec.scoring)]  # by layer
            self._decodes = _WrapperDecodes(self.kinds, {kind: DecodeWrapper(self._setup, kind[1]) for kind in dict.fromkeys(self.kinds)})
            self._prefills = {kind: PrefillWrapper(self._setup, kind[1]) for kind in dict.fromkeys(self.kinds)}
            self._run_once(lambda metadata: self._planned(metadata, self._prefills))
        self._fa3_prefills = self._make_fa3(library)
        self._estimate = UnevenDecodes(spec, self._device.multi_processor_count)
        self._uneven_decodes = self._make_uneven()

    def _make_fa3(self, library: ModuleType) -> Prefills:
        """Wrappers of the fa3 kernels, which have run once; none where they cannot be had. One log line says which and why."""
        missing = missing_fa3(library, self.spec, self._device)
        if missing is None:
            try:
                with building(library, "long prompts", self.spec.device):
                    prefills = {kind: PrefillWrapper(self._setup, kind[1], "fa3") for kind in self._prefills}
                    self._run_once(lambda metadata: self._planned(metadata, prefills))
                _log.info("prompts: FlashInfer's fa3 kernels where they are long, fa2 else")
                return prefills
            except BackendUnavailableError as reason:
                self.free()
                missing = str(reason)
        _log.info("prompts: FlashInfer's fa2 kernels (not fa3: %s)", missing)
        return {}

    def _make_uneven(self) -> TritonDecodes | None:
        """Our kernel for uneven decodes, which has run once; None where Triton cannot run, which one log line says."""
        decodes = triton_decodes(self.spec, self._device.multi_processor_count)
        if decodes is not None:
            try:
                self._run_once(lambda metadata: self._planned(metadata, self._prefills, uneven=decodes), decoded=decodes.least_keys + 1)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler, its absence, or a driver has to say
                self.free()
                _log.warning("decodes of uneven lengths: slow, because our Triton kernel does not run here: %s", first_line(error))
                return None
        return decodes

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        host = metadata.host
        queries = np.diff(host.qo_indptr[host.num_decodes :])
        long = self._fa3_prefills and len(queries) and suits_fa3(queries, self.spec, self._device)
        uneven = self._uneven_decodes if host.num_decodes and self.is_uneven(host) else None
        return self._planned(metadata, self._fa3_prefills if long else self._prefills, uneven)

    def _planned(self, metadata: AttentionMetadata, prefills: Prefills, uneven: TritonDecodes | None = None) -> AttentionStep:
        """With decode rows computed by `uneven` if that is given."""
        # All wrappers are planned here and not by the first layer that needs them: the next plan waits for the copies of this one, which
        # must therefore be the first work of the step, and nothing may be planned within a captured forward pass.
        host = metadata.host
        require_int32(kv_indices=metadata.kv_indices, slot_mapping=metadata.slot_mapping)
        decodes: Decodes = self._decodes
        if host.num_decodes and uneven is not None:
            decodes = uneven.plan(host, metadata.kv_indices)
        elif host.num_decodes:
            self._decodes.plan(WrapperRows.of(host, metadata.kv_indices, 0, host.num_decodes))
        if host.num_decodes < host.num_rows:
            rows = WrapperRows.of(host, metadata.kv_indices, host.num_decodes, host.num_rows)
            for (group, _), prefill in prefills.items():
                prefill.plan(rows, group)
        return _Step(self, metadata, decodes, host.num_decodes, prefills)

    def graph_step(self, buffers: AttentionMetadata) -> GraphStep | None:
        if self.spec.states is not None and self.triton_states is None:
            return None  # recurrences in torch need to know rows on the host
        require_int32(
            kv_indptr=buffers.kv_indptr,
            kv_indices=buffers.kv_indices,
            last_page_len=buffers.last_page_len,
            slot_mapping=buffers.slot_mapping,
        )
        wrappers = {(group, scoring): DecodeWrapper(self._setup, scoring, buffers, group) for group, scoring in self._prefills}
        decodes = _WrapperDecodes(self.kinds, wrappers)
        # The page ids are in the wrappers' own buffer already, so they are not copied.
        return _GraphStep(
            self, buffers, decodes, lambda layout: decodes.plan(WrapperRows.of(layout, buffers.kv_indices, 0, layout.num_rows))
        )

    def is_uneven(self, layout: StepLayout) -> bool:
        return self._uneven_decodes is not None and self._estimate.has(layout)

    def uneven_graph_step(self, buffers: AttentionMetadata) -> GraphStep | None:
        if self._uneven_decodes is None:
            return None
        decodes = self._uneven_decodes.graph(buffers)
        return _GraphStep(self, buffers, decodes, decodes.prepare)


class Decodes(Protocol):
    """The decode rows of a step."""

    def attend(self, layer: int, query: Tensor, out: Tensor, cache: PagedCache) -> None:
        """Attention of the step's first rows, one query of [T, num_heads, head_dim] each, to `out`, of the same shape."""


class _WrapperDecodes:
    """By FlashInfer's decode wrappers, one for each of `kinds`, which are by layer."""

    def __init__(self, kinds: list[Kind], wrappers: dict[Kind, DecodeWrapper]) -> None:
        self._kinds = kinds
        self._wrappers = wrappers
        self._num_rows = 0

    def plan(self, rows: WrapperRows) -> None:
        self._num_rows = len(rows.last_page_len)
        for (group, _), wrapper in self._wrappers.items():
            wrapper.plan(rows, group)

    def attend(self, layer: int, query: Tensor, out: Tensor, cache: PagedCache) -> None:
        self._wrappers[self._kinds[layer]].run(query[: self._num_rows], cache, out[: self._num_rows])


class _Step:
    """The first `num_decodes` queries are computed by `decodes`, the others by `prefills`."""

    def __init__(
        self, backend: FlashInferBackend, metadata: AttentionMetadata, decodes: Decodes, num_decodes: int, prefills: Prefills
    ) -> None:
        self._backend = backend
        self._slots = metadata.slot_mapping
        self._metadata = metadata
        self._decodes = decodes
        self._num_decodes = num_decodes
        self._prefills = prefills
        self._states: TritonStates | None = None
        if metadata.host.states is not None and backend.triton_states is not None:
            self._states = backend.triton_states(backend, metadata.qo_indptr, metadata.host)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._backend.kv_write(key, value, self.target(layer))

    def convolve(self, places: range, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._backend.convolve(self._backend, self._metadata, places, inputs, weight, bias)

    def recur(self, layer: int, rule: RecurrentRule, mixed: Tensor, gates: Gates) -> Tensor:
        if self._states is None:
            return recur_torch(self._backend, self._metadata, layer, rule, mixed, gates)
        return self._states.recur(layer, rule, mixed, gates)

    def target(self, layer: int) -> KvTarget:
        group, _ = self._backend.kinds[layer]
        return KvTarget(self._backend.caches[layer], self._slots[group])

    def attend(
        self, layer: int, query: Tensor, sinks: Tensor | None = None, out: Tensor | None = None, index: IndexQuery | None = None
    ) -> Tensor:
        cache, first = self._backend.caches[layer], self._num_decodes
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
        if first:
            self._decodes.attend(layer, query, out, cache)
        if first < len(query):
            self._prefills[self._backend.kinds[layer]].run(query[first:], cache, out[first:])
        return out


class _GraphStep(_Step):
    def __init__(
        self, backend: FlashInferBackend, buffers: AttentionMetadata, decodes: Decodes, plan: Callable[[StepLayout], None]
    ) -> None:
        """`plan`: of the decodes, before each capture and replay."""
        super().__init__(backend, buffers, decodes, len(buffers.last_page_len), {})
        self._buffers = buffers
        self._plan = plan
        self._graph_states: GraphStates | None = None
        if backend.triton_states is not None:
            self._states = self._graph_states = backend.triton_states.of_graph(backend, buffers)

    def prepare(self, layout: StepLayout) -> None:
        check_graph_layout(layout, self._buffers)
        self._plan(layout)
        if self._graph_states is not None:
            self._graph_states.prepare(layout)


def triton_decodes(spec: AttentionSpec, processors: int) -> TritonDecodes | None:
    """Our kernel on CUDA where triton is installed."""
    if spec.device.type != "cuda":
        return None
    try:
        from aengine.attention.triton import TritonDecodes
    except ImportError:
        return None
    return TritonDecodes(spec, processors)


def _kv_write_for(device: torch.device) -> KvWrite:
    """Our Triton kernel on CUDA where triton is installed, else plain torch."""
    if device.type != "cuda":
        return write_torch
    try:
        from aengine.kernels.triton.attention import write
    except ImportError:
        return write_torch
    return write


def _convolve_for(device: torch.device) -> Callable[[AttentionBackend, AttentionMetadata, range, Tensor, Tensor, Tensor | None], Tensor]:
    """Our Triton kernel on CUDA where triton is installed, else plain torch."""
    if device.type != "cuda":
        return convolve_torch
    try:
        from aengine.attention.triton import convolve_in_pages
    except ImportError:
        return convolve_torch
    return convolve_in_pages


def _triton_states(spec: AttentionSpec) -> type[TritonStates] | None:
    """Our Triton kernels for the states of recurrent layers, if there are any, on CUDA where triton is installed."""
    if spec.states is None or spec.device.type != "cuda":
        return None
    try:
        from aengine.attention.triton import TritonStates
    except ImportError:
        return None
    return TritonStates
