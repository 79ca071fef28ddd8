"""The likeliest tokens of a row, in an order that depends on nothing but the row, and the choice among them.

Owns top-k, top-p and min-p. Ties are broken by the lower token id, everywhere, so that a filter keeps the same tokens
whatever the device, the algorithm behind topk, or the neighbours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_NARROWEST_BLOCK = 8  # ids; narrower ones cost more than they save


def top_candidates(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[m, V] -> the `count` highest: scores [m, count] float32, descending, and their ids [m, count] int64.

    Most of it is one pass for the maxima of blocks of neighbouring ids. The best `count` blocks, by (maximum, -index), hold the best
    `count` scores: whatever is in another block has `count` scores before it, the first maximum of each of those blocks.
    """
    vocab_size = scores.shape[1]
    width = 1 << max(0, round(math.log2(vocab_size / count) / 2))
    if width < _NARROWEST_BLOCK or vocab_size < 4 * count * width:
        return _highest(scores, count)
    blocks = _highest(_block_maxima(scores, width), count)[1]
    blocks = blocks.sort(dim=-1).values  # so that a lower id stays a lower index
    ids = (blocks[:, :, None] * width + torch.arange(width, device=scores.device)).flatten(1)
    beyond = ids >= vocab_size
    some = scores.gather(1, ids.clamp_(max=vocab_size - 1)).masked_fill_(beyond, -math.inf)
    best, at = _highest(some, count)
    return best, ids.gather(1, at)


def _block_maxima(scores: Tensor, width: int) -> Tensor:
    vocab_size = scores.shape[1]
    whole = vocab_size // width
    maxima = scores[:, : whole * width].view(len(scores), whole, width).amax(-1)
    return maxima if whole * width == vocab_size else torch.cat((maxima, scores[:, whole * width :].amax(-1, keepdim=True)), 1)


def _highest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest of each row by (score, -index), float32, with their indices."""
    scores = scores.float()
    bits = (scores + 0.0).view(torch.int32)  # there is no -0.0 after this: it equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats
    keys = (ordered.to(torch.int64) << 32) | (0x7FFFFFFF - torch.arange(scores.shape[1], device=scores.device))  # all distinct
    best = keys.sort(dim=-1, descending=True).values if count == scores.shape[1] else keys.topk(count, dim=-1).values
    found = 0x7FFFFFFF - (best & 0xFFFFFFFF)
    return scores.gather(1, found), found


def kept_candidates(scores: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor | None) -> Tensor:
    """Which of the candidates a draw may take: [m, n] bool, always the first one.

    `scores` are descending, after temperature; parameters are [m], top_k 0 being off. `total` [m, 1] float64 is the mass
    that top_p refers to, relative to the first candidate; None: the candidates that min_p and top_k leave.
    """
    rank = torch.arange(scores.shape[1], device=scores.device)
    kept = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    kept &= ~(scores - scores[:, :1] < min_p.log()[:, None])
    # float64: the sums are then the same for any number of candidates, up to what no draw can notice
    mass = (scores - scores[:, :1]).exp().masked_fill_(~kept, 0.0).to(torch.float64)
    reached = mass.cumsum(-1)
    needed = top_p[:, None] * (reached[:, -1:] if total is None else total)
    kept &= reached - mass < needed
    kept[:, 0] = True  # also for a top_p that is zero in float32
    return kept
