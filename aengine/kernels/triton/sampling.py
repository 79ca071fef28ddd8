"""Samples tokens from whole rows of logits without a sort, in two launches each: parts of rows, then rows.

`gumbel_argmax` perturbs every token (Gumbel-max), `draw_in_blocks` samples a block of neighbouring ids by its mass and then a token in it,
as `aengine.sampling.masses.MassDraw` does, with the same noise. Rows are independent; the order of sums depends on V alone.

Logits are [m, V] float32 with contiguous rows. Every result is an id below V, also for rows whose tokens all have no mass, or with NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.draw_params import DrawParams
from aengine.kernels.triton.noise import load_min_p, load_row_key, load_temperature, log_exponential, uniform_bits

BLOCK_IDS = tl.constexpr(64)  # ids of a block
_BLOCKS_AT_ONCE = 64
_IDS_AT_ONCE = 4096


def gumbel_argmax(logits: Tensor, params: DrawParams, floors: Tensor | None = None, last_ids: Tensor | None = None) -> Tensor:
    """[m] int64: the argmax of logits / temperature - log E, E of stream 0; the lowest id of a tie.

    With `floors` float32 and `last_ids` int32, [m] each and contiguous, only tokens take part whose logit is above the floor, or equal to
    it with an id up to the last.
    """
    rows, vocab_size = logits.shape
    parts = triton.cdiv(vocab_size, _IDS_AT_ONCE)
    values, ids = _partials(rows, parts, logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        arguments = (logits, logits.stride(0), params.packed, params.positions, floors, last_ids, values, ids, vocab_size)
        _gumbel_parts[(rows, parts)](*arguments, IDS=_IDS_AT_ONCE, num_warps=4)
        _best_part[(rows,)](values, ids, tokens, parts, vocab_size, PARTS=triton.next_power_of_2(parts), num_warps=1)
    return tokens


def draw_in_blocks(logits: Tensor, params: DrawParams, with_min_p: bool) -> Tensor:
    """[m] int64: a block by argmax of log mass - log E, E of stream 1, then a token of it by stream 0.

    `with_min_p`: tokens less likely than min_p times the likeliest have no mass.
    """
    rows, vocab_size = logits.shape
    parts = triton.cdiv(vocab_size, _BLOCKS_AT_ONCE * BLOCK_IDS.value)
    values, blocks = _partials(rows, parts, logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        best = logits.amax(-1) if with_min_p else None
        arguments = (logits, logits.stride(0), params.packed, params.positions, best)
        _block_parts[(rows, parts)](*arguments, values, blocks, vocab_size, BLOCKS=_BLOCKS_AT_ONCE, num_warps=4)
        _token_of_block[(rows,)](*arguments, values, blocks, tokens, parts, vocab_size, PARTS=triton.next_power_of_2(parts), num_warps=1)
    return tokens


def _partials(rows: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, parts, device=device), torch.empty(rows, parts, dtype=torch.int32, device=device)


@triton.jit
def _scores(logits, logits_stride, packed, best, row, at, vocab_size):
    """Logits of a row over its temperature, divided as torch divides; -inf beyond the vocabulary and, where `best` has the highest logits
    of the rows, for tokens below min_p (as in `aengine.sampling.candidates.kept_candidates`)."""
    temperature = load_temperature(packed, row)
    score = tl.div_rn(tl.load(logits + row * logits_stride + at, mask=at < vocab_size, other=float("-inf")), temperature)
    if best is not None:
        behind = score - tl.div_rn(tl.load(best + row), temperature)
        score = tl.where(behind < tl.log(load_min_p(packed, row)), float("-inf"), score)
    return score


@triton.jit
def _best(values, ids, limit):
    """The highest of the values and the lowest id that has it, below `limit` whatever the values are."""
    highest = tl.max(values, axis=0)
    return highest, tl.minimum(tl.min(tl.where(values == highest, ids, limit - 1), axis=0), limit - 1)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # slices of one upload begin anywhere
def _gumbel_parts(
    logits,
    logits_stride,
    packed,
    positions,
    floors,
    last_ids,
    values,
    ids,
    vocab_size,
    IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * IDS + tl.arange(0, IDS)
    logit = tl.load(logits + row * logits_stride + at, mask=at < vocab_size, other=float("-inf"))
    if floors is not None:
        floor = tl.load(floors + row)
        kept = (logit > floor) | ((logit == floor) & (at <= tl.load(last_ids + row)))
        logit = tl.where(kept, logit, float("-inf"))
    first, second = load_row_key(packed, positions, row, 0)
    score = tl.div_rn(logit, load_temperature(packed, row))
    value, best_id = _best(score - log_exponential(uniform_bits(first, second, at)), at, vocab_size)
    tl.store(values + row * tl.num_programs(1) + part, value)
    tl.store(ids + row * tl.num_programs(1) + part, best_id)


@triton.jit
def _best_of_row(values, ids, parts, limit, row, PARTS: tl.constexpr):
    at = tl.arange(0, PARTS)
    value = tl.load(values + row * parts + at, mask=at < parts, other=float("-inf"))
    best_ids = tl.load(ids + row * parts + at, mask=at < parts, other=0x7FFFFFFF)
    return _best(value, best_ids, limit)[1]


@triton.jit
def _best_part(values, ids, tokens, parts, vocab_size, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(tokens + row, _best_of_row(values, ids, parts, vocab_size, row, PARTS).to(tl.int64))


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
    value, best_block = _best(log_mass - log_exponential(uniform_bits(first, second, block)), block, tl.cdiv(vocab_size, BLOCK_IDS))
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
    parts,
    vocab_size,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = _best_of_row(values, blocks, parts, tl.cdiv(vocab_size, BLOCK_IDS), row, PARTS)
    at = block * BLOCK_IDS + tl.arange(0, BLOCK_IDS)
    score = _scores(logits, logits_stride, packed, best, row, at, vocab_size)
    first, second = load_row_key(packed, positions, row, 0)
    token = _best(score - log_exponential(uniform_bits(first, second, at)), at, vocab_size)[1]
    tl.store(tokens + row, token.to(tl.int64))
