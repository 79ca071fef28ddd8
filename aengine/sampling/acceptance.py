"""How many of a row's tokens count in a step with drafts, computed on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def num_accepted(tokens: Tensor, drafts: Tensor, firsts: Tensor) -> Tensor:
    """[rows] int32: how many of each row's tokens count, those up to the first that is not its draft.

    `tokens` [m] were sampled, the tokens of a row one after another. `drafts` [m] int32 are -1 at a row's last token. `firsts` [rows]
    int32 are the indices of the rows' first tokens.
    """
    count = len(tokens)
    indices = torch.arange(count, dtype=torch.int32, device=tokens.device)
    ends = torch.where(tokens == drafts, count, indices).flip(0).cummin(0).values.flip(0)  # where the row that goes on here ends
    return ends.index_select(0, firsts) - firsts + 1
