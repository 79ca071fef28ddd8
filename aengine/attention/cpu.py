"""Attention by our CPU kernels, for models whose layers torch runs: each write and each attention is one call of the kernels.

Owns what a call needs beside its tensors. The kernels run lists of operations on numbered buffers; here a list puts the tensors into
buffers (as rows of embeddings, which are copied), and writes or attends.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention.base import AttentionBackend, AttentionStep, BackendUnavailableError, Gates, IndexQuery, recur_torch
from aengine.attention.metadata import AttentionMetadata, AttentionSpec
from aengine.kernels.arrays import array_dtype
from aengine.kernels.cpu import library
from aengine.kernels.cpu.compiler import KernelsUnavailableError
from aengine.kernels.cpu.library import (
    ELEMENTS,
    MAX_KEY_DIM,
    MAX_VALUE_DIM,
    PANEL,
    CAttentionOp,
    CEmbedOp,
    CModel,
    CNorm,
    COp,
    CStep,
    Workspace,
    address,
    check,
    load_kernels,
)
from aengine.kernels.cpu.ops import KvPool, head_kind, place_bytes
from aengine.kernels.paged_cache import Heads
from aengine.kernels.recurrence import RecurrentRule

_NO_ROWS = np.zeros(1, np.int32)


class CpuBackend(AttentionBackend):
    """Pages are those of `KvPool`. A workspace is for one thread."""

    name = "cpu"

    def __init__(self, spec: AttentionSpec) -> None:
        """Raises BackendUnavailableError for a model that the kernels do not support, and where they cannot be compiled."""
        if spec.device.type != "cpu":
            raise BackendUnavailableError(f"the CPU kernels do not run on {spec.device.type}")
        if array_dtype(spec.dtype) not in ELEMENTS or spec.cache_dtype not in (spec.dtype, torch.int8):
            raise BackendUnavailableError(f"the CPU kernels are for bfloat16 and float32, not {spec.dtype} with KV of {spec.cache_dtype}")
        if spec.head_dim % 2 or spec.head_dim > MAX_KEY_DIM or spec.value_dim > MAX_VALUE_DIM:
            raise BackendUnavailableError(f"head_dim {spec.head_dim} is not an even number up to {MAX_VALUE_DIM}")
        if spec.top_k:
            raise BackendUnavailableError("the CPU kernels attend to all tokens, and not to those that an index chooses")
        if len(spec.places) > len(spec.scoring):
            raise BackendUnavailableError("convolutions are computed by the CPU kernels in a whole model alone, not in a layer of torch")
        super().__init__(spec)
        try:
            self.workspace = Workspace(load_kernels(), torch.get_num_threads())
        except KernelsUnavailableError as reason:
            raise BackendUnavailableError(str(reason)) from reason
        self.pool: KvPool | None = None

    def bytes_per_page(self) -> int:
        spec = self.spec
        return spec.layers_per_page * sum(place_bytes(spec.page_size, self._parts(), array_dtype(spec.cache_dtype)))

    def allocate(self, num_pages: int) -> None:
        spec = self.spec
        self.free()  # before the new pool is allocated
        self.pool = KvPool(
            layers_per_page=spec.layers_per_page,
            num_pages=num_pages,
            page_size=spec.page_size,
            parts=self._parts(),
            dtype=array_dtype(spec.cache_dtype),
        )
        self.tensors = [torch.from_numpy(pages) for pages in self.pool.pages]

    def _parts(self) -> list[tuple[int, Heads]]:
        return [(self.spec.part_of(layer), self.spec.heads_of(layer)) for layer in range(len(self.spec.places))]

    def free(self) -> None:
        super().free()
        self.pool = None

    def copy_pages(self, sources: NDArray[np.int32], destinations: NDArray[np.int32]) -> None:
        assert self.pool is not None, "allocated"
        self.pool.copy_pages(self.workspace, sources, destinations)

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        return _Step(self, metadata)

    def graph_step(self, buffers: AttentionMetadata) -> None:
        """The kernels are no operations of torch."""


class _Step:
    def __init__(self, backend: CpuBackend, metadata: AttentionMetadata) -> None:
        layout = metadata.host
        self._backend, self._metadata = backend, metadata
        tokens = np.arange(layout.num_tokens, dtype=np.int32)
        given = (tokens, layout.positions, layout.slot_mapping, layout.qo_indptr, layout.kv_indptr, layout.kv_indices, layout.last_page_len)
        self._arrays = [np.ascontiguousarray(array, dtype=np.int32) for array in (*given, tokens, _NO_ROWS, _NO_ROWS, _NO_ROWS)]
        self._num_tokens = layout.num_tokens
        self._c = CStep(
            *map(address, self._arrays),
            num_tokens=layout.num_tokens,
            num_rows=layout.num_rows,
            num_logits=layout.num_tokens,
            num_last_tokens=1,
            num_groups=len(layout.kv_indices),
        )
        if layout.seen is not None:
            self._arrays.append(np.ascontiguousarray(layout.seen, dtype=np.int32))
            self._c.seen = address(self._arrays[-1])

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        spec = self._backend.spec
        heads = spec.heads_of(layer)
        op = CAttentionOp(None, None, None, None, CNorm(), CNorm(), CNorm(), 0, *spec.places[layer], spec.part_of(layer), *heads)
        op.query, op.key, op.value = 0, 0, 1  # queries are neither normed nor rotated, so any buffer will do
        self._run([key, value], (library.ROTATE, op), heads.num_kv_heads * heads.value_dim, heads)

    def convolve(self, places: range, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise AssertionError("the backend refuses models with convolutions")

    def recur(self, layer: int, rule: RecurrentRule, mixed: Tensor, gates: Gates) -> Tensor:
        return recur_torch(self._backend, self._metadata, layer, rule, mixed, gates)

    def target(self, layer: int) -> None:
        """Pages have a layout of their own."""

    def attend(
        self, layer: int, query: Tensor, sinks: Tensor | None = None, out: Tensor | None = None, index: IndexQuery | None = None
    ) -> Tensor:
        spec, scoring = self._backend.spec, self._backend.spec.scoring[layer]
        heads = spec.heads_of(layer)
        scores, slopes = None if sinks is None else sinks.float().contiguous(), self._backend.slopes[layer]
        op = CAttentionOp(
            *(
                None,
                *(None if each is None else each.data_ptr() for each in (scores, None, slopes)),
                *(CNorm(), CNorm(), CNorm(), 0, *spec.places[layer], spec.part_of(layer)),
            ),
            *heads,
            window=scoring.window or 0,
            chunked=scoring.chunked,
            sees_images=scoring.within_images,
            scale=scoring.scale,
            soft_cap=scoring.soft_cap,
            out=1,
        )
        width = heads.num_heads * heads.value_dim
        attended = self._run([query], (library.ATTEND, op), width, heads)[:, :width].view(-1, heads.num_heads, heads.value_dim)
        return attended if out is None else out.copy_(attended)

    def _run(self, inputs: list[Tensor], op: tuple[int, ctypes.Structure], width: int, heads: Heads) -> Tensor:
        """Runs `op` on the rows of `inputs` [T, heads, width], which become the first buffers. Returns the last buffer, of `width` columns
        and padding."""
        spec, pool, workspace = self._backend.spec, self._backend.pool, self._backend.workspace
        assert pool is not None, "allocated"
        rows = [one.flatten(1).contiguous() for one in inputs]
        embeds = [CEmbedOp(one.data_ptr(), None, one.shape[1], buffer, 1.0) for buffer, one in enumerate(rows)]
        program = [*((library.EMBED, embed) for embed in embeds), op]
        widths = [*(one.shape[1] for one in rows), width]
        strides = [-(-one // PANEL) * PANEL for one in widths]
        model = CModel(
            ops=(COp * len(program))(*(COp(kind, ctypes.addressof(item)) for kind, item in program)),
            head=None,
            strides=(c_int64 * len(strides))(*strides),
            num_ops=len(program),
            num_buffers=len(strides),
            head_kinds=ctypes.pointer(head_kind(heads)),
            num_head_kinds=1,
            vocab=max(1, self._num_tokens),
            num_positions=1 << 30,
            hidden=len(strides) - 1,
            element=ELEMENTS[array_dtype(spec.dtype)],
        )
        out = torch.empty(self._num_tokens, strides[-1], dtype=spec.dtype)
        self._c.hidden = out.data_ptr()
        arguments = (ctypes.byref(model), ctypes.byref(pool.c), ctypes.byref(self._c), workspace.handle, workspace.threads)
        check(workspace.kernels.run_layers(*arguments))
        return out
