"""Draws from the nucleus of a row (top-p, Holtzman et al. 2020), without finding where the nucleus ends.

The nucleus is that of `aengine.sampling.torch_draw.kept_candidates`: tokens in the order of (logit, -id) until their mass reaches top_p. So
the token to be drawn is the argmax of the perturbed scores in a beginning of that order. The argmax of all tokens is in the nucleus if the
mass before it is less than top_p. If it is not, nothing behind it is either, and the argmax of the tokens before it is tried next. Each is
in the nucleus with a probability of top_p at least, so two are tried by programs for parts of rows, and the few rows that need more are
finished by one program each.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.draw_params import DrawParams
from aengine.kernels.triton.noise import best_of, load_min_p, load_row_key, load_temperature, load_top_p, log_exponential, uniform_bits

_IDS_AT_ONCE = 2048  # of a part of a row
_LAUNCHES = 3  # over parts of rows; each but the first tries a candidate, and finds the one that follows if that is not in the nucleus
_SLICES = ["positions", "candidates", "masses", "values", "ids", "new_candidates", "new_masses", "new_values", "new_ids"]  # begin anywhere


def draw_from_nucleus(logits: Tensor, params: DrawParams, chosen: Tensor | None = None) -> Tensor:
    """[m] int64: of the tokens in the nucleus, the argmax of logits / temperature - log E, E of stream 0; the lowest id of a tie.

    `logits` [m, V] have contiguous rows. The mass that top_p refers to is that of the tokens that min_p keeps; 0 keeps all. The likeliest
    token is always in. Sums are float64, and their order depends on V alone. Every result is an id below V, also of rows with NaN.
    `chosen` [m] float32 gets the logits of the tokens.
    """
    rows, vocab_size = logits.shape
    device, parts = logits.device, triton.cdiv(vocab_size, _IDS_AT_ONCE)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    chosen = torch.empty(rows, device=device) if chosen is None else chosen
    if not rows:
        return tokens
    candidates = torch.empty(_LAUNCHES, rows, dtype=torch.int32, device=device)
    masses = torch.empty(_LAUNCHES, rows, parts, dtype=torch.float64, device=device)
    values = torch.empty(_LAUNCHES, rows, parts, dtype=torch.float32, device=device)
    ids = torch.empty(_LAUNCHES, rows, parts, dtype=torch.int32, device=device)
    found: list[tuple[Tensor | None, ...]] = [(None,) * 4, *zip(candidates, masses, values, ids, strict=True)]  # by each launch
    arguments = logits, logits.stride(0), params.packed, params.positions, logits.amax(-1), masses[0]
    padded = triton.next_power_of_2(parts)
    for before, after in itertools.pairwise(found):
        _try_candidates[(rows, parts)](*arguments, *before, *after, vocab_size, IDS=_IDS_AT_ONCE, PARTS=padded, num_warps=4)
    _finish[(rows,)](*arguments, *found[-1], tokens, chosen, vocab_size, parts, IDS=2 * _IDS_AT_ONCE, PARTS=padded, num_warps=8)
    return tokens


@triton.jit
def _tokens_before(logits, row, begin, candidate, packed, positions, best_logits, vocab_size, IDS: tl.constexpr):
    """Of the `IDS` ids from `begin` on, those that precede the `candidate`: their float64 mass relative to the likeliest token's, and the
    highest perturbed score with its id. V stands for the end of the order, which all precede."""
    at = begin + tl.arange(0, IDS)
    logit = tl.load(logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    floor = tl.load(logits + candidate, mask=candidate < vocab_size, other=float("-inf")).to(tl.float32)
    precedes = (at < vocab_size) & ((logit > floor) | ((logit == floor) & (at < candidate)))
    mass = tl.zeros([], tl.float64)
    value = tl.full([], float("-inf"), tl.float32)
    token = begin
    if tl.max(precedes.to(tl.int32), axis=0) > 0:  # before a likely candidate there are none in most places
        temperature = load_temperature(packed, row)
        score = tl.div_rn(logit, temperature)
        behind = score - tl.div_rn(tl.load(best_logits + row).to(tl.float32), temperature)
        has_mass = precedes & ((behind < tl.log(load_min_p(packed, row))) == 0)
        mass = tl.sum(tl.where(has_mass, tl.exp(behind), 0.0).to(tl.float64), axis=0)
        first, second = load_row_key(packed, positions, row, 0)
        perturbed = tl.where(has_mass, score - log_exponential(uniform_bits(first, second, at)), float("-inf"))
        value, token = best_of(perturbed, at, vocab_size)
    return mass, value, token


@triton.jit
def _must_go_on(before, value, total, packed, row):
    """Whether a candidate is outside of the nucleus, from the mass `before` it and the highest perturbed score there."""
    return (before >= load_top_p(packed, row).to(tl.float64) * total) & (value > float("-inf"))


@triton.jit
def _found(totals, candidates, masses, values, ids, packed, row, parts, vocab_size, PARTS: tl.constexpr):
    """What a launch found for a row, in all of its parts: its candidate, the total mass, the candidate that would follow, and whether it
    must."""
    at = tl.arange(0, PARTS)
    there = at < parts
    total = tl.sum(tl.load(totals + row * parts + at, mask=there, other=0.0), axis=0)
    before = tl.sum(tl.load(masses + row * parts + at, mask=there, other=0.0), axis=0)
    part_values = tl.load(values + row * parts + at, mask=there, other=float("-inf"))
    value, following = best_of(part_values, tl.load(ids + row * parts + at, mask=there, other=0x7FFFFFFF), vocab_size)
    return tl.load(candidates + row), total, following, _must_go_on(before, value, total, packed, row)


@triton.jit(do_not_specialize_on_alignment=_SLICES)
def _try_candidates(
    logits,
    logits_stride,
    packed,
    positions,
    best_logits,
    totals,
    candidates,
    masses,
    values,
    ids,
    new_candidates,
    new_masses,
    new_values,
    new_ids,
    vocab_size,
    IDS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """From what the launch before found to what this one does, in one part of a row. The first one is given no candidates. It takes V, so
    that its masses are the totals."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    if candidates is None:
        candidate = vocab_size
        goes_on = True
    else:
        candidate, _, following, goes_on = _found(totals, candidates, masses, values, ids, packed, row, parts, vocab_size, PARTS)
        candidate = tl.where(goes_on, following, candidate)
    mass = tl.zeros([], tl.float64)
    value = tl.full([], float("-inf"), tl.float32)  # with this, nothing need follow the candidate
    token = part * IDS
    if goes_on:
        begin = part * IDS
        mass, value, token = _tokens_before(
            logits + row * logits_stride, row, begin, candidate, packed, positions, best_logits, vocab_size, IDS
        )
    if part == 0:
        tl.store(new_candidates + row, candidate)
    tl.store(new_masses + row * parts + part, mass)
    tl.store(new_values + row * parts + part, value)
    tl.store(new_ids + row * parts + part, token)


@triton.jit(do_not_specialize_on_alignment=_SLICES)
def _finish(
    logits,
    logits_stride,
    packed,
    positions,
    best_logits,
    totals,
    candidates,
    masses,
    values,
    ids,
    tokens,
    chosen,
    vocab_size,
    parts,
    IDS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """From what the last launch found to the token; one program for each row."""
    row = tl.program_id(0).to(tl.int64)
    candidate, total, following, goes_on = _found(totals, candidates, masses, values, ids, packed, row, parts, vocab_size, PARTS)
    while goes_on:
        candidate = following
        before = tl.zeros([], tl.float64)
        value = tl.full([], float("-inf"), tl.float32)
        for begin in range(0, vocab_size, IDS):
            mass, part_value, token = _tokens_before(
                logits + row * logits_stride, row, begin, candidate, packed, positions, best_logits, vocab_size, IDS
            )
            before += mass
            following = tl.where(part_value > value, token, following)
            value = tl.maximum(value, part_value)
        goes_on = _must_go_on(before, value, total, packed, row)
    token = tl.minimum(candidate, vocab_size - 1)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(chosen + row, tl.load(logits + row * logits_stride + token).to(tl.float32))
