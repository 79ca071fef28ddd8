"""Sampling in NumPy, on the host, gives what sampling in torch gives: the same tokens, drafts, failures, and bits of logprobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_sampler import tensor_sampler

from aengine.kernels.params import DrawParams
from aengine.sampling.arrays import DeviceArrays, HostArrays, on_host
from aengine.sampling.draw import TorchDraw, log_sums
from aengine.sampling.sampler import SampledTokens, Sampler
from aengine.scheduler.plan import NewRow, RowParams

CPU, VOCAB = torch.device("cpu"), 70
IDS = st.integers(0, VOCAB - 1)
LISTS = st.lists(IDS, min_size=1, max_size=5).map(tuple)


def keep_even(logits: torch.Tensor, tokens: list[int]) -> None:
    logits[1::2] -= len(tokens)


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 2.0]),
        "seed": st.integers(0, 1 << 63),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([0.3, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.7]),
        "frequency_penalty": st.sampled_from([-1.0, 0.0, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "allowed_token_ids": LISTS,
        "banned_token_ids": LISTS,
        "bad_words": st.lists(LISTS, max_size=2).map(tuple),
        "logit_bias": st.lists(st.tuples(IDS, st.sampled_from([-100.0, 3.5])), max_size=4).map(tuple),
        "logprobs": st.sampled_from([0, 3, VOCAB]),
        "processors": st.just((keep_even,)),
    },
)


def host_sampler(max_rows: int) -> Sampler:
    """Draws and adds up as `tensor_sampler` does, so that only what is in NumPy differs."""
    draw = TorchDraw(VOCAB, CPU)

    def host_draw(logits: np.ndarray, params: np.ndarray, _: object, chosen: np.ndarray) -> np.ndarray:
        packed = torch.from_numpy(params.view(np.int32).reshape(len(params), -1))
        on_device = DrawParams(packed, torch.from_numpy(params["position"].copy()))
        return draw(torch.from_numpy(logits), params, on_device, torch.from_numpy(chosen)).numpy()

    def sums(logits: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = log_sums(torch.from_numpy(logits), torch.from_numpy(own))
        return found[0].numpy(), found[1].numpy()

    return Sampler(max_rows, VOCAB, HostArrays(), host_draw, sums)


def numbers_of(sampled: SampledTokens) -> list[Any]:
    found = [on_host(sampled.tokens).tolist(), on_host(sampled.chosen).tobytes(), on_host(sampled.impossible).tolist()]
    found.append(None if sampled.accepted is None else on_host(sampled.accepted).tolist())
    if sampled.logprobs is not None:
        told = sampled.logprobs.on_host()
        found += [told.token_logprobs.tobytes(), told.ranks.tolist(), told.top_ids.tolist(), told.top_logprobs.tobytes()]
    return found


@settings(max_examples=150, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 1 << 30), st.booleans())
def test_the_same_as_in_torch(wanted: list[dict[str, Any]], seed: int, drafted: bool) -> None:
    rng = np.random.default_rng(seed)
    params = [replace(RowParams(temperature=1.0), **one) for one in wanted]
    samplers = host_sampler(len(params)), tensor_sampler(len(params), VOCAB, CPU)
    prompts = [rng.integers(0, VOCAB, 6).astype(np.int32) for _ in params]
    for sampler in samplers:
        sampler.update([NewRow(row, one, 4, prompt) for row, (one, prompt) in enumerate(zip(params, prompts, strict=True))])
    lengths = np.full(len(params), 6)
    for _ in range(3):
        counts = rng.integers(1, 4, len(params)) if drafted else np.ones(len(params), int)
        rows = np.repeat(np.arange(len(params), dtype=np.int32), counts)
        offsets = np.concatenate([np.arange(count) for count in counts])
        positions = (lengths[rows] + offsets).astype(np.int32)
        logits = (rng.standard_normal((len(rows), VOCAB)) * 4).astype(np.float32).round(1)  # some are equal
        drafts = np.where(np.append(rows[1:] == rows[:-1], False), logits.argmax(-1), -1).astype(np.int32) if drafted else None
        host = samplers[0].sample(logits.copy(), rows, positions, rows, positions, drafts)
        device_rows, device_positions = torch.from_numpy(rows), torch.from_numpy(positions)
        device = samplers[1].sample(torch.from_numpy(logits.copy()), rows, positions, device_rows, device_positions, drafts)
        assert numbers_of(host) == numbers_of(device)
        failures = [
            {row: str(error) for row, error in sampler.observe(one).items()} for sampler, one in zip(samplers, (host, device), strict=True)
        ]
        assert failures[0] == failures[1]
        lengths += 1 if host.accepted is None else host.accepted
        if failures[0] or (host.accepted is not None and not host.accepted.all()):
            return


@pytest.mark.parametrize("count", [1, 4, 20, 300, 3000])
@pytest.mark.parametrize("vocab_size", [3000, 151_936])
def test_the_highest_scores(vocab_size: int, count: int) -> None:
    scores = np.random.default_rng(count).standard_normal((3, vocab_size)).astype(np.float32).round(2)
    scores[1, ::3], scores[2, :], scores[2, 7] = -np.inf, 0.0, -0.0
    found, ids = HostArrays().top_candidates(scores, count)
    expected, at = DeviceArrays(CPU).top_candidates(torch.from_numpy(scores), count)
    assert found.tolist() == expected.tolist()
    assert ids.tolist() == at.tolist()
