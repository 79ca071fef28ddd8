"""`PagedCache`: the K and V of one layer as tensors of pages, which kernels and attention backends both read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The order of the dimensions (pages, tokens of a page, KV heads, head_dim) is up to who allocates it."""

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0  # what a stored number is multiplied with; other than 1 for float8 alone
    value_scale: float = 1.0


def stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """`x` as a cache of `dtype` holds it: x / scale, saturated, where that is float8. A view as `as_bytes` makes it."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    limit = torch.finfo(dtype).max  # some versions of torch make NaN of what is larger
    return as_bytes((x.float() / scale).clamp_(-limit, limit).to(dtype))


def as_bytes(cache: Tensor) -> Tensor:
    """A float8 tensor viewed as bytes, because torch cannot index float8 everywhere; any other tensor as it is."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
