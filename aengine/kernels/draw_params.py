"""The parameters of a draw, one record per row: what samplers give to kernels, in one layout on the host and on a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DRAW_PARAMS = np.dtype(
    [
        ("temperature", "<f4"),  # 0: greedy; any other is GREEDY_BELOW at least
        ("top_p", "<f4"),  # 1: off; 0, which is what float32 makes of the least: greedy
        ("min_p", "<f4"),  # 0: off
        ("top_k", "<i4"),  # 0: off
        ("seed", "<u8"),  # keys the noise, with the position
        ("position", "<i4"),  # of the token in its sequence
        ("unused", "<i4"),
    ]
)

HIGHEST_LOGIT = 1e30
"""Higher logits become this before a draw: it is still finite when divided by the lowest temperature."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """The records of m rows on a device."""

    packed: Tensor  # [m, 8] int32, contiguous: `DRAW_PARAMS`, without the positions
    positions: Tensor  # [m] int32, of the tokens to be drawn

    @property
    def temperature(self) -> Tensor:
        return self.packed.view(torch.float32)[:, 0]

    @property
    def top_p(self) -> Tensor:
        return self.packed.view(torch.float32)[:, 1]

    @property
    def min_p(self) -> Tensor:
        return self.packed.view(torch.float32)[:, 2]

    @property
    def top_k(self) -> Tensor:
        return self.packed[:, 3]

    @property
    def seed(self) -> Tensor:
        return self.packed.view(torch.int64)[:, 2]

    def __getitem__(self, rows: slice) -> DrawParams:
        return DrawParams(self.packed[rows], self.positions[rows])

    def select(self, rows: Tensor) -> DrawParams:
        """The records of the [n] int64 `rows`, which are indices into the m records."""
        return DrawParams(self.packed.index_select(0, rows), self.positions.index_select(0, rows))
