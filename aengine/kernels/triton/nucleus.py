"""Finds the end of a row's nucleus (top-p, Holtzman et al. 2020) without a sort: one launch, one program for each row.

One pass over the row sums its mass, one lists the few tokens among which the last one of the nucleus must be, then a bisection over the
bits of their logits finds it. The nucleus is that of `aengine.sampling.candidates.kept_candidates`: tokens in the order of (logit, -id)
until their mass reaches top_p, so of tokens with the same logit those with the lower ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.draw_params import DrawParams
from aengine.kernels.triton.noise import load_min_p, load_temperature, load_top_p

_CAPACITY = 8192  # the most tokens that are listed; the bisection reads the whole row where more may be the last one
_IDS_AT_ONCE = 8192
_SLACK = tl.constexpr(0.01)  # nats, far above the rounding of a sum


def nucleus_end(logits: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    """The lowest logit in each row's nucleus, float32 [m], and the last id, int32 [m], that is in it with this logit.

    `logits` [m, V] float32 with contiguous rows. The mass that top_p refers to is that of the tokens that min_p keeps; 0 keeps all. The
    likeliest token is always in. Sums are float64.
    """
    rows, vocab_size = logits.shape
    floors = torch.empty(rows, device=logits.device)
    last_ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        listed = torch.empty(rows, min(_CAPACITY, vocab_size), dtype=torch.int32, device=logits.device)
        _nucleus_end[(rows,)](
            logits,
            logits.stride(0),
            logits.amax(-1),
            params.packed,
            listed,
            floors,
            last_ids,
            vocab_size,
            CAPACITY=listed.shape[1],
            IDS=min(_IDS_AT_ONCE, triton.next_power_of_2(vocab_size)),
            num_warps=16,
        )
    return floors, last_ids


@triton.jit
def _ordered(logit):
    """Integers in the order of the floats; -0.0 is 0.0."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _candidates(row, listed, whole, begin, count, best, temperature, limit, IDS: tl.constexpr):
    """The next of `count` candidates, from `listed` or, where the `whole` row is searched, from the row: ids, logits, float64 masses
    relative to the best score, and which of them are candidates: their scores are within `limit` of the best."""
    at = begin + tl.arange(0, IDS)
    there = at < count
    ids = tl.where(whole, at, tl.load(listed + at, mask=there & (not whole), other=0))
    logit = tl.load(row + ids, mask=there, other=float("-inf"))
    behind = tl.div_rn(logit, temperature) - best
    there = there & (behind >= limit)
    return ids, logit, tl.where(there, tl.exp(behind), 0.0).to(tl.float64), there


@triton.jit
def _nucleus_end(
    logits,
    logits_stride,
    best_logits,
    packed,
    listed,
    floors,
    last_ids,
    vocab_size,
    CAPACITY: tl.constexpr,
    IDS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * logits_stride
    listed += index * CAPACITY
    temperature = load_temperature(packed, index)
    top_p = load_top_p(packed, index).to(tl.float64)
    best_logit = tl.load(best_logits + index)
    best = tl.div_rn(best_logit, temperature)
    limit = tl.log(load_min_p(packed, index))

    total = tl.zeros([], tl.float64)
    for begin in range(0, vocab_size, IDS):
        total += tl.sum(_candidates(row, listed, True, begin, vocab_size, best, temperature, limit, IDS)[2], axis=0)
    needed = top_p * total

    # Tokens so unlikely that all of them together are outside of the nucleus are not the last one.
    limit = tl.maximum(limit, tl.log(((1.0 - top_p) * total / vocab_size).to(tl.float32)) - _SLACK)
    count = 0
    low = _ordered(best_logit).to(tl.int64)
    high = low
    for begin in range(0, vocab_size, IDS):
        ids, logit, _, there = _candidates(row, listed, True, begin, vocab_size, best, temperature, limit, IDS)
        place = count + tl.cumsum(there.to(tl.int32), axis=0) - 1
        tl.store(listed + place, ids, mask=there & (place < CAPACITY))
        count += tl.sum(there.to(tl.int32), axis=0)
        low = tl.minimum(low, tl.min(tl.where(there, _ordered(logit), 0x7FFFFFFF), axis=0).to(tl.int64))
    whole = count > CAPACITY
    count = tl.where(whole, vocab_size, count)
    tl.debug_barrier()  # the list of all threads is read from here on

    # Finds the highest logit whose token, together with all above it, has the needed mass. That holds at `low` and not above `high`; both
    # move to the next candidate, so that there are fewer passes than bits.
    while low < high:
        middle = high - (high - low) // 2
        reached = tl.zeros([], tl.float64)
        next_low = high
        next_high = low
        for begin in range(0, count, IDS):
            _, logit, mass, there = _candidates(row, listed, whole, begin, count, best, temperature, limit, IDS)
            order = _ordered(logit)
            inside = there & (order >= middle)
            outside = there & (order < middle)
            reached += tl.sum(tl.where(inside, mass, 0.0), axis=0)
            next_low = tl.minimum(next_low, tl.min(tl.where(inside, order, 0x7FFFFFFF), axis=0).to(tl.int64))
            next_high = tl.maximum(next_high, tl.max(tl.where(outside, order, -0x80000000), axis=0).to(tl.int64))
        low = tl.where(reached >= needed, next_low, low)
        high = tl.where(reached >= needed, high, next_high)

    # As many of the tokens with that logit as are needed, lower ids first.
    above = tl.zeros([], tl.float64)
    mass_of_one = tl.zeros([], tl.float64)
    ties = 0
    for begin in range(0, count, IDS):
        _, logit, mass, there = _candidates(row, listed, whole, begin, count, best, temperature, limit, IDS)
        tied = there & (_ordered(logit) == low)
        above += tl.sum(tl.where(_ordered(logit) > low, mass, 0.0), axis=0)
        mass_of_one = tl.maximum(mass_of_one, tl.max(tl.where(tied, mass, 0.0), axis=0))
        ties += tl.sum(tied.to(tl.int32), axis=0)
    floor = low.to(tl.int32)
    tl.store(floors + index, (floor ^ ((floor >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
    last_id = vocab_size
    if above + ties * mass_of_one >= needed + mass_of_one:  # not all of them
        last_tied = tl.maximum(tl.ceil((needed - above) / mass_of_one).to(tl.int32), 1)
        seen = 0
        for begin in range(0, count, IDS):
            ids, logit, _, there = _candidates(row, listed, whole, begin, count, best, temperature, limit, IDS)
            tied = there & (_ordered(logit) == low)
            within = tied & (seen + tl.cumsum(tied.to(tl.int32), axis=0) == last_tied)
            last_id = tl.minimum(last_id, tl.min(tl.where(within, ids, vocab_size), axis=0))
            seen += tl.sum(tied.to(tl.int32), axis=0)
    tl.store(last_ids + index, last_id)
