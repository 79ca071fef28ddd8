"""Draws from the likeliest tokens of a row (top-k, with min-p and top-p among them), in two launches: parts of rows, then rows.

Each part gives its likeliest k tokens, and the likeliest k of these are those of the row. Nothing is sorted: the logit of the k-th is found
bit by bit, by counting. The token is then drawn as `aengine.kernels.triton.sampling` draws it: the best of the perturbed scores is taken if
the mass before it is less than top_p, and if not, the best one before it is next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.params import DrawParams
from aengine.kernels.triton.sampling import (
    best_of,
    load_min_p,
    load_row_key,
    load_temperature,
    load_top_k,
    load_top_p,
    log_exponential,
    uniform_bits,
)

MOST = tl.constexpr(64)
"""The largest top_k."""
_PART_IDS = tl.constexpr(4096)
_BITS = {torch.bfloat16: 16, torch.float16: 19}  # the upper ones of float32 that such logits need


def draw_from_top_k(logits: Tensor, params: DrawParams, chosen: Tensor | None = None) -> Tensor:
    """[m] int64: of the tokens that `aengine.sampling.draw.kept_candidates` keeps, the argmax of logits / temperature - log E, E of
    stream 0; the lowest id of a tie.

    `logits` [m, V] have contiguous rows; top_k is 1 to `MOST` in all of them. The mass that top_p refers to is that of the tokens that
    min_p and top_k leave. Sums are float64, and their order depends on V alone. Every result is an id below V, also of rows with NaN.
    `chosen` [m] float32 gets the logits of the tokens.
    """
    rows, vocab_size = logits.shape
    parts = triton.cdiv(vocab_size, _PART_IDS.value)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chosen = torch.empty(rows, device=logits.device) if chosen is None else chosen
    if rows:
        values = torch.empty(rows, parts * MOST.value, dtype=torch.float32, device=logits.device)
        ids = torch.empty(rows, parts * MOST.value, dtype=torch.int32, device=logits.device)
        bits, padded = _BITS.get(logits.dtype, 32), triton.next_power_of_2(parts * MOST.value)
        _find_likeliest[(rows, parts)](logits, logits.stride(0), params.packed, values, ids, vocab_size, BITS=bits, num_warps=8)
        arguments = logits, logits.stride(0), values, ids, params.packed, params.positions, tokens, chosen, parts, vocab_size
        _draw_from_likeliest[(rows,)](*arguments, PADDED=padded, BITS=bits, num_warps=8)
    return tokens


@triton.jit
def _order(logits, BITS: tl.constexpr):
    """float32 -> uint32 of `BITS` bits in the same order; -0.0 is 0.0."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.uint32, bitcast=True)
    return tl.where(bits < 0x80000000, bits | 0x80000000, bits ^ 0xFFFFFFFF) >> (32 - BITS)


@triton.jit
def _among_highest(order, there, count, BITS: tl.constexpr):
    """Which are the `count` highest of those that are `there`, if there are so many; the first ones of a tie."""
    lowest = tl.full([], 0, tl.uint32)
    bit = tl.full([], 1 << (BITS - 1), tl.uint32)
    for _ in range(BITS):
        enough = tl.sum((there & (order >= (lowest | bit))).to(tl.int32), axis=0) >= count
        lowest = tl.where(enough, lowest | bit, lowest)
        bit = bit >> 1
    higher = there & (order > lowest)
    equal = there & (order == lowest)
    missing = count - tl.sum(higher.to(tl.int32), axis=0)
    return higher | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= missing))


@triton.jit
def _find_likeliest(logits, logits_stride, packed, values, ids, vocab_size, BITS: tl.constexpr):
    """The likeliest tokens of a part of a row, by id: as many as top_k, or all of them."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * _PART_IDS + tl.arange(0, _PART_IDS)
    logit = tl.load(logits + row * logits_stride + at, mask=at < vocab_size, other=0.0).to(tl.float32)
    found = _among_highest(_order(logit, BITS), at < vocab_size, load_top_k(packed, row), BITS)
    place = (row * tl.num_programs(1) + part) * MOST + tl.cumsum(found.to(tl.int32), axis=0) - 1
    tl.store(values + place, logit, mask=found)
    tl.store(ids + place, at, mask=found)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # slices of one upload begin anywhere
def _draw_from_likeliest(
    logits,
    logits_stride,
    values,
    ids,
    packed,
    positions,
    tokens,
    chosen,
    parts,
    vocab_size,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    top_k = load_top_k(packed, row)
    there = (at % MOST < top_k) & (at // MOST * _PART_IDS + at % MOST < vocab_size)
    logit = tl.load(values + row * parts * MOST + at, mask=there, other=float("-inf"))
    token_ids = tl.load(ids + row * parts * MOST + at, mask=there, other=vocab_size)
    order = _order(logit, BITS)
    kept = _among_highest(order, there, top_k, BITS)

    score = tl.div_rn(logit, load_temperature(packed, row))
    behind = score - tl.max(score, axis=0)
    kept = kept & ((behind < tl.log(load_min_p(packed, row))) == 0)
    mass = tl.where(kept, tl.exp(behind), 0.0).to(tl.float64)
    needed = load_top_p(packed, row).to(tl.float64) * tl.sum(mass, axis=0)
    first, second = load_row_key(packed, positions, row, 0)
    perturbed = score - log_exponential(uniform_bits(first, second, token_ids))

    token = vocab_size
    goes_on = True
    while goes_on:
        token = best_of(tl.where(kept, perturbed, float("-inf")), token_ids, vocab_size)[1]
        floor = tl.max(tl.where(token_ids == token, order, 0), axis=0)
        kept = kept & ((order > floor) | ((order == floor) & (token_ids < token)))  # what precedes the token
        before = tl.sum(tl.where(kept, mass, 0.0), axis=0)
        goes_on = (before >= needed) & (tl.max(kept.to(tl.int32), axis=0) > 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(chosen + row, tl.load(logits + row * logits_stride + token).to(tl.float32))
