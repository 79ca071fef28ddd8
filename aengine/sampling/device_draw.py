"""How rows that are not greedy are drawn on a device: one contract, by what limits a row, with an implementation in torch and one in
our Triton kernels. Owns the parameters of such rows. Knows nothing of row indices or of the other steps of sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.draws import DRAW

PACKED = np.dtype(DRAW.descr[:5])  # all but the position
PACKED_WORDS = PACKED.itemsize // 4


@dataclass(frozen=True, slots=True)
class RowParams:
    """The parameters of m rows, on the device."""

    packed: Tensor  # [m, PACKED_WORDS] int32, contiguous, in the layout of `PACKED`
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

    def of(self, rows: Tensor) -> RowParams:
        """Of the [n] rows, int64."""
        return RowParams(self.packed.index_select(0, rows), self.positions.index_select(0, rows))


class DeviceDraw(Protocol):
    """[m, V] float32 logits to [m] int64 token ids, on the device and without waiting for it. The logits stay as they are.

    A row's token depends on its logits and parameters alone. `with_min_p`: whether rows have one; all others have 0.
    """

    def whole(self, logits: Tensor, params: RowParams, with_min_p: bool) -> Tensor:
        """From all tokens that min_p leaves."""

    def nucleus(self, logits: Tensor, params: RowParams, with_min_p: bool) -> Tensor:
        """From the likeliest tokens that have top_p of the mass that min_p leaves."""

    def top_k(self, logits: Tensor, params: RowParams, most: int) -> Tensor:
        """From the likeliest top_k tokens, `most` at most, under min_p and top_p."""
