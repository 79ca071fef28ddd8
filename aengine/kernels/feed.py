"""`Feed`: how tokens go from one step to the next, without anyone between the two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Feed:
    """Arrays are contiguous."""

    latest: NDArray[np.int32]  # the token that each row goes on from
    fed: NDArray[np.int32]  # rows whose latest tokens are the first ids of the step, from when it begins
    kept: NDArray[np.int32]  # rows whose latest tokens are what the step chooses, when it ends; none where it does not


NOTHING = Feed(*(np.zeros(0, np.int32) for _ in range(3)))
"""No rows are known: ids are given, and what is chosen is not kept."""
