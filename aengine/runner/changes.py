"""What can change of a model that runs: its adapters and its weights.

A change is prepared beside the steps, which may fail and touches nothing, and then applied between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    key: int  # >= 1, never used before
    path: str  # a directory, as PEFT writes it


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Of which no row is left."""

    key: int


@dataclass(frozen=True, slots=True)
class NewWeights:
    source: Any  # a directory, or what else `AsyncEngine.update_weights` takes


Change = LoadAdapter | UnloadAdapter | NewWeights


@dataclass(frozen=True, slots=True)
class Prepared:
    """A change that is ready to be applied."""

    change: Change
    content: object  # for the executor alone
