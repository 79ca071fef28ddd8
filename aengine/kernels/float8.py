"""`Float8Rows`: activations quantised to float8 with one scale per row, for products of 8-bit floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 448.0  # of float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Float8Rows:
    codes: Tensor  # [T, size] float8_e4m3fn
    scales: Tensor  # [T, 1] float32; value = code * scale

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def of(cls, x: Tensor) -> Float8Rows:
        """[T, size]: the largest magnitude of a row becomes `LARGEST`."""
        wide = x.float()
        largest = wide.abs().amax(-1, keepdim=True)
        scales = torch.where(largest == 0, 1.0, largest / LARGEST)
        return cls((wide / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)
