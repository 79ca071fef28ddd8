"""Logprobs against torch's log-softmax. Less than a second."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aengine.sampling import sampler
from aengine.sampling.arrays import DeviceArrays, HostArrays
from aengine.sampling.draw import log_sums
from aengine.sampling.sampler import token_logprobs

TENSORS = DeviceArrays(torch.device("cpu"))


def host_sums(logits: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`log_sums` of arrays."""
    sums, greater = log_sums(torch.from_numpy(logits), torch.from_numpy(own))
    return sums.numpy(), greater.numpy()


@pytest.mark.parametrize("count", [0, 1, 20, 3000])
@pytest.mark.parametrize("vocab_size", [90, 3000])
@pytest.mark.parametrize("host", [False, True])
def test_against_log_softmax(monkeypatch: pytest.MonkeyPatch, host: bool, vocab_size: int, count: int) -> None:
    monkeypatch.setattr(sampler, "_BLOCK_ELEMENTS", 5 * vocab_size)
    generator = torch.Generator().manual_seed(count)
    logits = (torch.randn(13, vocab_size, generator=generator) * 8).round() / 2  # with ties
    tokens = torch.randint(0, vocab_size, (13,), generator=generator)
    tokens[:5] = logits[:5].argmax(-1)
    if host:
        found = token_logprobs(HostArrays(), logits.numpy(), tokens.numpy(), count, host_sums).on_host()
    else:
        found = token_logprobs(TENSORS, logits, tokens, count, log_sums).on_host()
    expected = logits.double().log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count].numpy()
    for row, token in enumerate(tokens.tolist()):
        assert found.ranks[row] == (logits[row] > logits[row, token]).sum() + 1
        assert found.token_logprobs[row] == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert found.top_ids[row].tolist() == order[row].tolist()
        assert found.top_logprobs[row].tolist() == pytest.approx(expected[row, order[row]].tolist(), abs=1e-5)
    assert (found.token_logprobs.dtype, found.ranks.dtype, found.top_ids.dtype, found.top_logprobs.dtype) == ("f4", "i4", "i4", "f4")


@pytest.mark.parametrize("vocab_size", [3, 33_000, 151_936])
def test_the_bits_depend_on_the_row_alone(vocab_size: int) -> None:
    """Not on the rows beside it or the threads, which sums of torch do."""
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(3)) * 4
    tokens = torch.arange(5).clamp(max=vocab_size - 1)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(token_logprobs(TENSORS, logits, tokens, 2, log_sums))
            alone = [token_logprobs(TENSORS, logits[row : row + 1].clone(), tokens[row : row + 1], 2, log_sums) for row in range(5)]
            found.append(sampler.join(TENSORS, alone))
    finally:
        torch.set_num_threads(threads)
    assert all(one.token_logprobs.equal(found[0].token_logprobs) and one.top_logprobs.equal(found[0].top_logprobs) for one in found)


def test_sums_of_rows_without_numbers() -> None:
    logits = torch.tensor([[1.0, math.nan, 2.0], [-math.inf] * 3, [-math.inf, 5.0, -math.inf]])
    assert torch.allclose(log_sums(logits, logits[:, :1])[0][:, 0], torch.tensor([math.nan, -math.inf, 5.0]), equal_nan=True)
