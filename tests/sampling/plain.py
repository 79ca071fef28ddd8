"""The pinned order in the plainest way: one row at a time, over the whole vocabulary, in NumPy. And a crowd of rows that is sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aengine.sampling.sampler import SampledTokens, Sampler
from aengine.scheduler.plan import Features, NewRow, RowParams

GREEDY = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def processed(logits: np.ndarray, params: RowParams, tokens: Sequence[int], prompt_len: int) -> np.ndarray:
    """[V] float32 logits after everything that precedes the draw."""
    x = logits.astype(np.float32)
    output = list(tokens[prompt_len:])
    if params.allowed_token_ids is not None:
        x[[token for token in range(len(x)) if token not in params.allowed_token_ids]] = -math.inf
    for word in params.bad_words:
        if tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]:
            x[word[-1]] = -math.inf
    for token in params.banned_token_ids:
        x[token] = -math.inf
    if len(output) < params.min_tokens:
        for token in params.stop_ids:
            x[token] = -math.inf
    for token, bias in params.logit_bias:
        x[token] += np.float32(bias)
    for token in set(tokens):
        x[token] = x[token] * np.float32(params.repetition_penalty) if x[token] < 0 else x[token] / np.float32(params.repetition_penalty)
    for token in set(output):
        x[token] -= np.float32(params.frequency_penalty) * output.count(token)
        x[token] -= np.float32(params.presence_penalty)
    row = torch.from_numpy(x)
    for processor in params.processors:
        processor(row, list(tokens))
    return x


def distribution(logits: np.ndarray, params: RowParams) -> np.ndarray:
    """[V] float64 probabilities that a draw from processed logits follows: temperature, min_p, top_k, top_p."""
    if params.temperature == 0.0:
        return np.eye(len(logits))[int(logits.argmax())]
    scores = logits.astype(np.float64) / params.temperature
    p = np.exp(scores - scores.max())
    p = np.where(p < params.min_p * (1 - 1e-6), 0.0, p)
    order = np.lexsort((np.arange(len(p)), -logits))
    if params.top_k:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0.0
    return p / p.sum()


@dataclass
class Row:
    row: int
    params: RowParams
    tokens: list[int]
    prompt_len: int

    def new(self) -> NewRow:
        tokens = self.tokens if self.params.features & Features.HISTORY else []
        return NewRow(self.row, self.params, self.prompt_len, np.array(tokens, dtype=np.int32))


def step(sampler: Sampler, logits: torch.Tensor, rows: Sequence[Row], *, observe: bool = True) -> SampledTokens:
    """Samples for rows that the sampler knows, and appends the tokens to them. Changes the logits as the sampler does."""
    indices = np.array([one.row for one in rows], dtype=np.int32)
    positions = np.array([len(one.tokens) for one in rows], dtype=np.int32)
    device = sampler._arrays.device
    sampled = sampler.sample(logits, indices, positions, *(torch.from_numpy(array).to(device) for array in (indices, positions)))
    for one, token in zip(rows, sampled.tokens.tolist(), strict=True):
        one.tokens.append(token)
    if observe:
        impossible = sampled.impossible
        assert impossible is not None
        failing = {one.row for one, nothing_left in zip(rows, impossible.tolist(), strict=True) if nothing_left and sampled.step}
        assert set(sampler.observe(sampled)) == failing | set(sampled.step.failures if sampled.step else ())
    return sampled
