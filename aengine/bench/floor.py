"""The floor of a step, measured on the spot: bytes that must be moved over the bandwidth of a large copy or read, flops over the rate of
a large matrix product. Knows the shapes of models, nothing of how steps are run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from aengine.models.named_weights import named_weights
from aengine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Machine:
    """What the device reaches here and now."""

    bytes_per_second: float
    flops_per_second: float  # multiply and add count as two


@dataclass(frozen=True, slots=True)
class Work:
    """What a step cannot do without."""

    weight_bytes: int
    kv_bytes: int
    flops: int

    def seconds(self, machine: Machine) -> float:
        """If memory and arithmetic could overlap perfectly, the larger of the two alone would do: so this is below any real step."""
        return max((self.weight_bytes + self.kv_bytes) / machine.bytes_per_second, self.flops / machine.flops_per_second)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Takes about a second."""
    size = 1 << 30 if device.type == "cuda" else 1 << 28
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    if device.type == "cuda":
        target = torch.empty_like(source)
        moved, move = 2 * size, lambda: target.copy_(source)
        width = 8192
    else:
        # A decode step reads: the sum of a buffer that fits no cache.
        moved, move = size, source.sum
        width = 2048
    left = torch.randn(width, width, device=device).to(dtype)
    right = torch.randn(width, width, device=device).to(dtype)
    return Machine(moved / _best(move, device), 2 * width**3 / _best(lambda: left @ right, device))


def step_work(spec: ModelSpec, lengths: list[int], contexts: list[int], num_logits: int, item_bytes: int) -> Work:
    """Of a step in which row i computes `lengths[i]` tokens behind `contexts[i]` known ones, `num_logits` rows with logits."""
    weights = named_weights(spec)
    head = spec.hidden_size * spec.vocab_size
    layers = sum(math.prod(weight.shape) for name, weight in weights.items() if name not in ("embedding.weight", "head.weight"))
    num_tokens = sum(lengths)
    kv_token = 2 * spec.num_kv_heads * spec.head_dim * item_bytes
    kv = attention = 0
    for window in spec.windows:
        for length, context in zip(lengths, contexts, strict=True):
            seen = context + length if window is None else min(context + length, window + length)
            kv += seen * kv_token
            pairs = length * context + length * (length + 1) // 2 if window is None else length * min(context + length, window)
            attention += 4 * pairs * spec.num_heads * spec.head_dim
    return Work(
        weight_bytes=(layers + (head if num_logits else 0)) * item_bytes,
        kv_bytes=kv,
        flops=2 * layers * num_tokens + 2 * head * num_logits + attention,
    )


def _best(action: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Seconds of the fastest of several calls."""
    best = float("inf")
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
