"""What an attention backend is, and the page storage that all backends have. Knows nothing of models or schedulers.

A backend owns the KV tensors: everyone else counts pages and hands over slots. Page 0 is reserved: it is never given to a
sequence, nothing is written to it, and padding points at it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention.metadata import AttentionMetadata, AttentionSpec, StepLayout, build_layout
from aengine.kernels.arrays import to_device
from aengine.kernels.paged_cache import KvTarget, PagedCache, as_bytes, loaded
from aengine.kernels.recurrence import RecurrentRule, StateMemory, convolve
from aengine.kernels.warm_memory import lazy_bytes

_ALIGNMENT = 64  # bytes, of the tensors of a pool


class BackendUnavailableError(Exception):
    """A backend cannot run on this machine or cannot run this model; the message says why in one line."""


Gates: TypeAlias = "Tensor | Callable[[Tensor], Tensor]"
"""The gates of a recurrence [T, ...], or what makes them of what was convolved [T, channels]."""


class IndexQuery(NamedTuple):
    """What chooses the tokens that queries see, as `AttentionSpec.index` says. A token's key begins with that of the index."""

    query: Tensor  # [T, index heads, head_dim]
    weights: Tensor  # [T, index heads] float32, by which the scores of heads are added


class AttentionStep(Protocol):
    """The attention of one step, planned once and used by every layer."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores [T, num_kv_heads, head_dim] keys and [T, num_kv_heads, value_dim] values at the step's slots; tokens with slot -1 are
        skipped."""

    def convolve(self, places: range, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Stores the [T, channels] inputs of a causal depthwise convolution with `weight` [channels, taps] at the step's slots in some
        places, and returns its outputs [T, channels], which are summed in float32 from the oldest input to the newest."""

    def recur(self, layer: int, rule: RecurrentRule, mixed: Tensor, gates: Gates) -> Tensor:
        """What a recurrence makes [T, width] of all tokens, of what is convolved of them, `mixed` [T, channels], and their gates. `layer`
        counts the recurrent layers alone. Reads and writes the states of the step's rows, and writes those that are kept."""

    def target(self, layer: int) -> KvTarget | None:
        """Where `write` stores a layer's keys and values, for kernels that do so in its place; None: nothing else can."""

    def attend(
        self, layer: int, query: Tensor, sinks: Tensor | None = None, out: Tensor | None = None, index: IndexQuery | None = None
    ) -> Tensor:
        """Causal attention of the [T, num_heads, head_dim] queries over their rows' pages; returns [T, num_heads, value_dim], `out` if it
        is given, which is contiguous.

        `sinks` [num_heads] are the scores of a layer whose `Scoring` has sinks. Reads what was written in this step and in all steps
        before, and nothing beyond a row's length. With an `index`, queries that would see more than its `top_k` tokens see the chosen ones
        alone.
        """


class GraphStep(AttentionStep, Protocol):
    """The attention of decode steps with a fixed number of rows, which reads its index arrays from fixed buffers: a graph of its calls is
    captured once and replayed for every step that is prepared."""

    def prepare(self, layout: StepLayout) -> None:
        """Called before each capture and replay with the step's layout, whose arrays were copied to the buffers on the current stream.

        It has as many rows as the buffers, each with one query; padding rows have length 1, page 0 and slot -1. Raises ValueError for
        another layout.
        """


class AttentionBackend(ABC):
    """KV storage of all layers and the attention over it."""

    name: ClassVar[str]
    by_head: ClassVar[bool] = False
    """Whether a page of a layer is [num_kv_heads, page_size, width] of keys or values; else it is [page_size, num_kv_heads, width]."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.caches: list[PagedCache] = []  # by layer, [num_pages, ..] each; layers at the same place of different groups share memory
        self.tensors: list[Tensor] = []  # [num_pages, numbers of a page] each: by place those of keys, then those of values
        self.memory = torch.empty(0, dtype=torch.uint8)  # that these are parts of, where they are of torch
        kinds = {scoring.slopes for scoring in spec.scoring if scoring.slopes}
        slopes = {kind: torch.tensor(kind, dtype=torch.float32, device=spec.device) for kind in kinds}
        self.slopes = [slopes.get(scoring.slopes) for scoring in spec.scoring]
        """By layer those of its heads, [num_heads] float32; None: it has none."""

    def bytes_per_page(self) -> int:
        """Bytes of one page: K and V of `layers_per_page` layers."""
        spec = self.spec
        return spec.layers_per_page * sum(spec.page_widths) * spec.cache_dtype.itemsize

    def allocate(self, num_pages: int) -> None:
        """Creates the KV tensors, zeroed; `num_pages` includes the reserved page 0. Frees what was allocated before."""
        self.free()  # before the new pool is allocated
        spec = self.spec
        widths = [width for width in spec.page_widths for _ in range(spec.layers_per_page) if width]
        sizes = [num_pages * width * spec.cache_dtype.itemsize for width in widths]
        places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self.memory = _zeros((sum(places),), torch.uint8, spec.device)
        parts = zip(torch.split(self.memory, places), sizes, widths, strict=True)
        self.tensors = [part[:size].view(spec.cache_dtype).view(num_pages, width) for part, size, width in parts]
        self.caches = [self._cache(layer) for layer in range(len(spec.places))]

    def _cache(self, layer: int) -> PagedCache:
        spec = self.spec
        heads, index = spec.heads_of(layer), spec.places[layer][1]
        keys = self._pages(self.tensors[index], layer, spec.stored_width(heads.key_dim))
        if spec.shares_latent:
            values = keys[..., -heads.value_dim :]
        else:
            values = self._pages(self.tensors[spec.layers_per_page + index], layer, spec.stored_width(heads.value_dim))
        return PagedCache(keys, values, *spec.scales(layer), spec.shares_latent)

    def _pages(self, tensor: Tensor, layer: int, width: int) -> Tensor:
        """A layer's part of a tensor of pages."""
        spec = self.spec
        shape = spec.page_size, spec.heads_of(layer).num_kv_heads, width
        shape = (shape[1], shape[0], width) if self.by_head else shape
        size = math.prod(shape)
        return tensor[:, spec.part_of(layer) * size :][:, :size].view(-1, *shape)

    def free(self) -> None:
        """Frees the KV tensors, if there are any."""
        self.caches, self.tensors, self.memory = [], [], torch.empty(0, dtype=torch.uint8)

    @property
    def states(self) -> StateMemory:
        """The states of recurrent layers, which are in the KV tensors."""
        assert self.spec.states is not None, "of a model with recurrent layers"
        return StateMemory(self.spec.states, self.tensors, self.spec.dtype)

    def read_pages(self, pages: NDArray[np.int32]) -> list[Tensor]:
        """The content of [n] pages, in host memory, after the writes of steps before; for `write_pages`."""
        read = to_device(pages, self.spec.device)
        return [as_bytes(tensor).index_select(0, read).cpu() for tensor in self.tensors]

    def write_pages(self, pages: NDArray[np.int32], content: list[Tensor]) -> None:
        """Writes what was read of as many pages."""
        write = to_device(pages.astype(np.int64), self.spec.device)
        for tensor, rows in zip(self.tensors, content, strict=True):
            as_bytes(tensor).index_copy_(0, write, rows.to(tensor.device))

    def copy_pages(self, sources: NDArray[np.int32], destinations: NDArray[np.int32]) -> None:
        """Copies page sources[i] to page destinations[i], [c] each, K and V of all its layers, after the writes of steps before.

        No page is twice a destination, and all sources are read before any destination is written.
        """
        read, write = to_device(np.stack((sources, destinations)).astype(np.int64), self.spec.device)
        for pages in map(as_bytes, self.tensors):
            pages.index_copy_(0, write, pages.index_select(0, read))

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        """Prepares a step. Its result is valid until the next `plan`."""

    @abstractmethod
    def graph_step(self, buffers: AttentionMetadata) -> GraphStep | None:
        """The attention for graphs that read `buffers`: device arrays for a fixed number of rows, with a layout that fits them.

        `kv_indices` has room for all pages of the pool or of that many rows. `write` skips slot -1 on the device. None: the backend does
        not support graphs.
        """

    def is_uneven(self, layout: StepLayout) -> bool:
        """Whether the graph of `uneven_graph_step` computes these decodes faster than that of `graph_step`."""
        return False

    def uneven_graph_step(self, buffers: AttentionMetadata) -> GraphStep | None:
        """The attention for graphs of decode rows whose lengths differ much, or that share pages, by other kernels than those of
        `graph_step`; its arguments and results are the same. None: the backend has no such kernels."""
        return None

    def _run_once(self, plan: Callable[[AttentionMetadata], AttentionStep], decoded: int = 1) -> None:
        """A step of a decoding row of `decoded` tokens and a prefill of two, on a pool of its own, in one layer of every `Scoring`: builds
        and loads all that `plan` needs, so that nothing is compiled or allocated for the first time in a step or while a graph is
        captured."""
        spec = self.spec
        table = np.full((spec.num_groups, 2, max(2, -(-decoded // spec.page_size))), 1, dtype=np.int32)
        table[:, 1, :2] = 2, 3
        starts, lengths = np.array([decoded - 1, 0], dtype=np.int32), np.array([1, 2], dtype=np.int32)
        layout = build_layout(np.arange(2, dtype=np.int32), 1, starts, lengths, table, spec.page_size)
        self.allocate(4)
        index = None
        if spec.index is not None:
            shape = layout.num_tokens, spec.index.num_heads
            query = torch.zeros((*shape, spec.index.head_dim), dtype=spec.dtype, device=spec.device)
            index = IndexQuery(query, torch.zeros(shape, dtype=torch.float32, device=spec.device))
        step = plan(AttentionMetadata.of(layout, spec.device))
        kinds = {(scoring, spec.heads_of(layer)): layer for layer, scoring in enumerate(spec.scoring)}
        for (scoring, heads), layer in kinds.items():
            counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
            fused = torch.zeros((layout.num_tokens, sum(counts), heads.key_dim), dtype=spec.dtype, device=spec.device)
            query, key, value = torch.split(fused, counts, dim=1)
            step.write(layer, key, value[..., : heads.value_dim])
            sinks = torch.zeros(heads.num_heads, dtype=spec.dtype, device=spec.device) if scoring.sinks else None
            step.attend(layer, query, sinks, index=index)
        self.free()


def recur_torch(
    backend: AttentionBackend, metadata: AttentionMetadata, layer: int, rule: RecurrentRule, mixed: Tensor, gates: Gates
) -> Tensor:
    """Do what `AttentionStep.recur` says, in plain torch."""
    host, memory = metadata.host, backend.states
    states = host.states
    assert states is not None, "of a step of a model with recurrent layers"
    if not isinstance(gates, Tensor):
        gates = gates(_convolved(memory, host, layer, rule, mixed))
    inputs = torch.cat((mixed, gates), -1)
    outputs, before = inputs.new_empty(len(inputs), rule.width), rule.taps - 1
    device, starts = outputs.device, host.seq_lens - np.diff(host.qo_indptr)
    begin = 0  # rows of one token each are computed together
    if host.num_decodes and not (states.kept_rows < host.num_decodes).any() and not states.replays[: host.num_decodes].any():
        begin, tokens = host.num_decodes, slice(0, host.num_decodes)
        matrices, latest = memory.load(layer, to_device(states.reads[tokens], device))
        known = torch.cat((latest[:, :before], inputs[tokens].unsqueeze(1)), 1)
        outputs_of_decodes, matrices = rule.advance(matrices, known)
        outputs[tokens] = outputs_of_decodes.squeeze(1)
        memory.store(layer, to_device(states.writes[tokens], device), matrices, known[:, 1:])
    for row in range(begin, host.num_rows):
        first, end = host.qo_indptr[row : row + 2].tolist()
        replays, is_draft = int(states.replays[row]), bool(states.drafts[row])
        matrices, latest = memory.load(layer, to_device(states.reads[row : row + 1], device))
        if not starts[row]:
            matrices, latest = torch.zeros_like(matrices), torch.zeros_like(latest)
        known = torch.cat((latest[:, : before + replays], inputs[first:end].unsqueeze(0)), 1)
        made: list[Tensor] = []
        at, certain = 0, replays if is_draft else replays + end - first
        for number in [*np.flatnonzero(states.kept_rows == row).tolist(), None]:
            stop = certain if number is None else int(states.kept_lengths[number])
            if stop > at:
                part, matrices = rule.advance(matrices, known[:, at : before + stop])
                made.append(part)
            pages = states.writes[row : row + 1] if number is None else states.kept_pages[number : number + 1]
            kept = known[:, stop:] if is_draft and number is None else known[:, stop : stop + before]
            memory.store(layer, to_device(pages, device), matrices, kept)
            at = stop
        if is_draft:
            made.append(rule.advance(matrices, known[:, certain:])[0])
        outputs[first:end] = torch.cat(made, 1)[0, replays:]
    return outputs


_QUERIES = 16  # that are computed at a time


def attend_chosen_torch(
    backend: AttentionBackend, metadata: AttentionMetadata, layer: int, query: Tensor, index: IndexQuery, attended: Tensor
) -> None:
    """Overwrites what was `attended` to where an `index` chooses some tokens, in plain torch."""
    host, spec = metadata.host, backend.spec
    cache, scoring, (group, _) = backend.caches[layer], spec.scoring[layer], spec.places[layer]
    for row in np.flatnonzero(host.seq_lens > spec.top_k).tolist():
        length, (first, end) = int(host.seq_lens[row]), host.qo_indptr[row : row + 2].tolist()
        pages = metadata.kv_indices[group][host.kv_indptr[row] : host.kv_indptr[row + 1]]
        stored = as_bytes(cache.keys).index_select(0, pages)
        keys = loaded(stored, cache.keys.dtype, spec.scales(layer)[0]).flatten(0, -2)[:length].float()
        index_keys = keys[:, : index.query.shape[-1]]
        places = torch.arange(length, device=keys.device)
        for begin in range(first, end, _QUERIES):
            tokens = slice(begin, min(begin + _QUERIES, end))
            positions = length - end + torch.arange(tokens.start, tokens.stop, device=keys.device)
            scores = torch.relu(index.query[tokens].float() @ index_keys.t() * index_keys.shape[1] ** -0.5)
            scores = torch.einsum("th,thl->tl", index.weights[tokens], scores)
            scores = scores.masked_fill(places > positions[:, None], -math.inf)
            chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
            seen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, value=True) & (places <= positions[:, None])
            weights = (query[tokens].float() @ keys.t() * scoring.scale).masked_fill(~seen[:, None], -math.inf).softmax(-1)
            attended[tokens] = (weights @ keys[:, -spec.value_dim :]).to(attended.dtype)


def _convolved(memory: StateMemory, host: StepLayout, layer: int, rule: RecurrentRule, mixed: Tensor) -> Tensor:
    """[T, channels]: `mixed` after the convolution of a recurrence."""
    assert host.states is not None
    convolved, before, channels = torch.empty_like(mixed), rule.taps - 1, mixed.shape[1]
    for row in range(host.num_rows):
        first, end = host.qo_indptr[row : row + 2].tolist()
        replays = int(host.states.replays[row])
        inputs = memory.load_inputs(layer, to_device(host.states.reads[row : row + 1], mixed.device))
        latest = inputs[:, replays : replays + before, :channels]
        if host.seq_lens[row] == end - first:
            latest = torch.zeros_like(latest)
        known = torch.cat((latest, mixed[first:end].unsqueeze(0)), 1)
        convolved[first:end] = convolve(known, rule.conv, rule.conv_bias)[0]
    return convolved


def convolve_torch(
    backend: AttentionBackend, metadata: AttentionMetadata, places: range, inputs: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Do what `AttentionStep.convolve` says, in plain torch. What depends on the step is computed on the device, so that graphs can be
    recorded.

    A convolution sees what a sliding window of as many tokens as it has taps sees, so pages, prefixes, forks and rejected drafts are as
    those of attention with a window.
    """
    taps, channels = weight.shape[1], inputs.shape[1]
    halves = [(backend.spec.places[place][0], half) for place in places for half in _halves(backend, place)]
    first = 0
    for group, stored in halves:
        slots = metadata.slot_mapping[group][: len(inputs)].clamp(min=0).long()  # without one: the reserved page 0
        part = inputs[:, first : first + stored.shape[1]]
        stored.index_copy_(0, slots, torch.nn.functional.pad(part, (0, stored.shape[1] - part.shape[1])))
        first += stored.shape[1]
    positions, first_pages = _token_positions(metadata, backend.spec.page_size)
    wide, total = weight.float(), torch.zeros_like(inputs, dtype=torch.float32)
    for tap in range(taps):
        back = taps - 1 - tap
        earlier = inputs.float()
        if back:
            at = positions - back
            earlier = torch.cat([_stored_at(metadata.kv_indices[group], stored, first_pages, at, backend) for group, stored in halves], 1)
            earlier = earlier[:, :channels].masked_fill((at < 0).unsqueeze(1), 0.0)
        total += earlier * wide[:, tap]
    return (total if bias is None else total + bias.float()).to(inputs.dtype)


def _halves(backend: AttentionBackend, place: int) -> Sequence[Tensor]:
    """What a place has room for, [slots, numbers] each: keys, and values that are not parts of these."""
    spec, index = backend.spec, backend.spec.places[place][1]
    return [pages.view(-1, pages.shape[1] // spec.page_size) for pages in backend.tensors[index :: spec.layers_per_page]]


def _token_positions(metadata: AttentionMetadata, page_size: int) -> tuple[Tensor, Tensor]:
    """[T] each: the positions of the tokens of a step, and where the pages of their rows begin in a group of `kv_indices`."""
    ends = metadata.qo_indptr[1:].contiguous()
    tokens = torch.arange(metadata.slot_mapping.shape[1], device=ends.device, dtype=torch.int32)
    rows = torch.searchsorted(ends, tokens, right=True).clamp(max=len(ends) - 1)
    first_pages, pages_end = (part.index_select(0, rows) for part in (metadata.kv_indptr[:-1], metadata.kv_indptr[1:]))
    lengths = (pages_end - first_pages - 1) * page_size + metadata.last_page_len.index_select(0, rows)
    return lengths - (ends.index_select(0, rows) - tokens), first_pages


def _stored_at(kv_indices: Tensor, stored: Tensor, first_pages: Tensor, positions: Tensor, backend: AttentionBackend) -> Tensor:
    """[T, numbers] float32: what is stored of the positions; of negative ones anything."""
    page_size, positions = backend.spec.page_size, positions.clamp(min=0)
    pages = kv_indices.index_select(0, first_pages + positions // page_size).long()
    return stored.index_select(0, pages * page_size + positions % page_size).float()


def check_graph_layout(layout: StepLayout, buffers: AttentionMetadata) -> None:
    """Raises ValueError for a layout that is not one query for each row of a graph's `buffers`, or has more pages than they hold."""
    num_rows, num_pages = len(buffers.last_page_len), buffers.kv_indices.shape[1]
    if not layout.num_rows == layout.num_decodes == layout.num_tokens == num_rows:
        raise ValueError(
            f"a graph of {num_rows} decode rows was given {layout.num_rows} rows, {layout.num_decodes} of them decoding, "
            f"with {layout.num_tokens} tokens"
        )
    if layout.kv_indices.shape[1] > num_pages:
        raise ValueError(f"a graph with room for {num_pages} pages was given {layout.kv_indices.shape[1]}")


def first_line(error: BaseException) -> str:
    """The kind of an error and what went wrong, in one line. Builds report pages, in which a compiler's first complaint is what counts."""
    lines = str(error).strip().splitlines()
    complaint = [line.strip() for line in lines[1:] if "error:" in line.lower()][:1]
    return ": ".join([type(error).__name__, *(line.rstrip(":") for line in lines[:1]), *complaint])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU memory is committed when it is first written, so that a large pool costs nothing at the start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(lazy_bytes(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
