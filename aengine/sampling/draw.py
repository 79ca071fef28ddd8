"""`Draw`: how random tokens are drawn on a device, and which implementation a device has."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.draw_params import DrawParams
from aengine.sampling.torch_draw import TorchDraw

_log = logging.getLogger("aengine")

Draw = Callable[[Tensor, NDArray[np.void], DrawParams, Tensor | None], Tensor]
"""[m, V] logits of any floating dtype, which stay as they are, and the parameters of the m rows, [m] `DRAW_PARAMS` on the host and again on
the device -> [m] int64 token ids, without waiting for the device. The order is temperature, min_p, top_k, top_p, draw, all in float32; a
row whose temperature is 0 gets its argmax. A row's token depends on its logits and parameters alone. The last argument, [m] float32, gets
the logits of the tokens, if there is one."""


def select_draw(vocab_size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Draw:
    """For this device, with one log line where there is a choice. `dtype`: that of logits as the model gives them, beside float32."""
    if device.type == "cpu":
        return TorchDraw(vocab_size, device)
    try:
        from aengine.sampling.triton_draw import TritonDraw

        draw = TritonDraw(vocab_size, device)
        draw.run_once({torch.float32, dtype})
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as reason:  # not installed, or no compiler for it
        _log.warning("sampling: torch, which sorts whole rows for top_p, because triton cannot run: %s", reason)
        return TorchDraw(vocab_size, device)
    _log.debug("sampling: triton")
    return draw
