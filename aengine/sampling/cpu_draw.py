"""Draws in our CPU kernels. Tokens are those of `TorchDraw` up to the rounding of sums, but for a nucleus that it draws from by
rejection."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.draws import DRAW
from aengine.sampling.device_draw import PACKED_WORDS, RowParams


class CpuDraw:
    """Satisfies `DeviceDraw`."""

    def __init__(self, draw: Callable[[Tensor, NDArray[np.void]], Tensor]) -> None:
        """`draw`: [m, V] contiguous float32 logits and [m] `DRAW` to [m] int64 token ids."""
        self._draw = draw

    def whole(self, logits: Tensor, params: RowParams, with_min_p: bool) -> Tensor:
        return self._choose(logits, params)

    def nucleus(self, logits: Tensor, params: RowParams, with_min_p: bool) -> Tensor:
        return self._choose(logits, params)

    def top_k(self, logits: Tensor, params: RowParams, most: int) -> Tensor:
        return self._choose(logits, params)

    def _choose(self, logits: Tensor, params: RowParams) -> Tensor:
        draws = np.zeros((len(logits), DRAW.itemsize // 4), dtype=np.int32)
        draws[:, :PACKED_WORDS] = params.packed.numpy()
        draws[:, PACKED_WORDS] = params.positions.numpy()
        return self._draw(logits.contiguous(), draws.view(DRAW)[:, 0])
