"""Draws from whole rows of logits, in two launches: parts of rows, then rows.

A block of neighbouring ids is drawn by its mass and then a token in it, as `aengine.sampling.torch_draw.MassDraw` does, with the same
noise. Rows are independent; the order of sums depends on V alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.draw_params import DrawParams
from aengine.kernels.triton.noise import best_of, load_min_p, load_row_key, load_temperature, log_exponential, uniform_bits

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
    of the rows, for tokens below min_p (as in `aengine.sampling.torch_draw.kept_candidates`)."""
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
