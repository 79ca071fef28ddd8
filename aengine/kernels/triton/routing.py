"""The choice of experts for each token, in one launch: the scores of a router, the best of them, and the weights of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def route(
    logits: Tensor, bias: Tensor | None, correction: Tensor | None, top_k: int, softmax: bool, normalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """As `LayerOps.route`; of equal scores the first are chosen. Experts are chosen in the order of their scores."""
    tokens, num_experts = logits.shape
    chosen = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        block = triton.next_power_of_2(num_experts)
        _route[(tokens,)](
            *(logits.contiguous(), bias, correction, chosen, weights, scaling),
            EXPERTS=num_experts,
            BLOCK=block,
            TOP_K=top_k,
            SLOTS=triton.next_power_of_2(top_k),
            SOFTMAX=softmax,
            NORMALIZE=normalize,
            num_warps=max(1, min(4, block // 128)),
        )
    return chosen, weights


@triton.jit
def _route(
    logits,
    bias,
    correction,
    chosen,
    weights,
    scaling,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    scores = tl.load(logits + token * EXPERTS + expert, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        scores += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    if SOFTMAX:
        scores = tl.where(inside, scores, -float("inf"))
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    ranked = scores
    if correction is not None:
        ranked += tl.load(correction + expert, mask=inside, other=0.0).to(tl.float32)
    ranked = tl.where(inside, ranked, -float("inf"))
    slot = tl.arange(0, SLOTS)
    experts = tl.zeros([SLOTS], tl.int64)
    of_slots = tl.zeros([SLOTS], tl.float32)
    for k in range(TOP_K):
        best = tl.minimum(tl.argmax(ranked, 0), EXPERTS - 1)  # where none is a number, too
        of_slots = tl.where(slot == k, tl.sum(tl.where(expert == best, scores, 0.0), 0), of_slots)
        experts = tl.where(slot == k, best.to(tl.int64), experts)
        ranked = tl.where(expert == best, -float("inf"), ranked)
    if NORMALIZE:
        of_slots = of_slots / (tl.sum(of_slots, 0) + 1e-20)
    tl.store(chosen + token * TOP_K + slot, experts, mask=slot < TOP_K)
    tl.store(weights + token * TOP_K + slot, of_slots * scaling, mask=slot < TOP_K)
