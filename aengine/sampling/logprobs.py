"""Logprobs of tokens under given logits: natural log-softmax in float32, rank, and the likeliest alternatives. Keeps no state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aengine.sampling.candidates import top_candidates
from aengine.scheduler.plan import TokenLogprobs

_BLOCK_ELEMENTS = 1 << 20  # logits worked on at a time: 4 MiB, so that the passes over them meet in a cache
_FIRST_CANDIDATES = 16  # likeliest tokens among which a rank is searched for first


class DeviceLogprobs(NamedTuple):
    """`TokenLogprobs` on the device: the ids are int64."""

    token_logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def on_host(self) -> TokenLogprobs:
        """Of tensors that are in host memory already."""
        return TokenLogprobs(
            token_logprobs=self.token_logprobs.numpy(),
            ranks=self.ranks.numpy().astype(np.int32),
            top_ids=self.top_ids.numpy().astype(np.int32),
            top_logprobs=self.top_logprobs.numpy(),
        )


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> DeviceLogprobs:
    """[m, V] logits and [m] int64 tokens -> logprob and rank of each token, and the `count` likeliest.

    A token's rank is 1 + how many logits are greater than its own; the likeliest are in the order of (logit, -id).
    """
    step = len(tokens) if logits.device.type != "cpu" else max(1, _BLOCK_ELEMENTS // logits.shape[1])
    parts = [_block(logits[at : at + step], tokens[at : at + step], count) for at in range(0, len(tokens), max(1, step))]
    return parts[0] if len(parts) == 1 else join(parts)


def join(parts: list[DeviceLogprobs]) -> DeviceLogprobs:
    return DeviceLogprobs(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _block(logits: Tensor, tokens: Tensor, count: int) -> DeviceLogprobs:
    logits = logits.float()
    normaliser = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, tokens[:, None])
    if logits.device.type != "cpu":  # to search first would make the host wait for the device
        ranks = (logits > own).sum(-1) + 1
        top, top_ids = top_candidates(logits, min(count, logits.shape[1])) if count else (own[:, :0], tokens[:, None][:, :0])
    else:
        top, top_ids = top_candidates(logits, min(max(count, _FIRST_CANDIDATES), logits.shape[1]))
        ranks = (top > own).sum(-1) + 1
        if len(rest := (own < top[:, -1:])[:, 0].nonzero()[:, 0]):  # more than the candidates may be greater
            ranks[rest] = (logits[rest] > own[rest]).sum(-1) + 1
    return DeviceLogprobs((own - normaliser)[:, 0], ranks, top_ids[:, :count], top[:, :count] - normaliser)
