"""The draw: one batch of processed logits with mixed per-row parameters to one token per row.

Owns temperature, filters and seeds of the rows on the device, and the end of the pinned order: greedy rows argmax; the others
temperature, min_p, top_k, top_p, draw. All in float32. A row's token depends on its logits, parameters, seed and position alone:
rows are grouped by what their own parameters ask for, so that nobody pays for a neighbour's filter.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.params import GREEDY_BELOW
from aengine.sampling.candidates import kept_candidates, top_candidates
from aengine.sampling.masses import MassDraw
from aengine.sampling.noise import log_exponential, row_keys
from aengine.scheduler.plan import NewRow

_ROW = np.dtype([("temperature", "<f4"), ("top_p", "<f4"), ("min_p", "<f4"), ("top_k", "<i4"), ("seed", "<u8")])
_WORDS = _ROW.itemsize // 4
_TOP_K_GROUPS = (64, 1024)  # rows up to the same bound are handled together, so that one large top_k does not burden the others
_TOP_P_LOOKS = (64, 1024)  # candidates of a top_p row that are looked at before it is treated as one with a wide nucleus


@dataclass(frozen=True, slots=True)
class _RowParams:
    """The parameters of m rows, on the device, [m] each."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seed: Tensor
    positions: Tensor

    @classmethod
    def of(cls, packed: Tensor, positions: Tensor) -> _RowParams:
        """From [m, _WORDS] int32 in the layout of `_ROW`."""
        floats = packed[:, :3].view(torch.float32)
        seeds = packed[:, 4:6].contiguous().view(torch.int64)[:, 0]
        return cls(floats[:, 0], floats[:, 1], floats[:, 2], packed[:, 3], seeds, positions)

    def __getitem__(self, rows: Tensor | slice) -> _RowParams:
        return _RowParams(*(getattr(self, name)[rows] for name in self.__slots__))


_Draw = Callable[[Tensor, _RowParams], Tensor]


class Drawer:
    """Draws tokens for rows 0 .. `max_rows` - 1 over `vocab_size` ids. Leaves the logits as they are."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._host = np.zeros(max_rows, dtype=_ROW)  # decides the groups without asking the device
        self._packed = torch.zeros(max_rows, _WORDS, dtype=torch.int32, device=device)
        self._whole = MassDraw(vocab_size, device)

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

    def only_argmax(self, rows: NDArray[np.int32]) -> bool:
        """Whether all of `rows` are greedy."""
        return bool((self._host["temperature"][rows] < GREEDY_BELOW).all())

    def draw(self, logits: Tensor, rows: NDArray[np.int32], device_rows: Tensor, positions: Tensor) -> Tensor:
        """[m, vocab_size] float32 logits of m distinct rows -> [m] int64 token ids, on the device, without waiting for it.

        `device_rows` is `rows` on the device; `positions` [m] are those of the tokens to be drawn, and key their noise.
        """
        params = self._host[rows]
        greedy = params["temperature"] < GREEDY_BELOW
        if greedy.all():
            return logits.argmax(-1)
        on_device = _RowParams.of(self._packed.index_select(0, device_rows), positions)
        tokens: Tensor | None = None
        for members, draw in self._groups(params, greedy):
            if members.all():
                return draw(logits, on_device)
            if not members.any():
                continue
            chosen = self._put(np.flatnonzero(members))
            drawn = draw(logits.index_select(0, chosen), on_device[chosen])
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device) if tokens is None else tokens
            tokens.index_copy_(0, chosen, drawn)
        assert tokens is not None  # the groups cover every row
        return tokens

    def _groups(self, params: NDArray[np.void], greedy: NDArray[np.bool_]) -> list[tuple[NDArray[np.bool_], _Draw]]:
        top_k = np.where(greedy, 0, params["top_k"])
        top_p, min_p = params["top_p"] < 1.0, params["min_p"] > 0.0
        unlimited = ~greedy & (top_k == 0)
        groups: list[tuple[NDArray[np.bool_], _Draw]] = [
            (greedy, lambda x, _: x.argmax(-1)),
            (unlimited & top_p & min_p, lambda x, p: self._draw_top_p(x, p, p.min_p)),
            (unlimited & top_p & ~min_p, lambda x, p: self._draw_top_p(x, p, None)),
            (unlimited & ~top_p & min_p, lambda x, p: self._draw_all(x, p, p.min_p)),
            (unlimited & ~top_p & ~min_p, lambda x, p: self._draw_all(x, p, None)),
        ]
        low = 0
        for high in (*_TOP_K_GROUPS, self.vocab_size):
            members = (top_k > low) & (top_k <= high)
            most = int(top_k[members].max(initial=0))
            groups.append((members, functools.partial(self._draw_top_k, most=most)))
            low = high
        return groups

    def _draw_all(self, logits: Tensor, params: _RowParams, min_p: Tensor | None) -> Tensor:
        masses = self._whole.masses(logits, params.temperature, min_p)
        return self._whole.draw(logits, masses, params.temperature, min_p, params.seed, params.positions)

    def _draw_top_k(self, logits: Tensor, params: _RowParams, most: int) -> Tensor:
        best, ids = top_candidates(logits, most)
        scores = best / params.temperature[:, None]
        kept = kept_candidates(scores, params.min_p, params.top_k, params.top_p, None)
        return self._choose(scores, ids, kept, params)

    def _draw_top_p(self, logits: Tensor, params: _RowParams, min_p: Tensor | None) -> Tensor:
        total = self._whole.masses(logits, params.temperature, min_p).total()
        if self._device.type != "cpu":  # looking at how far some candidates reach would make the host wait
            return self._draw_nucleus(logits, params, total, self.vocab_size)[0]
        tokens = torch.empty(len(logits), dtype=torch.int64)
        rest = torch.arange(len(logits))
        for look in _TOP_P_LOOKS:
            tokens[rest], whole = self._draw_nucleus(logits, params, total, min(look, self.vocab_size))
            if whole.all():
                return tokens
            wider = (~whole).nonzero()[:, 0]
            rest, logits, params, total = rest[wider], logits[wider], params[wider], total[wider]
        tokens[rest] = self._draw_wide_nucleus(logits, params)
        return tokens

    def _draw_nucleus(self, logits: Tensor, params: _RowParams, total: Tensor, look: int) -> tuple[Tensor, Tensor]:
        """Tokens from among the `look` likeliest, and whether no more of them belong to the nucleus: [m] bool."""
        best, ids = top_candidates(logits, look)
        scores = best / params.temperature[:, None]
        kept = kept_candidates(scores, params.min_p, params.top_k, params.top_p, total)
        whole = ~kept[:, -1] if look < self.vocab_size else torch.ones_like(kept[:, 0])
        return self._choose(scores, ids, kept, params), whole

    def _draw_wide_nucleus(self, logits: Tensor, params: _RowParams) -> Tensor:
        """By rejection: draws from the whole row until the mass before the token, in the order of (logit, -id), is less than top_p.

        Each draw is accepted with a probability of top_p at least, so that a few passes take the place of a sort.
        """
        tokens = torch.empty(len(logits), dtype=torch.int64)
        ids = torch.arange(self.vocab_size)
        for i in range(len(logits)):
            row, p = logits[i : i + 1], params[i : i + 1]
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

    def _choose(self, scores: Tensor, ids: Tensor, kept: Tensor, params: _RowParams) -> Tensor:
        noise = log_exponential(row_keys(params.seed, params.positions), self._whole.hashes[ids])
        best = torch.sub(scores, noise, out=noise).masked_fill_(~kept, -math.inf).argmax(-1, keepdim=True)
        return ids.gather(1, best)[:, 0]

    def _put(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
