"""`Activation`: the functions between the products of an MLP, and these in plain torch, which is the reference."""

from __future__ import annotations

from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    CLIPPED_SWIGLU = "clipped_swiglu"
    """Of GPT-OSS, gated alone: g * sigmoid(1.702 * g) * (u + 1), where g = min(gate, 7) and u = clamp(up, -7, 7)."""


def activated(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.SILU:
            return F.silu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.RELU:
            return F.relu(x)
        case Activation.RELU_SQUARED:
            return F.relu(x).square()
    raise ValueError(f"{activation.value} needs a gate")


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """[T, 2 * size] -> [T, size]: the activation of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is Activation.CLIPPED_SWIGLU:
        gate = gate.clamp(max=7.0)
        return (up.clamp(-7.0, 7.0) + 1.0) * (gate * torch.sigmoid(gate * 1.702))
    return activated(gate, activation) * up
