"""Draws in plain torch: the CPU, and the fallback elsewhere.

On a CPU a nucleus is looked for among some candidates before the whole row; elsewhere the host would wait for the answer, so whole rows
are sorted there.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from aengine.sampling.candidates import kept_candidates, top_candidates
from aengine.sampling.device_draw import RowParams
from aengine.sampling.masses import MassDraw
from aengine.sampling.noise import log_exponential, row_keys

_LOOKS = (64, 1024)  # candidates of a top_p row that are looked at before it is treated as one with a wide nucleus


class TorchDraw:
    """Satisfies `DeviceDraw`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._whole = MassDraw(vocab_size, device)

    def whole(self, logits: Tensor, params: RowParams, with_min_p: bool) -> Tensor:
        min_p = params.min_p if with_min_p else None
        masses = self._whole.masses(logits, params.temperature, min_p)
        return self._whole.draw(logits, masses, params.temperature, min_p, params.seed, params.positions)

    def nucleus(self, logits: Tensor, params: RowParams, with_min_p: bool) -> Tensor:
        total = self._whole.masses(logits, params.temperature, params.min_p if with_min_p else None).total()
        if self._device.type != "cpu":
            return self._from_candidates(logits, params, total, self._vocab_size)[0]
        tokens = torch.empty(len(logits), dtype=torch.int64)
        rest = torch.arange(len(logits))
        for look in _LOOKS:
            tokens[rest], whole = self._from_candidates(logits, params, total, min(look, self._vocab_size))
            if whole.all():
                return tokens
            wider = (~whole).nonzero()[:, 0]
            rest, logits, params, total = rest[wider], logits[wider], params.of(wider), total[wider]
        tokens[rest] = self._from_wide_nucleus(logits, params)
        return tokens

    def top_k(self, logits: Tensor, params: RowParams, most: int) -> Tensor:
        best, ids = top_candidates(logits, most)
        scores = best / params.temperature[:, None]
        kept = kept_candidates(scores, params.min_p, params.top_k, params.top_p, None)
        return self._choose(scores, ids, kept, params)

    def _from_candidates(self, logits: Tensor, params: RowParams, total: Tensor, look: int) -> tuple[Tensor, Tensor]:
        """Tokens from among the `look` likeliest, and whether no more of them belong to the nucleus: [m] bool."""
        best, ids = top_candidates(logits, look)
        scores = best / params.temperature[:, None]
        kept = kept_candidates(scores, params.min_p, params.top_k, params.top_p, total)
        whole = ~kept[:, -1] if look < self._vocab_size else torch.ones_like(kept[:, 0])
        return self._choose(scores, ids, kept, params), whole

    def _from_wide_nucleus(self, logits: Tensor, params: RowParams) -> Tensor:
        """By rejection: draws from the whole row until the mass before the token, in the order of (logit, -id), is less than top_p.

        Each draw is accepted with a probability of top_p at least, so that a few passes take the place of a sort.
        """
        tokens = torch.empty(len(logits), dtype=torch.int64)
        ids = torch.arange(self._vocab_size)
        for i in range(len(logits)):
            row, p = logits[i : i + 1], params.of(torch.tensor([i]))
            masses = self._whole.masses(row, p.temperature, p.min_p)
            needed = p.top_p[:, None] * masses.total()
            for attempt in itertools.count(1):  # 0 are the draws of which the first is final
                token = self._whole.draw(row, masses, p.temperature, p.min_p, p.seed, p.positions, stream=attempt)
                chosen = row[:, token]
                before = (row > chosen) | ((row == chosen) & (ids < token))
                if self._whole.fill(row, p.temperature, p.min_p)[0].mul_(before).sum(dtype=torch.float64) < needed:
                    tokens[i] = token
                    break
        return tokens

    def _choose(self, scores: Tensor, ids: Tensor, kept: Tensor, params: RowParams) -> Tensor:
        noise = log_exponential(row_keys(params.seed, params.positions), self._whole.hashes[ids])
        best = torch.sub(scores, noise, out=noise).masked_fill_(~kept, -math.inf).argmax(-1, keepdim=True)
        return ids.gather(1, best)[:, 0]
