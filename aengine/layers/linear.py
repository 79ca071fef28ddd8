"""Linear layers. Own the weight of one matrix product, which may be several projections fused row-wise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T + b with W [sum(out_features), in_features].

    Several `out_features` are projections of the same input fused into one product; `split` takes their outputs apart.
    """

    def __init__(self, in_features: int, *out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.out_features = list(out_features)
        self.weight = nn.Parameter(torch.empty(sum(out_features), in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(out_features)), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, sum(out_features)]"""
        return F.linear(x, self.weight, self.bias)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """[T, in_features] -> one [T, out_features[i]] view per fused projection."""
        return torch.split(self.forward(x), self.out_features, dim=-1)
