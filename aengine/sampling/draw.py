"""The draw: one batch of processed logits with mixed per-row parameters to one token per row.

Owns temperature, filters and seeds of the rows on the device, and the end of the pinned order: greedy rows argmax; the others
temperature, min_p, top_k, top_p, draw. All in float32. A row's token depends on its logits, parameters, seed and position alone:
rows are grouped by what their own parameters ask for, so that nobody pays for a neighbour's filter.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.draws import DRAW
from aengine.kernels.upload import to_device
from aengine.params import GREEDY_BELOW
from aengine.sampling.device_draw import PACKED, PACKED_WORDS, DeviceDraw, RowParams
from aengine.sampling.torch_draw import TorchDraw
from aengine.scheduler.plan import NewRow

_log = logging.getLogger("aengine")
_TOP_K_GROUPS = (64, 1024)  # rows up to the same bound are handled together, so that one large top_k does not burden the others

_Draw = Callable[[Tensor, RowParams], Tensor]


class Drawer:
    """Draws tokens for rows 0 .. `max_rows` - 1 over `vocab_size` ids. Leaves the logits as they are."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, draws: DeviceDraw | None = None) -> None:
        """`draws`: how rows that are not greedy are drawn; None: as is best on the device."""
        self.vocab_size = vocab_size
        self._device = device
        self._host = np.zeros(max_rows, dtype=DRAW)  # decides the groups without asking the device
        self._packed = torch.zeros(max_rows, PACKED_WORDS, dtype=torch.int32, device=device)
        self._draws = draws or select_draw(vocab_size, device)

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Takes over the parameters of rows that changed hands: one upload for all of them."""
        if not new_rows:
            return
        rows = np.array([new.row for new in new_rows], dtype=np.int64)
        values = np.array(
            [
                (
                    p.temperature if p.temperature >= GREEDY_BELOW else 0.0,
                    p.top_p,
                    p.min_p,
                    p.top_k if p.top_k < self.vocab_size else 0,
                    p.seed,
                )
                for p in (new.params for new in new_rows)
            ],
            dtype=PACKED,
        )
        for name in PACKED.names or ():
            self._host[name][rows] = values[name]
        upload = np.empty((len(rows), 2 + PACKED_WORDS), dtype=np.int32)
        upload[:, :2] = rows.view(np.int32).reshape(-1, 2)
        upload[:, 2:] = values.view(np.int32).reshape(-1, PACKED_WORDS)
        moved = to_device(upload, self._device)
        self._packed.index_copy_(0, moved[:, :2].contiguous().view(torch.int64)[:, 0], moved[:, 2:])

    def draws(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.void]:
        """[m] `DRAW`: what `draw` does for these rows at these positions."""
        draws = self._host[rows]
        draws["position"] = positions
        return draws

    def draw(self, logits: Tensor, rows: NDArray[np.int32], device_rows: Tensor, positions: Tensor) -> Tensor:
        """[m, vocab_size] float32 logits of m distinct rows -> [m] int64 token ids, on the device, without waiting for it.

        `device_rows` is `rows` on the device; `positions` [m] are those of the tokens to be drawn, and key their noise.
        """
        params = self._host[rows]
        greedy = params["temperature"] == 0.0
        if greedy.all():
            return logits.argmax(-1)
        on_device = RowParams(self._packed.index_select(0, device_rows), positions)
        tokens: Tensor | None = None
        for members, draw in self._groups(params, greedy):
            if members.all():
                return draw(logits, on_device)
            if not members.any():
                continue
            chosen = to_device(np.flatnonzero(members), self._device)
            drawn = draw(logits.index_select(0, chosen), on_device.of(chosen))
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device) if tokens is None else tokens
            tokens.index_copy_(0, chosen, drawn)
        assert tokens is not None  # the groups cover every row
        return tokens

    def _groups(self, params: NDArray[np.void], greedy: NDArray[np.bool_]) -> list[tuple[NDArray[np.bool_], _Draw]]:
        draws = self._draws
        top_k = np.where(greedy, 0, params["top_k"])
        top_p, min_p = params["top_p"] < 1.0, params["min_p"] > 0.0
        unlimited = ~greedy & (top_k == 0)
        groups: list[tuple[NDArray[np.bool_], _Draw]] = [
            (greedy, lambda x, _: x.argmax(-1)),
            (unlimited & top_p & min_p, lambda x, p: draws.nucleus(x, p, True)),
            (unlimited & top_p & ~min_p, lambda x, p: draws.nucleus(x, p, False)),
            (unlimited & ~top_p & min_p, lambda x, p: draws.whole(x, p, True)),
            (unlimited & ~top_p & ~min_p, lambda x, p: draws.whole(x, p, False)),
        ]
        low = 0
        for high in (*_TOP_K_GROUPS, self.vocab_size):
            members = (top_k > low) & (top_k <= high)
            most = int(top_k[members].max(initial=0))
            groups.append((members, functools.partial(draws.top_k, most=most)))
            low = high
        return groups


def select_draw(vocab_size: int, device: torch.device) -> DeviceDraw:
    """For this device, with one log line where there is a choice."""
    if device.type == "cpu":
        return TorchDraw(vocab_size, device)
    try:
        from aengine.sampling.triton_draw import TritonDraw

        draws = TritonDraw(vocab_size, device)
        draws.run_once()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as reason:  # not installed, or no compiler for it
        _log.warning("sampling: torch, which sorts whole rows for top_p, because triton cannot run: %s", reason)
        return TorchDraw(vocab_size, device)
    _log.debug("sampling: triton")
    return draws
