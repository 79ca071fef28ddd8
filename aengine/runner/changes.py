"""What can change of a model that runs: its adapters and its weights.

A change is prepared beside the steps, which may fail and touches nothing, and then applied between two steps.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, get_args

from aengine.outputs import AdapterInfo


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    key: int  # >= 1, never used before
    name: str
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
    number: int = 0  # of the change among those of several ranks
    adapter: AdapterInfo | None = None  # that is loaded


def change_to_json(change: Change) -> str:
    return json.dumps({"kind": type(change).__name__, **asdict(change)})


def change_from_json(text: str) -> Change:
    fields = json.loads(text)
    kind = fields.pop("kind")
    change: Change = next(each for each in get_args(Change) if each.__name__ == kind)(**fields)
    return change
