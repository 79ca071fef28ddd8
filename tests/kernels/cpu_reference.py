"""What every CPU kernel computes, in plain torch and float32.

Knows nothing of packing, pages' layouts or threads. Inputs of any dtype are widened first; results are float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_INT8_MAX = 127.0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[m, in], [out, in], [out] -> [m, out]"""
    product = x.float() @ weight.float().T
    return product if bias is None else product + bias.float()


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The first half of the rows of `weight` is the gate: silu(gate) * up."""
    gate, up = linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def quantized(rows: Tensor, largest: int = _INT8_MAX) -> tuple[Tensor, Tensor]:
    """Each row of a matrix as integers up to the `largest` (in float32) and the scale [m, 1] that they are to be multiplied with."""
    wide = rows.float()
    absmax = wide.abs().amax(-1, keepdim=True)
    limit = torch.full_like(absmax, largest)  # number / tensor would be number * (1 / tensor), rounded twice
    factor = torch.where(absmax > 0, limit / absmax, 0.0)
    return torch.round(wide * factor), absmax / largest


def int8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` with rows of both quantised: exact integer sums, then both scales."""
    (x_values, x_scale), (w_values, w_scale) = quantized(x), quantized(weight)
    product = (x_values.double() @ w_values.double().T).float() * (w_scale.T * x_scale)
    return product if bias is None else product + bias.float()


def rounded_activations(x: Tensor, group_size: int, order: Tensor | None = None) -> Tensor:
    """[m, in] with each group of columns, in `order`, rounded to int8 values times a scale."""
    ordered = x.float() if order is None else x.float()[:, order]
    groups = [torch.mul(*quantized(group)) for group in ordered.split(group_size, dim=1)]
    rounded = torch.cat(groups, dim=1)
    return rounded if order is None else torch.empty_like(rounded).index_copy_(1, order, rounded)


def route(
    logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool = False,
    correction: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_top: int = 1,
    normalize: bool = False,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """[m, num_experts] -> the experts and weights of each token, [m, top_k], as the router of Transformers' DeepSeek-V3 chooses them;
    all others are special cases of it."""
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    values = scores if correction is None else scores + correction
    if num_groups > 1:
        groups = values.view(len(values), num_groups, -1)
        ranks = groups.topk(group_top, dim=-1).values.sum(-1)
        best = torch.zeros_like(ranks).scatter(1, ranks.topk(top_groups, dim=-1).indices, 1.0)
        values = groups.masked_fill(best[..., None] == 0, -math.inf).flatten(1)
    chosen = values.topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * scaling


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The MLPs of the [m, top_k] chosen experts, added with their weights; [m, in]. Matrices [num_experts, out, in]."""
    out = torch.zeros(len(x), down.shape[1])
    for token, row in enumerate(x):
        for expert, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            biases = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
            gated = gated_linear(row[None], gate_up[expert], biases[0]).to(x.dtype)
            out[token] += weight * linear(gated, down[expert], biases[1])[0]
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., size], [size] -> [..., size]"""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(heads: Tensor, cos_sin: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """[T, heads, head_dim] with [T, head_dim] cosines and sines; each head is normalised first where there is a weight."""
    wide = heads.float() if norm is None else rms_norm(heads, norm, eps)
    cos, sin = cos_sin[:, None, :].chunk(2, dim=-1)
    first, second = wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    scale: float,
    window: int | None,
    soft_cap: float,
    chunked: bool = False,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """[T, heads, head_dim] queries, `lengths[i]` of them the last of row i, over its [s, kv heads, head_dim] keys and values.

    `sinks` [heads] are scores of a key whose value is zero. `slopes` [heads] are what scores lose for each position.
    """
    out = []
    for rows, key, value in zip(torch.split(query.float(), list(lengths)), keys, values, strict=True):
        group = query.shape[1] // key.shape[1]
        wide_key, wide_value = (one.float().repeat_interleave(group, dim=1) for one in (key, value))
        scores = torch.einsum("qhd,shd->hqs", rows, wide_key) * scale
        if soft_cap:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        at = torch.arange(len(key) - len(rows), len(key))[:, None]
        source = torch.arange(len(key))[None, :]
        if slopes is not None:
            scores = scores - slopes[:, None, None] * (at - source)
        hidden = source > at
        if window is not None:
            hidden |= source < at // window * window if chunked else source <= at - window
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(rows), 1)), dim=-1)
            wide_value = torch.cat((wide_value, torch.zeros_like(wide_value[:1])))
        out.append(torch.einsum("hqs,shd->qhd", scores.softmax(-1), wide_value))
    return torch.cat(out) if out else query.float()
