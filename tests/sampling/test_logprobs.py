"""Logprobs against torch's log-softmax. Less than a second."""

from __future__ import annotations

import pytest
import torch

from aengine.sampling import logprobs
from aengine.sampling.logprobs import token_logprobs


@pytest.mark.parametrize("count", [0, 1, 20, 3000])
@pytest.mark.parametrize("vocab_size", [90, 3000])
def test_against_log_softmax(monkeypatch: pytest.MonkeyPatch, vocab_size: int, count: int) -> None:
    monkeypatch.setattr(logprobs, "_BLOCK_ELEMENTS", 5 * vocab_size)
    generator = torch.Generator().manual_seed(count)
    logits = (torch.randn(13, vocab_size, generator=generator) * 8).round() / 2  # with ties
    tokens = torch.randint(0, vocab_size, (13,), generator=generator)
    tokens[:5] = logits[:5].argmax(-1)
    found = token_logprobs(logits, tokens, count).on_host()
    expected = logits.double().log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count].numpy()
    for row, token in enumerate(tokens.tolist()):
        assert found.ranks[row] == (logits[row] > logits[row, token]).sum() + 1
        assert found.token_logprobs[row] == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert found.top_ids[row].tolist() == order[row].tolist()
        assert found.top_logprobs[row].tolist() == pytest.approx(expected[row, order[row]].tolist(), abs=1e-5)
    assert (found.token_logprobs.dtype, found.ranks.dtype, found.top_ids.dtype, found.top_logprobs.dtype) == ("f4", "i4", "i4", "f4")
