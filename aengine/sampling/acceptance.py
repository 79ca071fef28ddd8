"""How many of a row's tokens count in a step with drafts: those up to the first that is not its draft."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def num_accepted_on_host(tokens: NDArray[np.integer], drafts: NDArray[np.int32], firsts: NDArray[np.int64]) -> NDArray[np.int32]:
    """[rows]: how many of each row's tokens count.

    `tokens` [m] were sampled, the tokens of a row one after another. `drafts` [m] are -1 at a row's last token. `firsts` [rows] are the
    indices of the rows' first tokens.
    """
    ends = (tokens != drafts).nonzero()[0]
    counts: NDArray[np.int32] = (ends[ends.searchsorted(firsts)] - firsts + 1).astype(np.int32)
    return counts


def num_accepted(tokens: Tensor, drafts: Tensor, firsts: Tensor) -> Tensor:
    """The same on a device, which the host does not wait for. `drafts` and `firsts` are int32."""
    count = len(tokens)
    indices = torch.arange(count, dtype=torch.int32, device=tokens.device)
    ends = torch.where(tokens == drafts, count, indices).flip(0).cummin(0).values.flip(0)  # where the row that goes on here ends
    return ends.index_select(0, firsts) - firsts + 1
