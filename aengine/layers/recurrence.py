"""Recurrent layers in plain torch, one token after the other: what a state and the inputs of some tokens become. The reference of our
kernels.

Knows nothing of pages, rows of a step or weights' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_SQUARE = 1e-6  # of what is divided by its length


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The gated delta rule, as of `models.spec.GatedDelta`. Its inputs are numbers to convolve [n, t, channels], and b and a
    [n, t, 2 * heads]."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv: Tensor  # [channels, taps]
    log_decay: Tensor  # [heads] float32
    step_bias: Tensor  # [heads] float32

    @property
    def width(self) -> int:
        """Of its outputs."""
        return self.heads * self.value_dim

    def advance(self, matrices: Tensor, tails: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs [n, t, heads * value_dim] of t tokens of n rows, and their states behind these: matrices [n, heads, key_dim,
        value_dim] in float32 and inputs of the convolution [n, taps - 1, channels], which are given as they were before."""
        mixed, gates = inputs
        rows, length, _ = mixed.shape
        convolved, tails = convolve(mixed, tails, self.conv)
        keys = self.key_heads * self.key_dim
        q, k, v = torch.split(convolved.float(), [keys, keys, self.width], -1)
        q, k = (_unit(part.view(rows, length, self.key_heads, self.key_dim)) for part in (q, k))
        q = q * self.key_dim**-0.5
        q, k = (part.repeat_interleave(self.heads // self.key_heads, 2) for part in (q, k))
        v = v.view(rows, length, self.heads, self.value_dim)
        b, a = torch.split(gates.float(), self.heads, -1)
        decay, rate = torch.exp(-self.log_decay.exp() * F.softplus(a + self.step_bias)), b.sigmoid()
        outputs = torch.empty(rows, length, self.heads, self.value_dim, device=mixed.device)
        for at in range(length):
            matrices = matrices * decay[:, at, :, None, None]
            missing = v[:, at] - torch.einsum("nhkv,nhk->nhv", matrices, k[:, at])
            matrices = matrices + k[:, at, :, :, None] * (rate[:, at, :, None] * missing)[:, :, None]
            outputs[:, at] = torch.einsum("nhkv,nhk->nhv", matrices, q[:, at])
        return outputs.flatten(2).to(mixed.dtype), matrices, tails


def convolve(inputs: Tensor, tails: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A causal depthwise convolution with SiLU of `inputs` [n, t, channels], behind [n, taps - 1, channels] earlier ones. Returns its
    outputs, and the latest inputs. Sums are made in float32 from the oldest input to the newest."""
    taps, length = weight.shape[1], inputs.shape[1]
    every = torch.cat((tails, inputs), 1)
    wide = every.float()
    total = torch.zeros_like(inputs, dtype=torch.float32)
    for tap in range(taps):
        total += wide[:, tap : tap + length] * weight[:, tap].float()
    return F.silu(total).to(inputs.dtype), every[:, length:]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LEAST_SQUARE)
