"""Adapters: low-rank matrices that are added to those of a model, for the rows of a batch that ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """`rows` of a parameter get `b @ (a @ x)` more."""

    rows: range
    a: Tensor  # [r, in_features]; of an embedding [r, vocab_size]
    b: Tensor  # [len(rows), r], times the scale of the adapter


@dataclass(frozen=True, slots=True)
class Adapter:
    """The parts of each parameter that it changes, by name without `.weight`: rows ascend, and no two parts have the same row."""

    parts: Mapping[str, tuple[LowRankPart, ...]]
