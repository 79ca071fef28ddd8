"""Causal depthwise convolutions over the latest inputs of a sequence, which lie in its pages where attention has
keys and values.

Owns where the inputs of a token are, and the reference that the kernels are compared with. A convolution of `taps` inputs sees what a
sliding window of so many tokens sees, so pages, prefixes, forks and rejected drafts are as those of attention with a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.attention.base import AttentionBackend
from aengine.attention.metadata import AttentionMetadata
from aengine.kernels.paged_cache import PagedCache


class StepConvolutions:
    """The convolutions of one step, in plain torch. What depends on the step is computed on the device, so that graphs can be recorded."""

    def __init__(self, backend: AttentionBackend, metadata: AttentionMetadata) -> None:
        self._backend = backend
        self._metadata = metadata

    def __call__(self, places: range, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `AttentionStep.convolve`."""
        taps, total = weight.shape[1], torch.zeros_like(inputs, dtype=torch.float32)
        self._write(places, inputs)
        wide = weight.float()
        for tap in range(taps):
            back = taps - 1 - tap
            total += (self._earlier(places, back, inputs.shape[1]) if back else inputs.float()) * wide[:, tap]
        return (total if bias is None else total + bias.float()).to(inputs.dtype)

    def _write(self, places: Sequence[int], inputs: Tensor) -> None:
        first = 0
        for place in places:
            group, _ = self._backend.spec.places[place]
            slots = self._metadata.slot_mapping[group][: len(inputs)].clamp(min=0).long()  # without one: the reserved page 0
            for pages in _halves(self._backend.caches[place]):
                heads, width = _heads_and_width(pages, self._backend.page_axis)
                part = inputs[:, first : first + heads * width]
                if part.shape[1] < heads * width:
                    part = torch.nn.functional.pad(part, (0, heads * width - part.shape[1]))
                rows = part.view(len(part), heads, width)
                if self._backend.page_axis:
                    pages.view(heads, -1, width).index_copy_(1, slots, rows.transpose(0, 1))
                else:
                    pages.view(-1, heads, width).index_copy_(0, slots, rows)
                first += heads * width

    def _earlier(self, places: Sequence[int], back: int, channels: int) -> Tensor:
        """[T, channels] float32: the inputs `back` tokens before each of the step; zeros before the first of a sequence."""
        parts = []
        for place in places:
            group, _ = self._backend.spec.places[place]
            slots, exists = self._slots_before(group, back)
            for pages in _halves(self._backend.caches[place]):
                heads, width = _heads_and_width(pages, self._backend.page_axis)
                if self._backend.page_axis:
                    rows = pages.view(heads, -1, width).index_select(1, slots).transpose(0, 1)
                else:
                    rows = pages.view(-1, heads, width).index_select(0, slots)
                parts.append(rows.flatten(1).float().masked_fill_(~exists, 0.0))
        return torch.cat(parts, 1)[:, :channels]

    def _slots_before(self, group: int, back: int) -> tuple[Tensor, Tensor]:
        """[T] int64 slots of the tokens that are `back` positions before those of the step; and [T, 1], whether there are such tokens."""
        step, page_size = self._metadata, self._backend.spec.page_size
        num_tokens = step.slot_mapping.shape[1]
        tokens = torch.arange(num_tokens, device=step.slot_mapping.device, dtype=torch.int32)
        rows = torch.searchsorted(step.qo_indptr[1:].contiguous(), tokens, right=True).clamp(max=len(step.last_page_len) - 1)
        first_pages = step.kv_indptr[:-1].index_select(0, rows)
        num_pages = step.kv_indptr[1:].index_select(0, rows) - first_pages
        lengths = (num_pages - 1) * page_size + step.last_page_len.index_select(0, rows)
        positions = lengths - (step.qo_indptr[1:].index_select(0, rows) - tokens) - back
        exists, positions = positions >= 0, positions.clamp(min=0)
        pages = step.kv_indices[group].index_select(0, first_pages + positions // page_size).long()
        return pages * page_size + positions % page_size, exists.unsqueeze(1)


def _halves(cache: PagedCache) -> Sequence[Tensor]:
    return (cache.keys,) if cache.latent else (cache.keys, cache.values)


def _heads_and_width(pages: Tensor, page_axis: int) -> tuple[int, int]:
    return pages.shape[0 if page_axis else 2], pages.shape[3]
