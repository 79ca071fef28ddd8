"""How many drafts are accepted, where only the device knows what was sampled."""

from __future__ import annotations

import random

import torch

from aengine.sampling.draw import num_accepted


def test_tokens_count_up_to_the_first_that_is_not_the_draft() -> None:
    rng = random.Random(0)
    for _ in range(200):
        tokens, drafts, firsts, expected = [], [], [], []
        for _ in range(rng.randint(1, 6)):
            drawn = [rng.randrange(3) for _ in range(rng.randint(1, 6))]
            proposed = [token if rng.random() < 0.7 else 2 - token for token in drawn[:-1]]
            firsts.append(len(tokens))
            expected.append(next((i for i, draft in enumerate(proposed) if draft != drawn[i]), len(proposed)) + 1)
            tokens += drawn
            drafts += [*proposed, -1]
        found = num_accepted(torch.tensor(tokens), torch.tensor(drafts, dtype=torch.int32), torch.tensor(firsts, dtype=torch.int32))
        assert (found.tolist(), found.dtype) == (expected, torch.int32)


def test_nothing_is_read_by_the_host() -> None:
    """Tensors without contents have nothing to read."""
    given = [torch.zeros(count, dtype=dtype, device="meta") for count, dtype in ((5, torch.int64), (5, torch.int32), (2, torch.int32))]
    assert num_accepted(*given).shape == (2,)
