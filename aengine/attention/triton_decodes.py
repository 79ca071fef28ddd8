"""Decode rows by our Triton kernel, over caches [num_pages, page_size, num_kv_heads, width]: their work is planned on the host, once for
each group of layers and window, and uploaded in one copy.

Owns where the work of a step lies on the device. Importing this needs triton.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aengine.attention.base import AttentionSpec
from aengine.attention.decode_work import ITEM_FIELDS, DecodeWork, WorkBounds, plan_decodes
from aengine.attention.metadata import AttentionMetadata, StepLayout
from aengine.kernels.paged_cache import PagedCache
from aengine.kernels.triton.attention import Blocks, is_hopper
from aengine.kernels.triton.decodes import Work, attend_decodes, decode_block
from aengine.kernels.upload import staged, upload


def blocks_of(spec: AttentionSpec) -> Blocks:
    """The blocks of a model on its device."""
    return Blocks.of(spec.head_dim, spec.value_dim, spec.latent, spec.dtype, spec.cache_dtype, is_hopper(spec.device))


class TritonDecodes:
    """The decode rows of a model's steps, on a device with so many multiprocessors."""

    def __init__(self, spec: AttentionSpec, processors: int, blocks: Blocks | None = None) -> None:
        self.spec = spec
        self.blocks = blocks or blocks_of(spec)
        kinds = [(group, scoring.window) for (group, _), scoring in zip(spec.places, spec.scoring, strict=True)]  # by layer
        self.kinds = list(dict.fromkeys(kinds))  # layers of a kind have the same work
        self.kind_of = [self.kinds.index(kind) for kind in kinds]
        group = spec.num_heads // spec.num_kv_heads
        self.bounds = WorkBounds.of(
            programs_per_item=spec.num_kv_heads * -(-group // decode_block(group, self.blocks)),
            processors=processors,
            rows_per_item=max(1, self.blocks.queries // group),
            least_keys=self.blocks.split_keys,
            key_block=self.blocks.keys,
        )

    def host_plan(self, layout: StepLayout, num_rows: int) -> list[DecodeWork]:
        """By kind the work of the first `num_rows` rows."""
        return [plan_decodes(layout, num_rows, group, window, self.bounds) for group, window in self.kinds]

    def plan(self, metadata: AttentionMetadata) -> PlannedDecodes:
        """For the decode rows of a step, at least one."""
        planned = self.host_plan(metadata.host, metadata.host.num_decodes)
        arrays = upload([array for work in planned for array in (work.items, work.rows)], self.spec.device)
        works = [Work(items, rows, work.num_partials) for items, rows, work in zip(arrays[::2], arrays[1::2], planned, strict=True)]
        return PlannedDecodes(self, metadata.kv_indices, works)

    def graph(self, buffers: AttentionMetadata) -> GraphDecodes:
        """For graphs of as many rows as the buffers have."""
        return GraphDecodes(self, buffers)


class PlannedDecodes:
    """The decode rows of one step."""

    def __init__(self, decodes: TritonDecodes, kv_indices: Tensor, works: list[Work]) -> None:
        self._decodes = decodes
        self._kv_indices = kv_indices  # [groups, pages]
        self._works = works  # by kind

    def attend(self, layer: int, query: Tensor, out: Tensor, cache: PagedCache, sinks: Tensor | None = None) -> None:
        """Attention of the step's first rows, one query of [T, num_heads, head_dim] each, to `out` [T, num_heads, value_dim]."""
        decodes = self._decodes
        kind = decodes.kind_of[layer]
        pages = self._kv_indices[decodes.kinds[kind][0]]
        attend_decodes(query, out, cache, pages, self._works[kind], decodes.spec.scoring[layer], sinks, decodes.blocks)


class GraphDecodes(PlannedDecodes):
    """Steps of a fixed number of rows, whose work is copied to the same place: launches depend on the number of rows alone."""

    def __init__(self, decodes: TritonDecodes, buffers: AttentionMetadata) -> None:
        self._num_rows = len(buffers.last_page_len)
        bounds = decodes.bounds
        self._num_items = bounds.max_items(self._num_rows)
        self._length = self._num_items * ITEM_FIELDS + 3 * self._num_rows  # of the work of a kind
        self._memory = torch.zeros(len(decodes.kinds) * self._length, dtype=torch.int32, device=decodes.spec.device)
        works = []
        for (_, window), part in zip(decodes.kinds, torch.split(self._memory, self._length), strict=True):
            items, rows = torch.split(part, [self._num_items * ITEM_FIELDS, 3 * self._num_rows])
            works.append(Work(items.view(-1, ITEM_FIELDS), rows.view(3, -1), bounds.max_partials(self._num_rows, window)))
        super().__init__(decodes, buffers.kv_indices, works)

    def prepare(self, layout: StepLayout) -> None:
        """Before each capture and replay: plans a step of as many decode rows, and copies its work on the current stream."""
        arrays = []
        for work in self._decodes.host_plan(layout, self._num_rows):
            unused = np.zeros(ITEM_FIELDS * (self._num_items - len(work.items)), dtype=np.int32)
            arrays += [work.items.reshape(-1), unused, work.rows.reshape(-1)]
        self._memory.copy_(staged(arrays, self._memory.device), non_blocking=True)
