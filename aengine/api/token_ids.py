"""The reading of token ids. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aengine.api.errors import InvalidRequestError


def read_token_ids(ids: Sequence[int] | NDArray[np.integer], most: int, field: str = "prompt") -> NDArray[np.integer]:
    """Ids, each in 0..`most`. Raises `InvalidRequestError` (`field`)."""
    if not len(ids):
        return np.empty(0, np.int64)
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of several lengths
        array = np.empty(0, object)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequestError.of(field, "token ids must be integers")
    outside = array[(array < 0) | (array > most)]
    if len(outside):
        raise InvalidRequestError.of(field, f"token id {int(outside[0])} is not in [0, {most}]")
    return array
