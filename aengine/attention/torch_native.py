"""Attention in plain torch: the float32-exact reference, and the backend that runs everywhere.

Scores, softmax and the weighted sum are computed in float32 whatever the storage dtype. Decode rows are computed together, padded to a
common number of pages; prefill rows one by one, in blocks of queries.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.attention.base import AttentionBackend, AttentionStep, Gates, IndexQuery, attend_chosen_torch, convolve_torch, recur_torch
from aengine.attention.metadata import AttentionMetadata, AttentionSpec, StepLayout
from aengine.kernels.arrays import to_device
from aengine.kernels.paged_cache import PagedCache, Scoring, Span, as_bytes, loaded, stored
from aengine.kernels.recurrence import RecurrentRule

_GATHER_ELEMENTS = 1 << 23  # the most elements of the padded K (or V) of a part of the decode rows: 32 MiB in float32
_SCORE_ELEMENTS = 1 << 24  # the most elements of a block of prefill scores: 64 MiB in float32


class TorchNativeBackend(AttentionBackend):
    """Attention in plain torch for every device. It supports no graphs."""

    name = "torch_native"
    by_head = True

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        return _Step(self, metadata)

    def graph_step(self, buffers: AttentionMetadata) -> None:
        """What it computes depends on lengths that the host knows, so it cannot be recorded."""


def _put(cache: Tensor, scale: float, slots: Tensor, rows: Tensor) -> None:
    """Stores [n, num_kv_heads, width] at the slots [n] int64."""
    page_size = cache.shape[2]
    as_bytes(cache)[slots // page_size, :, slots % page_size] = stored(rows, cache.dtype, scale)


def _take(cache: Tensor, scale: float, pages: Tensor) -> Tensor:
    """The pages [n] as [num_kv_heads, n, page_size, width] float32."""
    return loaded(as_bytes(cache).transpose(0, 1).index_select(1, pages), cache.dtype, scale)


def _take_both(cache: PagedCache, pages: Tensor) -> tuple[Tensor, Tensor]:
    return _take(cache.keys, cache.key_scale, pages), _take(cache.values, cache.value_scale, pages)


def _weights(scoring: Scoring, query: Tensor, key: Tensor, masked: Tensor, sinks: Tensor | None, bias: Tensor | None) -> Tensor:
    """The softmax over keys: [..., q, D] queries, [..., k, D] keys and the mask [..., q, k] -> [..., q, k]. All float32.

    `sinks` [..., q, 1] are one more score of each query, whose weight is left out. `bias` [..., q, k] is added to scores.
    """
    scores = torch.matmul(query * scoring.scale, key.transpose(-1, -2))
    if scoring.soft_cap:
        scores = torch.tanh(scores / scoring.soft_cap) * scoring.soft_cap
    if bias is not None:
        scores += bias
    scores = scores.masked_fill_(masked, -math.inf)
    return scores.softmax(-1) if sinks is None else torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


class _Step:
    def __init__(self, backend: TorchNativeBackend, metadata: AttentionMetadata) -> None:
        self._backend = backend
        spec, host = backend.spec, metadata.host
        self._metadata = metadata
        self._slots = metadata.slot_mapping.long()
        self._written: Tensor | None = None  # the tokens with a slot, where not all have one
        if host.num_tokens and host.slot_mapping.min() < 0:
            written = np.flatnonzero(host.slot_mapping[0] >= 0)
            self._written = to_device(written, spec.device)
            self._slots = to_device(host.slot_mapping[:, written], spec.device).long()
        spans = {scoring.span for scoring in spec.scoring}
        self._decodes = {span: _plan_decodes(spec, host, span) for span in spans}
        self._prefills = {span: _plan_prefills(host, metadata.kv_indices, span) for span in spans}

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        cache, slots = self._backend.caches[layer], self._slots[self._backend.spec.places[layer][0]]
        parts = [(cache.keys, cache.key_scale, key), (cache.values, cache.value_scale, value)]
        for pages, scale, new in parts[:1] if cache.latent else parts:
            _put(pages, scale, slots, new if self._written is None else new.index_select(0, self._written))

    def convolve(self, places: range, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolve_torch(self._backend, self._metadata, places, inputs, weight, bias)

    def recur(self, layer: int, rule: RecurrentRule, mixed: Tensor, gates: Gates) -> Tensor:
        return recur_torch(self._backend, self._metadata, layer, rule, mixed, gates)

    def target(self, layer: int) -> None:
        """Pages lie in another order here."""

    def attend(
        self, layer: int, query: Tensor, sinks: Tensor | None = None, out: Tensor | None = None, index: IndexQuery | None = None
    ) -> Tensor:
        spec = self._backend.spec
        cache, scoring, group = self._backend.caches[layer], spec.scoring[layer], spec.places[layer][0]
        heads, slopes = spec.heads_of(layer), self._backend.slopes[layer]
        by_kv_head = None if sinks is None else sinks.float().view(heads.num_kv_heads, -1)
        slopes = None if slopes is None else slopes.view(heads.num_kv_heads, -1)
        out = query.new_empty(*query.shape[:2], heads.value_dim) if out is None else out
        for decodes in self._decodes[scoring.span]:
            attended = decodes.attend(query.index_select(0, decodes.rows), cache, decodes.pages[group], scoring, by_kv_head, slopes)
            out.index_copy_(0, decodes.rows, attended)
        for prefill in self._prefills[scoring.span]:
            prefill.attend(query, cache, prefill.pages[group], scoring, by_kv_head, slopes, out)
        if index is not None and spec.top_k:
            attend_chosen_torch(self._backend, self._metadata, layer, query, index, out)
        return out


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Decode rows that see similar numbers of pages, g of them, padded to P pages with the reserved page 0. Positions are counted from the
    first of these pages."""

    rows: Tensor  # [g] int64, row = query index
    pages: Tensor  # [groups, g * P] int32
    seq_lens: Tensor  # [g, 1] int32
    first_seen: Tensor  # [g, 1] int32, the first position that a row sees
    last_pages: Tensor  # [g] int64, where in `pages` a row's last page is
    unused: Tensor  # [g, page_size, 1] bool, the slots of the last page beyond the row's length
    offsets: Tensor  # [P * page_size] int32, 0, 1, ...

    def attend(
        self, query: Tensor, cache: PagedCache, pages: Tensor, scoring: Scoring, sinks: Tensor | None, slopes: Tensor | None
    ) -> Tensor:
        """[g, num_heads, head_dim] -> [g, num_heads, value_dim]. `pages` are those of the layer's group, `sinks` and `slopes`
        [num_kv_heads, heads]."""
        rows, num_heads, head_dim = query.shape
        key, value = _take_both(cache, pages)
        num_kv_heads = len(key)
        # Zero times NaN is NaN: what the page's last owner left beyond the row's length must not reach the weighted sum.
        value.index_copy_(1, self.last_pages, value.index_select(1, self.last_pages).masked_fill_(self.unused, 0.0))
        key = key.view(num_kv_heads, rows, -1, head_dim)
        value = value.view(num_kv_heads, rows, -1, value.shape[-1])
        grouped = query.float().view(rows, num_kv_heads, -1, head_dim).transpose(0, 1)  # [Hkv, g, group, D]
        masked = self.offsets >= self.seq_lens  # [g, P * page_size]
        if scoring.window is not None:
            masked = masked | (self.offsets < self.first_seen)
        if sinks is not None:
            sinks = sinks[:, None, :, None].expand(-1, rows, -1, -1)
        bias = None if slopes is None else slopes[:, None, :, None] * (self.offsets - (self.seq_lens - 1))[:, None, :]
        weights = _weights(scoring, grouped, key, masked[:, None, :], sinks, bias)
        return torch.matmul(weights, value).transpose(0, 1).reshape(rows, num_heads, -1).to(query.dtype)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One row that computes `length` tokens from position `start`; its first query is number `first`."""

    first: int
    start: int
    length: int
    begin: int  # position of the first token of the pages
    pages: Tensor  # [groups, P] int32
    seen: NDArray[np.int32] | None  # [length], as of `StepLayout`

    def attend(
        self, query: Tensor, cache: PagedCache, pages: Tensor, scoring: Scoring, sinks: Tensor | None, slopes: Tensor | None, out: Tensor
    ) -> None:
        """Computes the attention of the row's queries in `query` [T, num_heads, head_dim] into their rows of `out` [T, num_heads,
        value_dim]. The other arguments are those of `_Decodes.attend`."""
        num_heads = query.shape[1]
        key, value = (taken.flatten(1, 2) for taken in _take_both(cache, pages))
        num_kv_heads, _, head_dim = key.shape
        window = scoring.window
        block = max(1, _SCORE_ELEMENTS // (num_heads * (self.start + self.length)))
        for begin in range(0, self.length, block):
            size = min(block, self.length - begin)
            first_position = self.start + begin
            high = first_position + size
            seen = None if self.seen is None or not scoring.within_images else self.seen[begin : begin + size]
            if seen is not None:
                high = max(high, int(seen.max()))
            low = int(scoring.span.first(np.array(first_position)))
            rows = slice(self.first + begin, self.first + begin + size)
            grouped = query[rows].float().view(size, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [Hkv, group, size, D]
            at = torch.arange(first_position, first_position + size, device=query.device)[:, None]
            source = torch.arange(low, high, device=query.device)[None, :]
            masked = source > at if seen is None else source >= to_device(seen, query.device)[:, None]
            if window is not None:
                masked |= source < (at - at % window if scoring.chunked else at - window + 1)
            group = num_heads // num_kv_heads
            # One matrix per KV head, with the queries of all its heads
            by_query = None if sinks is None else sinks.repeat_interleave(size, 1).unsqueeze(-1)
            bias = None if slopes is None else (slopes[:, :, None, None] * (source - at)).flatten(1, 2)
            queries = grouped.reshape(num_kv_heads, -1, head_dim)
            read = slice(low - self.begin, high - self.begin)
            weights = _weights(scoring, queries, key[:, read], masked.repeat(group, 1), by_query, bias)
            summed = torch.matmul(weights, value[:, read]).view(num_kv_heads, -1, size, value.shape[-1])
            out[rows] = summed.permute(2, 0, 1, 3).reshape(size, num_heads, -1)


def _plan_decodes(spec: AttentionSpec, host: StepLayout, span: Span) -> list[_Decodes]:
    """Splits the decode rows into parts whose padded gather stays small and at most half padding."""
    if host.num_decodes == 0:
        return []
    first_seen = span.first(host.seq_lens[: host.num_decodes] - 1)
    skipped = first_seen // spec.page_size
    num_pages = np.diff(host.kv_indptr[: host.num_decodes + 1]) - skipped
    order = np.argsort(-num_pages, kind="stable")
    descending = num_pages[order]
    page_elements = spec.num_kv_heads * spec.page_size * spec.head_dim
    parts = []
    begin = 0
    while begin < host.num_decodes:
        width = int(descending[begin])
        fitting = max(1, _GATHER_ELEMENTS // (width * page_elements))
        long_enough = int(np.searchsorted(-descending, -(width // 2), side="right"))
        end = min(begin + fitting, max(long_enough, begin + 1))
        parts.append(_pad_decodes(spec, host, order[begin:end], first_seen[order[begin:end]], width))
        begin = end
    return parts


def _pad_decodes(spec: AttentionSpec, host: StepLayout, rows: NDArray[np.int64], first_seen: NDArray[np.int32], width: int) -> _Decodes:
    """`first_seen` are the first positions that the rows see; no pages before these are read."""
    skipped = first_seen // host.page_size
    begins = host.kv_indptr[rows] + skipped
    counts = host.kv_indptr[rows + 1] - begins
    columns = np.arange(width, dtype=np.int32)
    present = columns < counts[:, None]
    pages = np.where(present, host.kv_indices.take(begins[:, None] + columns, axis=1, mode="clip"), 0).astype(np.int32)
    unused = np.arange(host.page_size, dtype=np.int32) >= host.last_page_len[rows][:, None]
    last_pages = np.arange(len(rows), dtype=np.int64) * width + counts - 1
    put = partial(to_device, device=spec.device)
    return _Decodes(
        rows=put(rows),
        pages=put(pages.reshape(len(pages), -1)),
        seq_lens=put((host.seq_lens[rows] - skipped * host.page_size)[:, None]),
        first_seen=put((first_seen - skipped * host.page_size)[:, None]),
        last_pages=put(last_pages),
        unused=put(unused[:, :, None]),
        offsets=put(np.arange(width * host.page_size, dtype=np.int32)),
    )


def _plan_prefills(host: StepLayout, kv_indices: Tensor, span: Span) -> list[_Prefill]:
    prefills = []
    for row in range(host.num_decodes, host.num_rows):
        first, end = int(host.qo_indptr[row]), int(host.qo_indptr[row + 1])
        start = int(host.seq_lens[row]) - (end - first)
        skipped = int(span.first(np.array(start))) // host.page_size
        pages = kv_indices[:, int(host.kv_indptr[row]) + skipped : int(host.kv_indptr[row + 1])]
        seen = None if host.seen is None else host.seen[first:end]
        prefills.append(_Prefill(first, start, end - first, skipped * host.page_size, pages, seen))
    return prefills
