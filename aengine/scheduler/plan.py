"""What crosses between scheduler and runner: `StepPlan` down, `StepResult` up. Plain, picklable, incremental data.

A row that is new, or whose pages grew, is described in the plan that first needs it; after that the runner knows it by
index. Nothing here refers to requests, streams or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowParams:
    """The sampling parameters of a row, with all defaults applied."""

    temperature: float  # 0.0 is greedy
    top_k: int  # 0 is off
    top_p: float  # 1.0 is off
    min_p: float  # 0.0 is off
    seed: int  # 0..2^64-1


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that a sequence takes over in this step. Whatever the runner kept for the row before is void."""

    row: int
    params: RowParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over a mixed batch of n rows with T tokens.

    The first `num_decodes` rows compute one token each: the one that the runner sampled last for that row (the scheduler may
    not know it yet). The other rows compute the given ids. `positions` of a row's tokens are
    `starts[i] .. starts[i] + lengths[i] - 1`; their KV goes to the row's pages at these positions, and they attend to
    everything of the row at or before their own position. A row with `samples[i]` gets a next token from the logits of its
    last token; that token's position (which keys its noise) is `starts[i] + lengths[i]`.
    """

    step: int  # counts from 0 without gaps
    rows: IntArray  # [n], no row twice
    num_decodes: int
    starts: IntArray  # [n]
    lengths: IntArray  # [n], >= 1; 1 for decodes
    samples: NDArray[np.bool_]  # [n]; True for decodes
    token_ids: IntArray  # [sum(lengths[num_decodes:])], in the order of rows
    new_rows: tuple[NewRow, ...]
    # Page-table writes that precede the step: row page_rows[i] has page page_ids[i] at index page_cols[i].
    # Writes of a new row start at column 0 and void what the row had before.
    page_rows: IntArray  # [p]
    page_cols: IntArray  # [p]
    page_ids: IntArray  # [p]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: `tokens[j]` is the token sampled for the j-th row with `samples`, in the order of the plan."""

    step: int
    tokens: IntArray  # [samples.sum()]


class RowsFailed(Exception):
    """Raised instead of running a step: some of its rows cannot be built, each for a reason of its own.

    Nothing of the step has happened that would matter: it can be planned again without those rows.
    """

    def __init__(self, errors: Mapping[int, BaseException]) -> None:
        super().__init__(f"rows {sorted(errors)} cannot be built")
        self.errors = dict(errors)
