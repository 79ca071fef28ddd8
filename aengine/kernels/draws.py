"""How a token is drawn, as plain data: what samplers hand to kernels."""

from __future__ import annotations

import numpy as np

DRAW = np.dtype(
    [
        ("temperature", "<f4"),  # 0: the likeliest; any other is GREEDY_BELOW at least
        ("top_p", "<f4"),  # 1: off; 0, which is what float32 makes of the least: the likeliest
        ("min_p", "<f4"),  # 0: off
        ("top_k", "<i4"),  # 0: off
        ("seed", "<u8"),  # keys the noise, with the position
        ("position", "<i4"),  # of the token in its sequence
        ("unused", "<i4"),
    ]
)

HIGHEST_LOGIT = 1e30
"""What is higher is made this before a draw: it is still finite over the lowest temperature."""
