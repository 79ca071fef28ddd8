"""Draws in plain torch: the CPU, and the fallback elsewhere.

On a CPU the nucleus is searched for among the likeliest tokens first. Elsewhere the host would wait for the device to say whether that was
enough, so whole rows are sorted there.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.draw_params import DrawParams
from aengine.kernels.upload import to_device
from aengine.sampling.candidates import kept_candidates, top_candidates
from aengine.sampling.masses import MassDraw
from aengine.sampling.noise import log_exponential, row_keys

_GREEDY, _MIN_P, _TOP_P, _TOP_K = -1, 1, 2, 4  # kinds of rows: a greedy one, one with some of the limits
_TOP_K_GROUPS = (64, 1024)  # rows up to the same bound are drawn together, so that one large top_k does not burden the others
_CANDIDATES = (64, 1024)  # of a row with top_p, before it is treated as one with a wide nucleus


class TorchDraw:
    """A `Draw`. Rows of one kind are drawn together, so that no row pays for a neighbour's filter."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._mass_draw = MassDraw(vocab_size, device)

    def __call__(self, logits: Tensor, host_params: NDArray[np.void], params: DrawParams) -> Tensor:
        top_k = host_params["top_k"]
        kinds = _MIN_P * (host_params["min_p"] > 0.0) + _TOP_P * (host_params["top_p"] < 1.0)
        kinds = np.where(top_k > 0, _TOP_K + np.searchsorted(_TOP_K_GROUPS, top_k), kinds)
        kinds[host_params["temperature"] == 0.0] = _GREEDY
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        for kind in np.unique(kinds).tolist():
            members = np.flatnonzero(kinds == kind)
            most = int(top_k[members].max())
            if len(members) == len(kinds):
                return self._draw_kind(kind, logits, params, most)
            rows = to_device(members, self._device)
            tokens.index_copy_(0, rows, self._draw_kind(kind, logits.index_select(0, rows), params.select(rows), most))
        return tokens

    def _draw_kind(self, kind: int, logits: Tensor, params: DrawParams, most: int) -> Tensor:
        if kind == _GREEDY:
            return logits.argmax(-1)
        if kind >= _TOP_K:
            return self.top_k(logits, params, most)
        return (self.nucleus if kind & _TOP_P else self.whole)(logits, params, bool(kind & _MIN_P))

    def whole(self, logits: Tensor, params: DrawParams, with_min_p: bool) -> Tensor:
        """From all tokens that min_p leaves. `with_min_p`: whether rows have one; else it is 0 for all."""
        return self._mass_draw.draw(logits, self._mass_draw.masses(logits, params, with_min_p), params, with_min_p)

    def nucleus(self, logits: Tensor, params: DrawParams, with_min_p: bool) -> Tensor:
        """From the likeliest tokens that have top_p of the mass that min_p leaves. `with_min_p`: as above."""
        total = self._mass_draw.masses(logits, params, with_min_p).total()
        if self._device.type != "cpu":
            return self._from_candidates(logits, params, total, self._vocab_size)[0]
        tokens = torch.empty(len(logits), dtype=torch.int64)
        rest = torch.arange(len(logits))
        for count in _CANDIDATES:
            tokens[rest], kept = self._from_candidates(logits, params, total, min(count, self._vocab_size))
            wider = kept[:, -1].nonzero()[:, 0]  # the nucleus may have more tokens than these
            if count >= self._vocab_size or not len(wider):
                return tokens
            rest, logits, params, total = rest[wider], logits[wider], params.select(wider), total[wider]
        tokens[rest] = self._from_wide_nucleus(logits, params)
        return tokens

    def top_k(self, logits: Tensor, params: DrawParams, most: int) -> Tensor:
        """From the likeliest top_k tokens, `most` at most, under min_p and top_p."""
        return self._from_candidates(logits, params, None, min(most, self._vocab_size))[0]  # a draft model may have fewer tokens

    def _from_candidates(self, logits: Tensor, params: DrawParams, total: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """Tokens from among the `count` likeliest, and which of these could be drawn: [m, count] bool. `total`: as of `kept_candidates`."""
        best, ids = top_candidates(logits, count)
        scores = best / params.temperature[:, None]
        kept = kept_candidates(scores, params.min_p, params.top_k, params.top_p, total)
        noise = log_exponential(row_keys(params.seed, params.positions), self._mass_draw.hashes[ids])
        winner = torch.sub(scores, noise, out=noise).masked_fill_(~kept, -math.inf).argmax(-1, keepdim=True)
        return ids.gather(1, winner)[:, 0], kept

    def _from_wide_nucleus(self, logits: Tensor, params: DrawParams) -> Tensor:
        """By rejection: draws from the whole row until the mass before the token, in the order of (logit, -id), is less than top_p.

        Each draw is accepted with a probability of top_p at least, so that a few passes take the place of a sort.
        """
        tokens = torch.empty(len(logits), dtype=torch.int64)
        ids = torch.arange(self._vocab_size)
        for i in range(len(logits)):
            row, p = logits[i : i + 1], params[i : i + 1]
            masses = self._mass_draw.masses(row, p, True)
            needed = p.top_p[:, None] * masses.total()
            for attempt in itertools.count(1):  # 0 are the draws of which the first is final
                token = self._mass_draw.draw(row, masses, p, True, stream=attempt)
                before = (row > row[:, token]) | ((row == row[:, token]) & (ids < token))
                if self._mass_draw.fill(row, p, True)[0].mul_(before).sum(dtype=torch.float64) < needed:
                    tokens[i] = token
                    break
        return tokens
