"""The order of candidates and what a filter leaves of them."""

from __future__ import annotations

import math

import pytest
import torch

from aengine.sampling.draw import kept_candidates, top_candidates


@pytest.mark.parametrize("count", [1, 7, 30])
def test_order_is_by_score_then_id(count: int) -> None:
    scores = torch.randint(-3, 4, (20, 30), generator=torch.Generator().manual_seed(0)) * 0.5
    scores[0, 4] = -math.inf
    scores[1, 9] = math.inf
    found, ids = top_candidates(scores, count)
    for row in range(20):
        expected = sorted(range(30), key=lambda token, row=row: (-scores[row, token].item(), token))[:count]
        assert ids[row].tolist() == expected
        assert torch.equal(found[row], scores[row, expected])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("vocab_size", [1003, 4096])
@pytest.mark.parametrize("count", [1, 5, 16, 200])
def test_order_across_blocks(vocab_size: int, count: int) -> None:
    """Ties within and across blocks of ids, the last block being a part of one; rows with less to choose from than is asked for."""
    scores = torch.randint(-3, 4, (30, vocab_size), generator=torch.Generator().manual_seed(1)) * 0.5
    scores[:10] = torch.randn(10, vocab_size, generator=torch.Generator().manual_seed(2))
    scores[20:, : vocab_size - 3] = -math.inf
    found, ids = top_candidates(scores, count)
    for row in range(30):
        expected = sorted(range(vocab_size), key=lambda token, row=row: (-scores[row, token].item(), token))[:count]
        assert ids[row].tolist() == expected
        assert torch.equal(found[row], scores[row, expected])


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p", "total", "kept"),
    [
        (0.0, 0, 1.0, None, 4),
        (0.0, 2, 1.0, None, 2),
        (0.2, 0, 1.0, None, 3),
        (0.4, 3, 1.0, None, 2),
        (1.0, 0, 1.0, None, 1),
        (0.0, 0, 0.0, None, 1),
        (0.0, 0, 0.4, None, 1),
        (0.0, 0, 0.51, None, 2),
        (0.0, 0, 0.8, None, 3),
        (0.0, 2, 0.6, None, 1),  # of the two that top_k leaves, the first has two thirds
        (0.0, 2, 0.7, None, 2),
        (0.0, 0, 0.3, 4.0, 2),  # 1.2 of a mass of which the candidates have 1, 0.5, 0.3, 0.2
    ],
)
def test_what_is_kept(min_p: float, top_k: int, top_p: float, total: float | None, kept: int) -> None:
    scores = torch.tensor([[0.5, 0.25, 0.15, 0.0999]]).log()
    mask = kept_candidates(
        scores,
        torch.tensor([min_p]),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
        None if total is None else torch.tensor([[total]], dtype=torch.float64),
    )
    assert mask.tolist() == [[i < kept for i in range(4)]]
