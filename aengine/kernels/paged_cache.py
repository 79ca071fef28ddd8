"""What kernels and attention backends both know of a layer: its K and V as tensors of pages, and how it scores keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The order of the dimensions (pages, tokens of a page, KV heads, head_dim) depends on the attention backend."""

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0  # what a stored number is multiplied with; other than 1 for float8 alone
    value_scale: float = 1.0
    latent: bool = False  # `values` are a view of the last numbers of `keys`


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scores keys."""

    scale: float  # multiplies the products of query and key
    window: int | None = None  # a query attends to this many latest positions, itself included; None: to all
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: they do not
    sinks: bool = False
    """Each head has a sink: one more score of every query, neither scaled nor capped, whose value is zero (GPT-OSS)."""


def stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """`x` as a cache of `dtype` holds it: x / scale, saturated and viewed as bytes, where `dtype` is float8; else rounded to `dtype`."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    limit = torch.finfo(dtype).max  # some versions of torch make NaN of what is larger
    return as_bytes((x.float() / scale).clamp_(-limit, limit).to(dtype))


def as_bytes(cache: Tensor) -> Tensor:
    """A float8 tensor viewed as bytes, because torch cannot index float8 everywhere; any other tensor as it is."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
