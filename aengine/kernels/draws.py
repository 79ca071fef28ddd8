"""How a token is drawn, as plain data: what samplers hand to kernels."""

from __future__ import annotations

import numpy as np

DRAW = np.dtype(
    [
        ("temperature", "<f4"),  # below GREEDY_BELOW: the likeliest
        ("top_p", "<f4"),  # 1: off
        ("min_p", "<f4"),  # 0: off
        ("top_k", "<i4"),  # 0: off
        ("seed", "<u8"),  # keys the noise, with the position
        ("position", "<i4"),  # of the token in its sequence
        ("unused", "<i4"),
    ]
)
