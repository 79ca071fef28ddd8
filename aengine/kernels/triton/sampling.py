"""What kernels that sample share: the parameters of a row, the highest of scores, and the noise of `aengine.sampling.draw` with the
same bits for the same (seed, position, stream, token id).

Integers are unsigned in the hashes, so that products wrap around and shifts bring in zeros.

Draws from the nucleus of a row (top-p, Holtzman et al. 2020), without finding where the nucleus ends.

The nucleus is that of `aengine.sampling.draw.kept_candidates`: tokens in the order of (logit, -id) until their mass reaches top_p. So
the token to be drawn is the argmax of the perturbed scores in a beginning of that order. The argmax of all tokens is in the nucleus if the
mass before it is less than top_p. If it is not, nothing behind it is either, and the argmax of the tokens before it is tried next. Each is
in the nucleus with a probability of top_p at least, so two are tried by programs for parts of rows, and the few rows that need more are
finished by one program each.

Draws from whole rows of logits, in two launches: parts of rows, then rows.

A block of neighbouring ids is drawn by its mass and then a token in it, as `aengine.sampling.draw.MassDraw` does, with the same
noise. Rows are independent; the order of sums depends on V alone."""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.params import DrawParams

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # odd fraction of 2^64
_GOLDEN_32 = tl.constexpr(0x9E3779B9)
_MIX_64_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_64_THEN = tl.constexpr(0x94D049BB133111EB)
_MIX_32_FIRST = tl.constexpr(0x7FEB352D)
_MIX_32_THEN = tl.constexpr(0x846CA68B)


# The int32 words of a row of `DrawParams.packed`, and at which of them its fields begin.
_WORDS = tl.constexpr(8)
_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _SEED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)


@triton.jit
def load_temperature(packed, row):
    """float32, from row `row` of `DrawParams.packed`; the same for the functions below."""
    return tl.load(packed + row * _WORDS + _TEMPERATURE).to(tl.float32, bitcast=True)


@triton.jit
def load_top_p(packed, row):
    return tl.load(packed + row * _WORDS + _TOP_P).to(tl.float32, bitcast=True)


@triton.jit
def load_min_p(packed, row):
    return tl.load(packed + row * _WORDS + _MIN_P).to(tl.float32, bitcast=True)


@triton.jit
def load_top_k(packed, row):
    """int32"""
    return tl.load(packed + row * _WORDS + _TOP_K)


@triton.jit
def load_row_key(packed, positions, row, stream: tl.constexpr):
    """`row_key` of the row's seed and position."""
    seed = packed + row * _WORDS + _SEED
    low = tl.load(seed).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seed + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return row_key((high << 32) | low, tl.load(positions + row), stream)


@triton.jit
def best_of(values, ids, limit):
    """The highest of the values and the lowest id that has it, below `limit` whatever the values are."""
    value = tl.max(values, axis=0)
    return value, tl.minimum(tl.min(tl.where(values == value, ids, limit - 1), axis=0), limit - 1)


@triton.jit
def row_key(seed, position, stream: tl.constexpr):
    """int64 or uint64 seed and integer position -> two uint32: `row_keys`."""
    golden = tl.full([], _GOLDEN, tl.uint64)
    counter = position.to(tl.uint64) + (stream << 40)
    key = _mix64(_mix64(seed.to(tl.uint64, bitcast=True) + golden) + counter * golden)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def uniform_bits(first, second, ids):
    """A row's key and int32 token ids -> int32 in 0 .. 2^31 - 1: `uniform_bits` of `token_hashes`."""
    bits = _mix32(ids.to(tl.uint32) * tl.full([], _GOLDEN_32, tl.uint32)) ^ first
    bits = bits * tl.full([], _MIX_32_FIRST, tl.uint32)
    bits = (bits ^ (bits >> 15)) + second
    return (_mix32(bits) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def log_exponential(bits):
    """float32 log E of `uniform_bits`, finite. E = -log(1 - u) keeps its relative precision for small u, by the series there."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (2.0**-31), 1.0 - 2.0**-24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    return tl.log(tl.where(u < 0.0625, series, -tl.log(1.0 - u)))  # the first term left out is u^7 / 8 of E


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * tl.full([], _MIX_64_FIRST, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], _MIX_64_THEN, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * tl.full([], _MIX_32_FIRST, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], _MIX_32_THEN, tl.uint32)
    return x ^ (x >> 16)


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


BLOCK_IDS = tl.constexpr(64)  # ids of a block
_BLOCKS_AT_ONCE = 64


def draw_in_blocks(logits: Tensor, params: DrawParams, with_min_p: bool, chosen: Tensor | None = None) -> Tensor:
    """[m] int64: a block by argmax of log mass - log E, E of stream 1, then a token of it by stream 0.

    `logits` [m, V] have contiguous rows. Every result is an id below V, also of rows whose tokens all have no mass, or with NaN.
    `with_min_p`: tokens less likely than min_p times the likeliest have no mass. `chosen` [m] float32 gets the logits of the tokens.
    """
    rows, vocab_size = logits.shape
    parts = triton.cdiv(vocab_size, _BLOCKS_AT_ONCE * BLOCK_IDS.value)
    values, blocks = _partials(rows, parts, logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chosen = torch.empty(rows, device=logits.device) if chosen is None else chosen
    if rows:
        best = logits.amax(-1) if with_min_p else None
        arguments = (logits, logits.stride(0), params.packed, params.positions, best)
        _block_parts[(rows, parts)](*arguments, values, blocks, vocab_size, BLOCKS=_BLOCKS_AT_ONCE, num_warps=4)
        padded = triton.next_power_of_2(parts)
        _token_of_block[(rows,)](*arguments, values, blocks, tokens, chosen, parts, vocab_size, PARTS=padded, num_warps=1)
    return tokens


def _partials(rows: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, parts, device=device), torch.empty(rows, parts, dtype=torch.int32, device=device)


@triton.jit
def _scores(logits, logits_stride, packed, best, row, at, vocab_size):
    """Logits of a row over its temperature, divided as torch divides; -inf beyond the vocabulary and, where `best` has the highest logits
    of the rows, for tokens below min_p (as in `aengine.sampling.draw.kept_candidates`)."""
    temperature = load_temperature(packed, row)
    logit = tl.load(logits + row * logits_stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    score = tl.div_rn(logit, temperature)
    if best is not None:
        behind = score - tl.div_rn(tl.load(best + row).to(tl.float32), temperature)
        score = tl.where(behind < tl.log(load_min_p(packed, row)), float("-inf"), score)
    return score


@triton.jit
def _best_of_row(values, ids, parts, limit, row, PARTS: tl.constexpr):
    at = tl.arange(0, PARTS)
    value = tl.load(values + row * parts + at, mask=at < parts, other=float("-inf"))
    best_ids = tl.load(ids + row * parts + at, mask=at < parts, other=0x7FFFFFFF)
    return best_of(value, best_ids, limit)[1]


@triton.jit(do_not_specialize_on_alignment=["positions"])  # slices of one upload begin anywhere
def _block_parts(
    logits,
    logits_stride,
    packed,
    positions,
    best,
    values,
    blocks,
    vocab_size,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK_IDS + tl.arange(0, BLOCK_IDS)[None, :]
    score = _scores(logits, logits_stride, packed, best, row, at, vocab_size)
    highest = tl.max(score, axis=1)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    log_mass = tl.log(tl.sum(tl.exp(score - base[:, None]), axis=1)) + base
    first, second = load_row_key(packed, positions, row, 1)
    value, best_block = best_of(log_mass - log_exponential(uniform_bits(first, second, block)), block, tl.cdiv(vocab_size, BLOCK_IDS))
    tl.store(values + row * tl.num_programs(1) + part, value)
    tl.store(blocks + row * tl.num_programs(1) + part, best_block)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # slices of one upload begin anywhere
def _token_of_block(
    logits,
    logits_stride,
    packed,
    positions,
    best,
    values,
    blocks,
    tokens,
    chosen,
    parts,
    vocab_size,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = _best_of_row(values, blocks, parts, tl.cdiv(vocab_size, BLOCK_IDS), row, PARTS)
    at = block * BLOCK_IDS + tl.arange(0, BLOCK_IDS)
    score = _scores(logits, logits_stride, packed, best, row, at, vocab_size)
    first, second = load_row_key(packed, positions, row, 0)
    token = best_of(score - log_exponential(uniform_bits(first, second, at)), at, vocab_size)[1]
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(chosen + row, tl.load(logits + row * logits_stride + token).to(tl.float32))
