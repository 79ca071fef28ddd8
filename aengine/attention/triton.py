"""Our own paged attention in Triton: for CUDA where FlashInfer is missing or has no kernels for a model. `TritonDecodes` computes decode
rows, also beside FlashInfer: their work is planned on the host, once for each group of layers and window, and uploaded in one copy.

Owns what a step launches, over caches [num_pages, page_size, num_kv_heads, width], and where its work lies on the device; the kernels are
in `aengine/kernels/triton`. Importing this needs triton.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

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
    first_line,
)
from aengine.attention.decode_work import ITEM_FIELDS, ROW_FIELDS, DecodeWork, WorkBounds, plan_decodes
from aengine.attention.metadata import AttentionMetadata, AttentionSpec, IntArray, StepLayout, StepStates
from aengine.kernels.arrays import staged, to_device, upload
from aengine.kernels.paged_cache import Heads, KvTarget, PagedCache, Span
from aengine.kernels.recurrence import RecurrentRule
from aengine.kernels.triton import attention
from aengine.kernels.triton import attention as kernels
from aengine.kernels.triton.attention import BlockSizes, DeviceDecodeWork, attend_decodes, decode_block, is_hopper
from aengine.kernels.triton.chosen import choose
from aengine.kernels.triton.recurrence import DeviceStates, StateTensors, recur


def _read_keys(spec: AttentionSpec, heads: Heads) -> int:
    """How many numbers of a key are read: not those of an index, which a query has zeros for."""
    return heads.key_dim - (0 if spec.index is None else spec.index.head_dim)


def blocks_of(spec: AttentionSpec, heads: Heads) -> BlockSizes:
    """The blocks of layers with these heads on the model's device."""
    return BlockSizes.of(_read_keys(spec, heads), heads.value_dim, spec.latent, spec.dtype, spec.cache_dtype, is_hopper(spec.device))


class DecodeKind(NamedTuple):
    """Layers that have the same work."""

    group: int
    span: Span
    heads: Heads


class TritonDecodes:
    """The decode rows of a model's steps, on a device with so many multiprocessors."""

    def __init__(self, spec: AttentionSpec, processors: int, blocks: BlockSizes | None = None, top_k: int = 0) -> None:
        """`blocks`: those of all layers; None: of each by its heads. `top_k`: of the index that chooses the tokens which each row sees on
        its own; 0: rows see all."""
        self.spec, self.top_k = spec, top_k
        places = enumerate(zip(spec.places, spec.scoring, strict=False))
        kinds = [DecodeKind(group, scoring.span, spec.heads_of(layer)) for layer, ((group, _), scoring) in places]  # by layer
        self.kinds = list(dict.fromkeys(kinds))
        self.kind_of = [self.kinds.index(kind) for kind in kinds]
        self.blocks = {kind.heads: blocks or blocks_of(spec, kind.heads) for kind in self.kinds}
        self.bounds = {heads: self._bounds(heads, processors) for heads in self.blocks}

    def _bounds(self, heads: Heads, processors: int) -> WorkBounds:
        group, blocks = heads.num_heads // heads.num_kv_heads, self.blocks[heads]
        return WorkBounds.of(
            programs_per_item=heads.num_kv_heads * -(-group // decode_block(group, blocks)),
            processors=processors,
            rows_per_item=1 if self.top_k else max(1, blocks.queries // group),
            least_keys=blocks.split_keys,
            key_block=blocks.keys,
        )

    @property
    def least_keys(self) -> int:
        """The most keys of a row that no layer splits."""
        return max(bounds.least_keys for bounds in self.bounds.values())

    def host_plan(self, layout: StepLayout, num_rows: int) -> list[DecodeWork]:
        """By kind the work of the first `num_rows` rows."""
        return [plan_decodes(layout, num_rows, kind.group, kind.span, self.bounds[kind.heads]) for kind in self.kinds]

    def plan(self, layout: StepLayout, kv_indices: Tensor) -> PlannedDecodes:
        """For the decode rows of a step, at least one. `kv_indices` [groups, pages]: those of the layout, on the device."""
        planned = self.host_plan(layout, layout.num_decodes)
        arrays = upload([array for work in planned for array in (work.items, work.rows)], self.spec.device)
        works = [
            DeviceDecodeWork(items, rows, work.num_partials) for items, rows, work in zip(arrays[::2], arrays[1::2], planned, strict=True)
        ]
        return PlannedDecodes(self, kv_indices, works)

    def graph(self, buffers: AttentionMetadata) -> GraphDecodes:
        """For graphs of as many rows as the buffers have."""
        return GraphDecodes(self, buffers)


class PlannedDecodes:
    """The decode rows of one step."""

    def __init__(self, decodes: TritonDecodes, kv_indices: Tensor, works: list[DeviceDecodeWork]) -> None:
        self._decodes = decodes
        self._kv_indices = kv_indices  # [groups, pages]
        self._works = works  # by kind

    def attend(
        self,
        layer: int,
        query: Tensor,
        out: Tensor,
        cache: PagedCache,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        pages: Tensor | None = None,
    ) -> None:
        """Attention of the step's first rows, one query of [T, num_heads, head_dim] each, to `out` [T, num_heads, value_dim]. `pages`: if
        they are not those of the step."""
        decodes = self._decodes
        kind = decodes.kind_of[layer]
        group, _, heads = decodes.kinds[kind]
        pages, blocks = self._kv_indices[group] if pages is None else pages, decodes.blocks[heads]
        attend_decodes(query, out, cache, pages, self._works[kind], decodes.spec.scoring[layer], sinks, slopes, blocks)


class GraphDecodes(PlannedDecodes):
    """Steps of a fixed number of rows, whose work is copied to the same place: launches depend on the number of rows alone."""

    def __init__(self, decodes: TritonDecodes, buffers: AttentionMetadata) -> None:
        self._num_rows = rows = len(buffers.last_page_len)
        self._num_items = [decodes.bounds[kind.heads].max_items(rows) for kind in decodes.kinds]
        lengths = [items * ITEM_FIELDS + ROW_FIELDS * rows for items in self._num_items]  # of the work of a kind
        self._memory = torch.zeros(sum(lengths), dtype=torch.int32, device=decodes.spec.device)
        works = []
        for kind, num_items, part in zip(decodes.kinds, self._num_items, torch.split(self._memory, lengths), strict=True):
            items, of_rows = torch.split(part, [num_items * ITEM_FIELDS, ROW_FIELDS * rows])
            partials = decodes.bounds[kind.heads].max_partials(rows, kind.span.window)
            works.append(DeviceDecodeWork(items.view(-1, ITEM_FIELDS), of_rows.view(ROW_FIELDS, -1), partials))
        super().__init__(decodes, buffers.kv_indices, works)

    def prepare(self, layout: StepLayout) -> None:
        """Before each capture and replay: plans a step of as many decode rows, and copies its work on the current stream."""
        arrays = []
        for num_items, work in zip(self._num_items, self._decodes.host_plan(layout, self._num_rows), strict=True):
            unused = np.zeros(ITEM_FIELDS * (num_items - len(work.items)), dtype=np.int32)
            arrays += [work.items.reshape(-1), unused, work.rows.reshape(-1)]
        self._memory.copy_(staged(arrays, self._memory.device), non_blocking=True)


_INTERPRETED_PROCESSORS = 16  # of a small device, so that work is divided in tests as it is on one


def convolve_in_pages(
    backend: AttentionBackend, metadata: AttentionMetadata, places: range, inputs: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Do what `AttentionStep.convolve` says, by one launch for each place."""
    out, first = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device), 0
    for place in places:
        group, _ = backend.spec.places[place]
        target = KvTarget(backend.caches[place], metadata.slot_mapping[group])
        lists = kernels.PageLists(metadata.kv_indptr, metadata.kv_indices[group], metadata.last_page_len)
        first = kernels.convolve(inputs, weight, bias, out, first, target, lists, metadata.qo_indptr)
    return out


def _as_chosen(layout: StepLayout, top_k: int) -> StepLayout:
    """Each token of a step as a decode row of its own, whose pages are the slots of the tokens that it sees: of a list that has room for
    `top_k` of each."""
    tokens, seen = np.arange(layout.num_tokens + 1, dtype=np.int32), np.minimum(layout.positions + 1, top_k)
    none = np.zeros((len(layout.kv_indices), 0), dtype=np.int32)
    return StepLayout(1, layout.num_tokens, tokens, tokens * top_k, none, np.ones_like(seen), seen, layout.positions, layout.slot_mapping)


def _tokens_of(layout: StepLayout) -> IntArray:
    """`tokens` of `kernels/triton/chosen.py: choose`."""
    return np.stack((layout.positions, np.repeat(layout.kv_indptr[:-1], np.diff(layout.qo_indptr))), dtype=np.int32)


def _as_slots(pages: Tensor) -> Tensor:
    """Pages of one token each."""
    return pages.as_strided((1, 1, *pages.shape[2:]), (pages.stride(1), *pages.stride()[1:]))


class ChosenTokens:
    """The attention of a step's queries to the tokens that an index chooses for each of them."""

    def __init__(self, decodes: TritonDecodes, metadata: AttentionMetadata) -> None:
        device, host = decodes.spec.device, metadata.host
        self._decodes, self._pages, self._longest = decodes, metadata.kv_indices, int(host.seq_lens.max(initial=0))
        self._tokens = to_device(_tokens_of(host), device)
        self._planned = decodes.plan(_as_chosen(host, decodes.top_k), self._pages)

    def attend(self, layer: int, query: Tensor, index: IndexQuery, out: Tensor, cache: PagedCache) -> None:
        """Attention of [T, num_heads, head_dim] queries, T those of the step, to `out` [T, num_heads, value_dim]."""
        pages = self._pages[self._decodes.spec.places[layer][0]]
        slots = choose(index.query, index.weights, cache, pages, self._tokens, self._decodes.top_k, self._longest)
        width = _read_keys(self._decodes.spec, self._decodes.spec.heads_of(layer))
        of_slots = replace(cache, keys=_as_slots(cache.keys[..., -width:]), values=_as_slots(cache.values))
        self._planned.attend(layer, query[..., -width:], out, of_slots, pages=slots.view(-1))


class GraphChosenTokens(ChosenTokens):
    """The attention of steps of a fixed number of decode rows to the tokens that an index chooses; work is copied to one place."""

    def __init__(self, decodes: TritonDecodes, buffers: AttentionMetadata) -> None:
        self._decodes, self._pages = decodes, buffers.kv_indices
        assert decodes.spec.index is not None
        self._longest = decodes.spec.index.longest
        self._tokens = torch.zeros((2, len(buffers.last_page_len)), dtype=torch.int32, device=decodes.spec.device)
        self._planned = self._graph_decodes = decodes.graph(buffers)

    def prepare(self, layout: StepLayout) -> None:
        """Before each capture and replay: as `GraphDecodes.prepare`."""
        self._graph_decodes.prepare(_as_chosen(layout, self._decodes.top_k))
        self._tokens.copy_(staged((_tokens_of(layout).reshape(-1),), self._tokens.device).view_as(self._tokens), non_blocking=True)


class TritonStates:
    """The recurrent states of a step, which `kernels/triton/recurrence.py` reads and writes; made once the pool has its tensors."""

    def __init__(self, backend: AttentionBackend, qo_indptr: Tensor, layout: StepLayout) -> None:
        states = layout.states
        assert backend.spec.states is not None
        assert states is not None
        self._tensors = StateTensors.of(backend.spec.states, backend.memory, backend.tensors, backend.spec.layers_per_page)
        rows, kept = upload(packed_states(layout, states), backend.spec.device)
        most = int(np.diff(layout.qo_indptr).max(initial=0))
        self._rows = DeviceStates(rows, kept, qo_indptr, most, bool(states.replays.any()))

    @staticmethod
    def of_graph(backend: AttentionBackend, buffers: AttentionMetadata) -> GraphStates:
        """Makes those for graphs that read `buffers`."""
        return GraphStates(backend, buffers)

    def recur(self, layer: int, rule: RecurrentRule, mixed: Tensor, gates: Gates) -> Tensor:
        """Do what `AttentionStep.recur` says."""
        return recur(self._tensors, self._rows, layer, rule, mixed, gates)


class GraphStates(TritonStates):
    """The states of steps of as many decode rows as the buffers have, each of which keeps one state at most."""

    def __init__(self, backend: AttentionBackend, buffers: AttentionMetadata) -> None:
        assert backend.spec.states is not None
        host = buffers.host
        self._none = StepStates.none(host.num_rows, backend.spec.states.num_pages)
        super().__init__(backend, buffers.qo_indptr, replace(host, states=self._none))
        kept = torch.full((host.num_rows, 1 + backend.spec.states.num_pages), -1, dtype=torch.int32, device=backend.spec.device)
        self._rows = self._rows._replace(kept=kept, replays=True)

    def prepare(self, layout: StepLayout) -> None:
        """Before each capture and replay: copies where the rows' states are, on the current stream."""
        states = self._none if layout.states is None else layout.states
        rows, kept = packed_states(layout, states)
        fixed = np.zeros((layout.num_rows, kept.shape[1]), dtype=np.int32)
        fixed[:, 0] = -1
        fixed[states.kept_rows] = kept
        rows[:, 3] = np.arange(layout.num_rows)
        rows[:, 4] = rows[:, 3] + 1
        uploaded = staged((rows.reshape(-1), fixed.reshape(-1)), self._rows.rows.device)
        for to, values in zip((self._rows.rows, self._rows.kept), torch.split(uploaded, [rows.size, fixed.size]), strict=True):
            to.copy_(values.view(to.shape), non_blocking=True)


def packed_states(layout: StepLayout, states: StepStates) -> tuple[IntArray, IntArray]:
    """The `rows` and `kept` of `DeviceStates`, [n, ..] and [k, ..], of a step with these states."""
    first = layout.seq_lens - np.diff(layout.qo_indptr)
    kept = np.searchsorted(states.kept_rows, np.arange(layout.num_rows + 1)).astype(np.int32)
    fields = np.stack((states.replays, states.drafts, first == 0, kept[:-1], kept[1:], first), 1)
    return (
        np.concatenate((fields, states.reads, states.writes), 1, dtype=np.int32),
        np.concatenate((states.kept_lengths[:, None], states.kept_pages), 1, dtype=np.int32),
    )


class TritonBackend(AttentionBackend):
    """Runs on CUDA, and on a CPU in Triton's interpreter, which is for tests. Caches are [num_pages, page_size, num_kv_heads, width]."""

    name = "triton"

    def __init__(self, spec: AttentionSpec, blocks: kernels.BlockSizes | None = None) -> None:
        """Compiles and runs every kernel of the model once.

        Raises BackendUnavailableError where Triton cannot compile, and for a model it has no kernels for.
        """
        if not kernels.runs_on(spec.device):
            raise BackendUnavailableError(f"Triton has no kernels for device {spec.device.type}")
        if spec.cache_dtype is torch.int8:
            raise BackendUnavailableError(f"our Triton kernels read a KV cache of {spec.dtype} or float8_e4m3fn, not {spec.cache_dtype}")
        for layer in range(len(spec.places)):
            _check_layer(spec, layer)
        if spec.batch_invariant and (spec.states is not None or spec.index is not None):
            raise BackendUnavailableError("recurrent layers, and those whose tokens an index chooses, have no batch-invariant kernels")
        super().__init__(spec)
        on_cuda = spec.device.type == "cuda"
        try:
            processors = torch.cuda.get_device_properties(spec.device).multi_processor_count if on_cuda else _INTERPRETED_PROCESSORS
            self.decodes = TritonDecodes(spec, processors, blocks)
            self.chosen_decodes = TritonDecodes(spec, processors, blocks, spec.top_k) if spec.top_k else None
            self._run_once(self.plan, decoded=self.decodes.least_keys + 1)  # a row that is split, if any is
            if spec.top_k:
                self._run_once(self.plan, decoded=spec.top_k + 1)
        except Exception as error:  # whatever a compiler, its absence, or a driver has to say
            raise BackendUnavailableError(f"our Triton kernels do not run here: {first_line(error)}") from error

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        decodes = metadata.host.num_decodes and not self.spec.batch_invariant
        return _Step(self, metadata, self.decodes.plan(metadata.host, metadata.kv_indices) if decodes else None)

    def graph_step(self, buffers: AttentionMetadata) -> GraphStep | None:
        check_graph_layout(buffers.host, buffers)
        return _GraphStep(self, buffers, None if self.spec.batch_invariant else self.decodes.graph(buffers))


def _check_layer(spec: AttentionSpec, layer: int) -> None:
    """Raises BackendUnavailableError for a layer that there are no kernels for."""
    heads, own = spec.heads_of(layer), spec.part_widths(layer)
    if not kernels.fits(_read_keys(spec, heads), heads.value_dim):
        widths = f"keys of {heads.key_dim} and values of {heads.value_dim} numbers"
        raise BackendUnavailableError(f"our Triton kernels have no room for {widths}")
    strides = {divmod(whole * spec.page_size, part) for whole, part in zip(spec.page_widths, own, strict=True) if part}  # in tokens
    if len(strides) > 1 or any(rest for _, rest in strides):
        raise BackendUnavailableError("our Triton kernels need keys and values that are the same share of those of the widest layer")


class _Step:
    def __init__(self, backend: TritonBackend, metadata: AttentionMetadata, decodes: PlannedDecodes | None) -> None:
        host, spec = metadata.host, backend.spec
        self._backend = backend
        self._metadata = metadata
        self._decodes = decodes
        self._lists = [kernels.PageLists(metadata.kv_indptr, indices, metadata.last_page_len) for indices in metadata.kv_indices]
        self._chosen: ChosenTokens | None = None
        if backend.chosen_decodes is not None and host.seq_lens.max(initial=0) > backend.chosen_decodes.top_k:
            self._chosen = ChosenTokens(backend.chosen_decodes, metadata)
        self._states: TritonStates | None = None
        if host.states is not None:
            self._states = TritonStates(backend, metadata.qo_indptr, host)
        self._seen = None if host.seen is None else to_device(host.seen, spec.device)
        self._tiles = {heads: to_device(tiles, spec.device) for heads, tiles in self._host_tiles(host).items()}

    def _host_tiles(self, host: StepLayout) -> dict[Heads, IntArray]:
        """The tiles of the rows that are not decoding; of all rows, where one kernel is to compute every query."""
        first = 0 if self._decodes is None else host.num_decodes
        if first == host.num_rows:
            return {}
        lengths, seq_lens = np.diff(host.qo_indptr[first:]), host.seq_lens[first:]
        return {
            heads: kernels.prefill_tiles(lengths, seq_lens, first, heads.num_heads // heads.num_kv_heads, blocks)
            for heads, blocks in self._backend.decodes.blocks.items()
        }

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        attention.write(key, value, self.target(layer))

    def convolve(self, places: range, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolve_in_pages(self._backend, self._metadata, places, inputs, weight, bias)

    def recur(self, layer: int, rule: RecurrentRule, mixed: Tensor, gates: Gates) -> Tensor:
        assert self._states is not None, "of a step of a model with recurrent layers"
        return self._states.recur(layer, rule, mixed, gates)

    def target(self, layer: int) -> KvTarget:
        group, _ = self._backend.spec.places[layer]
        return KvTarget(self._backend.caches[layer], self._metadata.slot_mapping[group])

    def attend(
        self, layer: int, query: Tensor, sinks: Tensor | None = None, out: Tensor | None = None, index: IndexQuery | None = None
    ) -> Tensor:
        backend = self._backend
        cache, scoring, heads = backend.caches[layer], backend.spec.scoring[layer], backend.spec.heads_of(layer)
        out = query.new_empty(*query.shape[:2], heads.value_dim) if out is None else out
        if index is not None and self._chosen is not None:
            self._chosen.attend(layer, query, index, out, cache)
            return out
        width = _read_keys(backend.spec, heads)
        query, cache = query[..., -width:], replace(cache, keys=cache.keys[..., -width:])
        if self._decodes is not None:
            self._decodes.attend(layer, query, out, cache, sinks, backend.slopes[layer])
        if self._tiles:
            lists = self._lists[backend.spec.places[layer][0]]
            given = self._tiles[heads], scoring, sinks, backend.slopes[layer], backend.decodes.blocks[heads]
            seen = self._seen if scoring.within_images else None
            kernels.attend_prefills(query, out, cache, lists, self._metadata.qo_indptr, *given, seen)
        return out


class _GraphStep(_Step):
    def __init__(self, backend: TritonBackend, buffers: AttentionMetadata, decodes: GraphDecodes | None) -> None:
        super().__init__(backend, buffers, decodes)
        self._graph_decodes = decodes
        self._graph_states: GraphStates | None = None
        if backend.spec.states is not None:
            self._states = self._graph_states = GraphStates(backend, buffers)
        self._graph_chosen: GraphChosenTokens | None = None
        if backend.chosen_decodes is not None:
            self._chosen = self._graph_chosen = GraphChosenTokens(backend.chosen_decodes, buffers)

    def prepare(self, layout: StepLayout) -> None:
        check_graph_layout(layout, self._metadata)
        if self._graph_decodes is None:
            for heads, tiles in self._host_tiles(layout).items():
                self._tiles[heads].copy_(staged((tiles.reshape(-1),), self._tiles[heads].device).view(tiles.shape), non_blocking=True)
        else:
            self._graph_decodes.prepare(layout)
        if self._graph_states is not None:
            self._graph_states.prepare(layout)
        if self._graph_chosen is not None:
            self._graph_chosen.prepare(layout)
