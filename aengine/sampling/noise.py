"""Counter-based noise: a hash of (seed, position, token id), so that a draw depends on nothing else.

Owns the bits. They come from integer operations alone and are the same on every device; wrap-around of int32 and int64
products is relied upon. Knows nothing of probabilities or filters.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # odd fraction of 2^64, as a signed number


def row_keys(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """[m] int64 seeds and [m] integer positions -> [m, 2] int32: 64 bits per row, SplitMix64 (Steele et al. 2014) of both.

    Each `stream` gives keys that are independent of those of the others.
    """
    counter = positions.to(torch.int64) + (stream << 40)  # beyond every position
    state = _mix64(seeds + _GOLDEN) + counter * _GOLDEN
    return _mix64(state).view(torch.int32).view(-1, 2)


def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """[vocab_size] int32: well mixed, distinct bits per token id."""
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    return _mix32(ids.mul_(0x9E3779B9 - (1 << 32)))


def uniform_bits(keys: Tensor, hashes: Tensor) -> Tensor:
    """[m, 2] keys with [n] or [m, n] token hashes -> [m, n] int32, uniform over 0 .. 2^31 - 1."""
    bits = hashes ^ keys[:, :1]
    bits.mul_(0x7FEB352D)
    _xor_shift(bits, 15)
    # The second half of the key enters here: rows that share the first half by chance still differ.
    bits.add_(keys[:, 1:])
    return _mix32(bits).bitwise_and_(0x7FFFFFFF)


def log_exponential(keys: Tensor, hashes: Tensor) -> Tensor:
    """log E for independent E ~ Exp(1): float32 [m, n]. argmax(logits - log E) is a draw from softmax(logits) (Gumbel-max).

    Always finite. Small E decide a draw, so resolution is kept there: E = -log(1 - u) with u down to 2^-32.
    """
    uniform = uniform_bits(keys, hashes).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


def _mix64(z: Tensor) -> Tensor:
    z = (z ^ _shift64(z, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ _shift64(z, 27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ _shift64(z, 31)


def _shift64(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # logical: torch shifts the sign in


def _mix32(x: Tensor) -> Tensor:
    """In place: the "lowbias32" finaliser (Wellons, "Prospecting for hash functions", 2018)."""
    _xor_shift(x, 16)
    x.mul_(0x7FEB352D)
    _xor_shift(x, 15)
    x.mul_(0x846CA68B - (1 << 32))
    return _xor_shift(x, 16)


def _xor_shift(x: Tensor, by: int) -> Tensor:
    return x.bitwise_xor_((x >> by).bitwise_and_((1 << (32 - by)) - 1))
