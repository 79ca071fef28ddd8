"""Samplers of logits that are tensors."""

from __future__ import annotations

from typing import Any

import torch

from aengine.sampling.arrays import DeviceArrays
from aengine.sampling.draw import log_sums, select_draw
from aengine.sampling.sampler import Sampler


def tensor_sampler(max_rows: int, vocab_size: int, device: torch.device, draw: Any = None, sums: Any = log_sums) -> Sampler:
    return Sampler(max_rows, vocab_size, DeviceArrays(device), draw or select_draw(vocab_size, device), sums)


TENSORS = DeviceArrays(torch.device("cpu"))
