"""What an attention backend is. Owns the contract; knows nothing of models, schedulers or of how a backend stores KV.

A backend owns the KV tensors and their layout: everyone else counts pages and hands over slots. Page 0 is reserved: it is
never given to a sequence, nothing is written to it, and padding points at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention.metadata import AttentionMetadata, StepLayout


class BackendUnavailableError(Exception):
    """A backend cannot run here, or not this model; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a backend must know of a model and of the page pool."""

    num_heads: int
    num_kv_heads: int  # divides num_heads; query head h reads KV head h // (num_heads // num_kv_heads)
    head_dim: int
    scale: float  # multiplies the scores
    windows: tuple[int | None, ...]  # per layer: a query attends to this many latest positions, itself included; None: to all
    page_size: int
    dtype: torch.dtype  # of queries, of what is written, and of the output
    device: torch.device
    soft_cap: float = 0.0  # scores are soft_cap * tanh(scores / soft_cap); 0: as they are
    kv_dtype: torch.dtype | None = None  # of the KV cache; None: dtype
    kv_scales: tuple[tuple[float, float], ...] | None = None
    """Per layer, of K and V: the cache holds value / scale, saturated, where kv_dtype is float8. None: all are 1."""

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    def scales(self, layer: int) -> tuple[float, float]:
        """Of K and of V."""
        return (1.0, 1.0) if self.kv_scales is None else self.kv_scales[layer]


class AttentionStep(Protocol):
    """One step's attention, planned once and used by every layer."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores [T, num_kv_heads, head_dim] keys and values at the step's slots; slot -1 is skipped."""

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Causal attention of the [T, num_heads, head_dim] queries over their rows' pages; returns the same shape.

        Reads what `write` of this step and of all steps before stored, nothing beyond a row's length.
        """


class GraphStep(AttentionStep, Protocol):
    """The attention of decode steps with a fixed number of rows, over index arrays that stay where they are, so that a graph can be
    captured of its calls once and be replayed for every step that is prepared."""

    def prepare(self, layout: StepLayout) -> None:
        """Before each capture and replay: the step's layout, whose arrays are in the buffers already, or on their way there on the
        current stream. It has as many rows as the buffers, each with one query; padding rows have length 1, page 0 and slot -1."""


class AttentionBackend(Protocol):
    """KV storage of all layers and the attention over it."""

    @property
    def name(self) -> str: ...

    def bytes_per_page(self) -> int:
        """Bytes that one page takes in all layers together, K and V."""

    def allocate(self, num_pages: int) -> None:
        """Creates the KV tensors, zeroed; `num_pages` includes the reserved page 0. Frees what was allocated before."""

    def copy_pages(self, sources: NDArray[np.int32], destinations: NDArray[np.int32]) -> None:
        """Copies page sources[i] to page destinations[i], [c] each, K and V of all layers, after the writes of steps before.

        No page is twice a destination, and all sources are read before any destination is written.
        """

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        """Prepares a step. Its result is valid until the next `plan`."""

    def graph_step(self, buffers: AttentionMetadata) -> GraphStep | None:
        """For graphs over `buffers`: device arrays of a fixed number of rows, `kv_indices` as long as all pages of the pool or of that
        many rows; `buffers.host` is a layout that fits them. `write` skips slot -1 on the device. None: this backend is not for graphs.
        """
