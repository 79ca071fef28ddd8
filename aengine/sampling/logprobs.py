"""Logprobs of tokens under given logits: natural log-softmax in float32, rank, and the likeliest alternatives. Keeps no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aengine.sampling.torch_draw import top_candidates
from aengine.scheduler.plan import TokenLogprobs

_BLOCK_ELEMENTS = 1 << 20  # logits worked on at a time: 4 MiB, so that the passes over them meet in a cache
LogSums = Callable[[Tensor], Tensor]
"""[m, V] float32 logits, which stay as they are -> [m, 1] float32, the log of the sum of exp of each row. It depends on the row alone."""
_FINITE = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
_FIRST_CANDIDATES = 16  # likeliest tokens among which a rank is searched for first


class DeviceLogprobs(NamedTuple):
    """`TokenLogprobs` on the device: the ids are int64."""

    token_logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def on_host(self) -> TokenLogprobs:
        """Returns the logprobs as arrays with int32 ids. The tensors must be in host memory already."""
        return TokenLogprobs(
            token_logprobs=self.token_logprobs.numpy(),
            ranks=self.ranks.numpy().astype(np.int32),
            top_ids=self.top_ids.numpy().astype(np.int32),
            top_logprobs=self.top_logprobs.numpy(),
        )


def log_sums(logits: Tensor) -> Tensor:
    """`LogSums` in torch, whose own sums of rows are added up in an order that depends on the number of rows and threads. Those of doubles
    differ by less than a float32 shows; a CPU, which is slow in them, adds halves of the row to each other instead."""
    best = logits.amax(-1, keepdim=True).clamp(*_FINITE)  # without a number, or with one that is infinite, the sum says so
    masses = (logits - best).exp_()
    if logits.device.type != "cpu":
        return masses.sum(-1, keepdim=True, dtype=torch.float64).log().float() + best
    width = masses.shape[1]
    while width > 1:
        half = width // 2
        masses[:, :half] += masses[:, width - half : width]
        width -= half
    return masses[:, :1].log() + best


def token_logprobs(logits: Tensor, tokens: Tensor, count: int, sums: LogSums = log_sums) -> DeviceLogprobs:
    """[m, V] logits and [m] int64 tokens -> logprob and rank of each token, and the `count` likeliest. `sums`: how rows are added up.

    A token's rank is 1 + how many logits are greater than its own; the likeliest are in the order of (logit, -id).
    """
    step = len(tokens) if logits.device.type != "cpu" else max(1, _BLOCK_ELEMENTS // logits.shape[1])
    parts = [_block(logits[at : at + step], tokens[at : at + step], count, sums) for at in range(0, len(tokens), max(1, step))]
    return parts[0] if len(parts) == 1 else join(parts)


def join(parts: list[DeviceLogprobs]) -> DeviceLogprobs:
    return DeviceLogprobs(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _block(logits: Tensor, tokens: Tensor, count: int, sums: LogSums) -> DeviceLogprobs:
    logits = logits.float().contiguous()
    normaliser = sums(logits)
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
