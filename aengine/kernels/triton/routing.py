"""The choice of experts for each token, in one launch: the scores of a router, the best of them, and the weights of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.routing import RouterScoring, Routing


def route(logits: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token as `aengine.kernels.routing.route` does, in one launch. Of equal scores, of experts and of groups,
    the first are chosen."""
    tokens, num_experts = logits.shape
    chosen = torch.empty((tokens, routing.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        # A program has its experts in rows, one for each group; the choice needs no groups where all of them are chosen from.
        groups = 1 if routing.top_groups == routing.num_groups else routing.num_groups
        rows, columns = triton.next_power_of_2(groups), triton.next_power_of_2(num_experts // groups)
        _route[(tokens,)](
            *(logits.contiguous(), bias, correction, chosen, weights, routing.scaling),
            GROUPS=groups,
            OF_GROUP=num_experts // groups,
            TOP_GROUPS=routing.top_groups,
            GROUP_TOP=routing.group_top,
            ROWS=rows,
            COLUMNS=columns,
            TOP_K=routing.top_k,
            SLOTS=triton.next_power_of_2(routing.top_k),
            SOFTMAX=routing.scoring is RouterScoring.SOFTMAX,
            NORMALIZE=routing.normalize,
            num_warps=max(1, min(4, rows * columns // 128)),
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
    GROUPS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, ROWS * COLUMNS)
    expert = place // COLUMNS * OF_GROUP + place % COLUMNS
    inside = (place // COLUMNS < GROUPS) & (place % COLUMNS < OF_GROUP)
    scores = tl.load(logits + token * GROUPS * OF_GROUP + expert, mask=inside, other=0.0).to(tl.float32)
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
    ranked = tl.where(inside & (ranked == ranked), ranked, -float("inf"))  # where none is a number, the first expert is the best
    if GROUPS > 1:
        by_group = tl.reshape(ranked, [ROWS, COLUMNS])
        kept = _best_groups(by_group, TOP_GROUPS, GROUP_TOP, ROWS, COLUMNS)
        ranked = tl.reshape(tl.where(kept[:, None], by_group, -float("inf")), [ROWS * COLUMNS])
    slot = tl.arange(0, SLOTS)
    experts = tl.zeros([SLOTS], tl.int64)
    of_slots = tl.zeros([SLOTS], tl.float32)
    for k in range(TOP_K):
        best = tl.argmax(ranked, 0)
        of_slots = tl.where(slot == k, tl.sum(tl.where(place == best, scores, 0.0), 0), of_slots)
        experts = tl.where(slot == k, (best // COLUMNS * OF_GROUP + best % COLUMNS).to(tl.int64), experts)
        ranked = tl.where(place == best, -float("inf"), ranked)
    if NORMALIZE:
        of_slots = of_slots / (tl.sum(of_slots, 0) + 1e-20)
    tl.store(chosen + token * TOP_K + slot, experts, mask=slot < TOP_K)
    tl.store(weights + token * TOP_K + slot, of_slots * scaling, mask=slot < TOP_K)


@triton.jit
def _best_groups(by_group, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS] bool: the TOP_GROUPS rows with the largest sums of their GROUP_TOP largest numbers, of equal ones the first."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS], tl.float32)
    for _ in range(GROUP_TOP):
        sums += tl.max(by_group, 1)
        by_group = tl.where(column[None, :] == tl.argmax(by_group, 1)[:, None], -float("inf"), by_group)
    kept = row < 0
    for _ in range(TOP_GROUPS):
        best = tl.argmax(sums, 0)
        kept = kept | (row == best)
        sums = tl.where(row == best, -float("inf"), sums)
    return kept
