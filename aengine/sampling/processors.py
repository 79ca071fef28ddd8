"""`Processor`: what changes the logits of some rows before their tokens are sampled. `Sampler` runs all of them, in the pinned order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.scheduler.plan import NewRow


@dataclass(frozen=True, slots=True)
class StepRows:
    """The m rows of a step that are sampled. Processors add those that cannot be."""

    rows: NDArray[np.int32]  # [m], no row twice
    positions: NDArray[np.int32]  # [m], of the tokens that are about to be sampled
    failures: dict[int, Exception] = field(default_factory=dict)  # why a row cannot be sampled, by row
    postponed: set[int] = field(default_factory=set)  # rows for which there was no time in this step


class Processor:
    """Has a state for each row with its feature. `members` [k] are the indices of these rows among the m of a step."""

    feature: ClassVar[int]
    """Of `Features`."""

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Drops the state of these rows, and makes a new one for those with the feature. It may be called again after it raised."""
        raise NotImplementedError

    def apply(self, logits: Tensor, step: StepRows, members: NDArray[np.int64]) -> None:
        """Changes the rows `members` of the [m, vocab_size] float32 logits in place."""
        raise NotImplementedError

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int64]) -> Mapping[int, Exception]:
        """The next tokens of rows with the feature, as soon as the host has them. Returns the rows that cannot go on with their token, with
        the reason. Called for rows with `Features.LAST_TOKEN` at least."""
        return {}

    def limits(self, row: int, position: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """The parameters that limit which token a row with the feature may have at `position`, with the tokens [vocab_size] that each
        leaves."""
        yield from ()
