"""Draws in our Triton kernels: for CUDA, wherever triton is installed. Only rows with a large top_k are drawn by torch.

Tokens are those of `TorchDraw` up to the rounding of sums, but for a nucleus that `TorchDraw` draws from by rejection on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.params import DRAW_PARAMS, DrawParams
from aengine.kernels.triton.sampling import draw_from_nucleus, draw_in_blocks
from aengine.kernels.triton.top_k import MOST, draw_from_top_k
from aengine.kernels.upload import to_device
from aengine.sampling.draw import TorchDraw


class TritonDraw(TorchDraw):
    """A `Draw` by Triton kernels on CUDA. Rows with a top_k above `MOST` are drawn by torch."""

    def run_once(self, dtypes: Iterable[torch.dtype]) -> None:
        """Every kernel, for logits of each of the dtypes, so that none is compiled while a request waits. Raises whatever the compiler
        raises."""
        record = np.zeros(1, dtype=DRAW_PARAMS)
        record["temperature"], record["top_p"] = 1.0, 0.5
        packed = to_device(record.view(np.int32).reshape(1, -1), self._device)
        params = DrawParams(packed, torch.zeros(1, dtype=torch.int32, device=self._device))
        for dtype in dtypes:
            logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
            for with_min_p in (False, True):
                self.whole(logits, params, with_min_p)
            self.nucleus(logits, params, True)
            self.top_k(logits, params, MOST.value)

    def whole(self, logits: Tensor, params: DrawParams, with_min_p: bool, chosen: Tensor | None = None) -> Tensor:
        return draw_in_blocks(logits, params, with_min_p, chosen)

    def nucleus(self, logits: Tensor, params: DrawParams, with_min_p: bool, chosen: Tensor | None = None) -> Tensor:
        return draw_from_nucleus(logits, params, chosen)

    def top_k(self, logits: Tensor, params: DrawParams, most: int, chosen: Tensor | None = None) -> Tensor:
        if most > MOST.value:
            return super().top_k(logits, params, most, chosen)
        return draw_from_top_k(logits, params, chosen)
