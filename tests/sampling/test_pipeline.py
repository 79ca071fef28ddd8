"""The pinned order, every parameter with every other: mixed batches against a plain pipeline, alone, and rebuilt. About 15 seconds."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import Row, distribution, processed, step
from slow_cases import slow_but
from tensor_sampler import tensor_sampler

from aengine.sampling.sampler import Sampler
from aengine.scheduler.plan import RowParams

VOCAB = 70  # a whole block of ids and a part of one
CPU = torch.device("cpu")
STEPS = 4


def halve_even(logits: torch.Tensor, token_ids: list[int]) -> None:
    logits[token_ids[-1] % 2 :: 2] *= 0.5


def maybe(values: st.SearchStrategy, off: object) -> st.SearchStrategy:
    return st.one_of(st.just(off), values)


ids = st.integers(0, VOCAB - 1)
numbers = st.floats(-2.0, 2.0, width=32)
row_params = st.builds(
    RowParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 66, VOCAB, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.95, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=maybe(numbers, 0.0),
    frequency_penalty=maybe(numbers, 0.0),
    repetition_penalty=maybe(st.floats(0.25, 2.0, width=32), 1.0),
    logit_bias=maybe(st.dictionaries(ids, st.floats(-10, 10, width=32), max_size=4).map(lambda bias: tuple(bias.items())), ()),
    allowed_token_ids=maybe(st.sets(ids, min_size=20, max_size=60).map(tuple), None),
    banned_token_ids=maybe(st.sets(st.integers(0, 15), max_size=3).map(tuple), ()),
    bad_words=maybe(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple), max_size=8).map(tuple), ()),
    min_tokens=st.sampled_from([0, 0, 2, 6]),
    stop_ids=st.just((3, 60)),
    logprobs=st.sampled_from([None, 0, 1, 8]),
    processors=maybe(st.just((halve_even,)), ()),
)
rows_of = st.lists(st.tuples(row_params, st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(1, 9)), min_size=1, max_size=7)


def logits_of(seed: int, at: int, count: int) -> torch.Tensor:
    rng = np.random.default_rng((seed, at))
    logits = rng.normal(0, 3, (count, VOCAB)).astype(np.float32)
    logits[:, :13] += 2.0  # so that the sequences repeat themselves
    return torch.from_numpy(np.round(logits * 4) / 4)  # with ties


def sampler_of(rows: list[Row]) -> Sampler:
    sampler = tensor_sampler(16, VOCAB, CPU)
    sampler.update([row.new() for row in rows])
    return sampler


@pytest.mark.parametrize("part", slow_but([0], range(3)))
@settings(max_examples=20, deadline=None)
@given(drawn=rows_of, seed=st.integers(0, 2**32), scramble=st.randoms(use_true_random=False))
def test_against_the_plain_pipeline(part: int, drawn: list[tuple[RowParams, list[int], int]], seed: int, scramble) -> None:
    indices = scramble.sample(range(16), len(drawn))
    rows = [
        Row(index, params, list(tokens), min(prompt_len, len(tokens)))
        for index, (params, tokens, prompt_len) in zip(indices, drawn, strict=True)
    ]
    start = copy.deepcopy(rows)
    sampler = sampler_of(rows)
    histories = []
    for at in range(STEPS):
        logits = logits_of(seed, at, len(rows))
        raw = logits.numpy().copy()
        expected = [processed(raw[i], row.params, row.tokens, row.prompt_len) for i, row in enumerate(rows)]
        sampled = step(sampler, logits, rows)
        for i, row in enumerate(rows):
            token = row.tokens[-1]
            np.testing.assert_allclose(logits[i].numpy(), expected[i], atol=1e-5, rtol=1e-5)
            if not np.isneginf(expected[i]).all():
                # what the sampler made of the logits, so that rounding does not move the border of a filter
                assert distribution(logits[i].numpy(), row.params)[token] > 0 or _on_the_border(logits[i].numpy(), row.params, token)
        check_logprobs(sampled, raw, rows)
        histories.append([len(row.tokens) for row in rows])

    for i, row in enumerate(rows):  # alone, in another row, the same tokens
        alone = copy.deepcopy(start[i])
        alone.row = 3
        lonely = sampler_of([alone])
        for at in range(STEPS):
            step(lonely, logits_of(seed, at, len(rows))[i : i + 1].clone(), [alone])
        assert alone.tokens == row.tokens

    # preempted after two steps, its rows then taken by others, and rebuilt from tokens
    again = copy.deepcopy(start)
    for row, full in zip(again, rows, strict=True):
        row.tokens = full.tokens[: len(row.tokens) + 2]
    sampler.update([Row(row.row, drawn[0][0], [1], 1).new() for row in again])
    sampler.update([row.new() for row in again])
    for at in range(2, STEPS):
        step(sampler, logits_of(seed, at, len(rows)), again)
    assert [row.tokens for row in again] == [row.tokens for row in rows]


def _on_the_border(logits: np.ndarray, params: RowParams, token: int) -> bool:
    """Whether float32 and float64 may disagree about the token: top_p or min_p within a rounding error of it."""
    close = [
        distribution(logits, RowParams(params.temperature, params.top_k, min(1.0, params.top_p * a), params.min_p * b, 0))[token]
        for a in (1.0, 1 + 1e-5)
        for b in (1.0, 1 - 1e-5)
    ]
    return max(close) > 0


def check_logprobs(sampled, raw: np.ndarray, rows: list[Row]) -> None:
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        assert sampled.logprobs is None
        return
    assert sampled.logprob_rows.tolist() == wanted
    reference = raw.astype(np.float64) - np.log(np.exp(raw.astype(np.float64)).sum(-1, keepdims=True))
    for j, i in enumerate(wanted):
        token, count = rows[i].tokens[-1], rows[i].params.logprobs
        assert math.isclose(sampled.logprobs.token_logprobs[j], reference[i, token], abs_tol=1e-5)
        assert sampled.logprobs.ranks[j] == (raw[i] > raw[i, token]).sum() + 1
        best = np.lexsort((np.arange(VOCAB), -raw[i]))[:count]
        assert sampled.logprobs.top_ids[j, :count].tolist() == best.tolist()
        np.testing.assert_allclose(sampled.logprobs.top_logprobs[j, :count].numpy(), reference[i, best], atol=1e-5)
