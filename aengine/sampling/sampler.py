"""The sampler: one batch of logits with mixed per-row parameters to one token per row.

Owns the rows' sampling parameters on the device and the pinned order: greedy rows argmax; the others temperature, min_p,
top_k, top_p, draw. All in float32. A row's token depends on its logits, parameters, seed and position alone: rows are
grouped by what their own parameters ask for, so that nobody pays for a neighbour's filter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.params import GREEDY_BELOW
from aengine.sampling.candidates import below_min_p, kept_candidates, top_candidates
from aengine.sampling.noise import log_exponential, row_keys, token_hashes
from aengine.scheduler.plan import NewRow

_ROW = np.dtype([("temperature", "<f4"), ("top_p", "<f4"), ("min_p", "<f4"), ("top_k", "<i4"), ("seed", "<u8")])
_WORDS = _ROW.itemsize // 4
_FIRST_CANDIDATES = 64  # of a top_p row: most nuclei are smaller
_MORE_CANDIDATES = 16  # times as many when the nucleus was not


@dataclass(frozen=True, slots=True)
class _RowParams:
    """The parameters of m rows, on the device, [m] each."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seed: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> _RowParams:
        """From [m, _WORDS] int32 in the layout of `_ROW`."""
        floats = packed[:, :3].view(torch.float32)
        return cls(floats[:, 0], floats[:, 1], floats[:, 2], packed[:, 3], packed[:, 4:6].contiguous().view(torch.int64)[:, 0])


class Sampler:
    """Draws tokens for rows 0 .. `max_rows` - 1 over `vocab_size` ids."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._host = np.zeros(max_rows, dtype=_ROW)  # decides the groups without asking the device
        self._packed = torch.zeros(max_rows, _WORDS, dtype=torch.int32, device=device)
        self._hashes = token_hashes(vocab_size, device)

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Takes over the parameters of rows that changed hands: one upload for all of them."""
        if not new_rows:
            return
        rows = np.array([new.row for new in new_rows], dtype=np.int64)
        values = np.array(
            [
                (p.temperature, p.top_p, p.min_p, p.top_k if p.top_k < self.vocab_size else 0, p.seed)
                for p in (new.params for new in new_rows)
            ],
            dtype=_ROW,
        )
        self._host[rows] = values
        upload = np.empty((len(rows), 2 + _WORDS), dtype=np.int32)
        upload[:, :2] = rows.view(np.int32).reshape(-1, 2)
        upload[:, 2:] = values.view(np.int32).reshape(-1, _WORDS)
        moved = self._put(upload)
        self._packed.index_copy_(0, moved[:, :2].contiguous().view(torch.int64)[:, 0], moved[:, 2:])

    def sample(self, logits: Tensor, rows: NDArray[np.int32], device_rows: Tensor, positions: Tensor) -> Tensor:
        """[m, vocab_size] float32 logits of m distinct rows -> [m] int64 token ids, on the device, without waiting for it.

        `device_rows` is `rows` on the device; `positions` [m] are those of the tokens to be drawn, and key their noise.
        """
        params = self._host[rows]
        greedy = params["temperature"] < GREEDY_BELOW
        if greedy.all():
            return logits.argmax(-1)
        top_k, top_p, min_p = params["top_k"] > 0, params["top_p"] < 1.0, params["min_p"] > 0.0
        groups: tuple[tuple[NDArray[np.bool_], Callable[[Tensor, Tensor, Tensor], Tensor]], ...] = (
            (greedy, lambda x, _params, _positions: x.argmax(-1)),
            (~greedy & top_k, lambda x, p, at: self._draw_top_k(x, p, at, int(params["top_k"].max()))),
            (~greedy & ~top_k & top_p, self._draw_top_p),
            (~greedy & ~top_k & ~top_p & min_p, self._draw_min_p),
            (~greedy & ~top_k & ~top_p & ~min_p, self._draw_all),
        )
        packed = self._packed.index_select(0, device_rows)
        tokens: Tensor | None = None
        for members, draw in groups:
            if members.all():
                return draw(logits, packed, positions)
            if not members.any():
                continue
            chosen = self._put(np.flatnonzero(members))
            drawn = draw(*(tensor.index_select(0, chosen) for tensor in (logits, packed, positions)))
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device) if tokens is None else tokens
            tokens.index_copy_(0, chosen, drawn)
        assert tokens is not None  # the groups cover every row
        return tokens

    def _draw_all(self, logits: Tensor, packed: Tensor, positions: Tensor) -> Tensor:
        params = _RowParams.of(packed)
        noise = log_exponential(row_keys(params.seed, positions), self._hashes)
        return torch.sub(logits / params.temperature[:, None], noise, out=noise).argmax(-1)

    def _draw_min_p(self, logits: Tensor, packed: Tensor, positions: Tensor) -> Tensor:
        params = _RowParams.of(packed)
        scores = logits / params.temperature[:, None]
        dropped = below_min_p(scores, scores.amax(-1, keepdim=True), params.min_p)
        noise = log_exponential(row_keys(params.seed, positions), self._hashes)
        return scores.sub_(noise).masked_fill_(dropped, -math.inf).argmax(-1)

    def _draw_top_k(self, logits: Tensor, packed: Tensor, positions: Tensor, most: int) -> Tensor:
        params = _RowParams.of(packed)
        scores, ids = top_candidates(logits / params.temperature[:, None], most)
        kept = kept_candidates(scores, params.min_p, params.top_k, params.top_p, None)
        return self._choose(scores, ids, kept, params, positions)

    def _draw_top_p(self, logits: Tensor, packed: Tensor, positions: Tensor) -> Tensor:
        params = _RowParams.of(packed)
        all_scores = logits / params.temperature[:, None]
        best = all_scores.amax(-1, keepdim=True)
        relative = all_scores - best
        relative.masked_fill_(relative < params.min_p.log()[:, None], -math.inf)
        total = relative.exp_().sum(-1, keepdim=True, dtype=torch.float64)
        # Looking at how far a few candidates reach makes the host wait, which on a CPU costs nothing.
        count = min(_FIRST_CANDIDATES, self.vocab_size) if self._device.type == "cpu" else self.vocab_size
        tokens = torch.empty(len(positions), dtype=torch.int64, device=self._device)
        rest = torch.arange(len(positions), device=self._device)
        while True:
            scores, ids = top_candidates(all_scores, count)
            kept = kept_candidates(scores, params.min_p, params.top_k, params.top_p, total)
            if count == self.vocab_size:
                tokens[rest] = self._choose(scores, ids, kept, params, positions)
                return tokens
            whole = ~kept[:, -1]  # the nucleus ended before the candidates did
            tokens[rest] = self._choose(scores, ids, kept, params, positions)
            if whole.all():
                return tokens
            open_rows = (~whole).nonzero()[:, 0]
            rest, all_scores, total = rest[open_rows], all_scores[open_rows], total[open_rows]
            packed, positions = packed[open_rows], positions[open_rows]
            params = _RowParams.of(packed)
            count = min(count * _MORE_CANDIDATES, self.vocab_size)

    def _choose(self, scores: Tensor, ids: Tensor, kept: Tensor, params: _RowParams, positions: Tensor) -> Tensor:
        noise = log_exponential(row_keys(params.seed, positions), self._hashes[ids])
        best = torch.sub(scores, noise, out=noise).masked_fill_(~kept, -math.inf).argmax(-1, keepdim=True)
        return ids.gather(1, best)[:, 0]

    def _put(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
