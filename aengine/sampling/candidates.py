"""The likeliest tokens of a row, in an order that depends on nothing but the row, and the choice among them.

Owns top-k, top-p and min-p. Ties are broken by the lower token id, everywhere, so that a filter keeps the same tokens
whatever the device, the algorithm behind topk, or the neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_candidates(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[m, V] float32 -> the `count` highest: scores [m, count] descending, and their ids [m, count] int64."""
    vocab_size = scores.shape[1]
    bits = scores.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats
    descending_ids = torch.arange(vocab_size - 1, -1, -1, device=scores.device)
    keys = (ordered.to(torch.int64) << 32) | descending_ids  # all distinct: (score, -id)
    best = keys.sort(dim=-1, descending=True).values if count == vocab_size else keys.topk(count, dim=-1).values
    ids = (vocab_size - 1) - (best & 0xFFFFFFFF)
    return scores.gather(1, ids), ids


def below_min_p(scores: Tensor, best: Tensor, min_p: Tensor) -> Tensor:
    """[m, n] bool: less likely than min_p times the likeliest token, whose score is `best` [m, 1]. min_p is [m]."""
    return scores - best < min_p.log()[:, None]


def kept_candidates(scores: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor | None) -> Tensor:
    """Which of the candidates a draw may take: [m, n] bool, always the first one.

    `scores` are descending, after temperature; parameters are [m], top_k 0 being off. `total` [m, 1] float64 is the mass
    that top_p refers to, relative to the first candidate; None: the candidates that min_p and top_k leave.
    """
    rank = torch.arange(scores.shape[1], device=scores.device)
    kept = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    kept &= ~below_min_p(scores, scores[:, :1], min_p)
    # float64: the sums are then the same for any number of candidates, up to what no draw can notice
    mass = (scores - scores[:, :1]).exp().masked_fill_(~kept, 0.0).to(torch.float64)
    reached = mass.cumsum(-1)
    needed = top_p[:, None] * (reached[:, -1:] if total is None else total)
    kept &= reached - mass < needed
    kept[:, 0] = True  # also for a top_p that is zero in float32
    return kept
