"""Probability masses of whole rows, and draws from them in two stages: a block of neighbouring ids, then a token of it.

A draw from a whole row needs noise for the blocks and for one block's tokens, not for every token. All passes over the vocabulary are
made for a few rows at a time, in one buffer that stays in a cache. Knows nothing of rows' indices or of how candidates are ordered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.draw_params import DrawParams
from aengine.sampling.noise import log_exponential, row_keys, token_hashes

_WIDTH = 64  # ids per block
_BUFFER_ELEMENTS = 1 << 18  # on a CPU: 1 MiB, half of what a core usually has for itself


@dataclass(frozen=True, slots=True)
class Masses:
    """The masses of m rows: a mass is exp(score - best), or 0 where min_p drops the token."""

    blocks: Tensor  # [m, ceil(V / 64)] float32, sums over blocks
    best: Tensor  # [m, 1] float32, the highest score

    def total(self) -> Tensor:
        """[m, 1] float64."""
        return self.blocks.sum(-1, keepdim=True, dtype=torch.float64)


class MassDraw:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.hashes = token_hashes(vocab_size, device)
        self._vocab_size = vocab_size
        self._device = device
        self._rows_at_once = max(1, _BUFFER_ELEMENTS // vocab_size)
        self._buffer: Tensor | None = None

    def masses(self, logits: Tensor, params: DrawParams, with_min_p: bool) -> Masses:
        """Of [m, V] logits. `with_min_p`: whether rows have one; else it is 0 for all."""
        blocks = torch.empty(len(logits), -(-self._vocab_size // _WIDTH), dtype=torch.float32, device=self._device)
        best = torch.empty(len(logits), 1, dtype=torch.float32, device=self._device)
        count = self._rows_at_once if self._device.type == "cpu" else max(1, len(logits))
        for begin in range(0, len(logits), count):
            rows = slice(begin, begin + count)
            work, best[rows] = self.fill(logits[rows], params[rows], with_min_p)
            _sum_blocks(work, out=blocks[rows])
        return Masses(blocks, best)

    def fill(self, logits: Tensor, params: DrawParams, with_min_p: bool) -> tuple[Tensor, Tensor]:
        """[c, V] masses, in the buffer, and the best scores [c, 1]."""
        work = self._work(len(logits))
        torch.div(logits, params.temperature[:, None], out=work)
        best = work.amax(-1, keepdim=True)
        return _to_masses(work, best, params, with_min_p), best

    def draw(self, logits: Tensor, masses: Masses, params: DrawParams, with_min_p: bool, stream: int = 0) -> Tensor:
        """[m] int64 token ids, with probabilities in proportion to their masses."""
        num_blocks = masses.blocks.shape[1]
        noise = log_exponential(row_keys(params.seed, params.positions, 2 * stream + 1), self.hashes[:num_blocks])
        block = torch.sub(masses.blocks.log(), noise, out=noise).argmax(-1, keepdim=True)
        ids = block * _WIDTH + torch.arange(_WIDTH, device=self._device)
        ids.clamp_(max=self._vocab_size - 1)  # the last token several times over, always with the same noise: it wins no more often
        some = _to_masses(logits.gather(1, ids) / params.temperature[:, None], masses.best, params, with_min_p)
        noise = log_exponential(row_keys(params.seed, params.positions, 2 * stream), self.hashes[ids])
        winner = torch.sub(some.log_(), noise, out=noise).argmax(-1, keepdim=True)
        return ids.gather(1, winner)[:, 0]

    def _work(self, rows: int) -> Tensor:
        if self._device.type != "cpu":
            return torch.empty(rows, self._vocab_size, device=self._device)
        if self._buffer is None or len(self._buffer) < rows:
            self._buffer = torch.empty(rows, self._vocab_size)
        return self._buffer[:rows]


def _to_masses(scores: Tensor, best: Tensor, params: DrawParams, with_min_p: bool) -> Tensor:
    """In place."""
    scores.sub_(best)
    if with_min_p:
        scores.masked_fill_(scores < params.min_p.log()[:, None], -math.inf)
    return scores.exp_()


def _sum_blocks(masses: Tensor, out: Tensor) -> None:
    whole = masses.shape[1] // _WIDTH
    torch.sum(masses[:, : whole * _WIDTH].view(len(masses), whole, _WIDTH), -1, out=out[:, :whole])
    if whole < out.shape[1]:
        torch.sum(masses[:, whole * _WIDTH :], -1, keepdim=True, out=out[:, whole:])
