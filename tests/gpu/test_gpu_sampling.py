"""Whatever can be asked of a row's tokens, on a device: those of the plainest CPU sampler, also where drafts come before them."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from drafted import VOCAB_SIZE, random_drafts, random_sequences, run
from parity import TakingTurns
from slow_cases import slow_but

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])
GRAMMARS = [TakingTurns(VOCAB_SIZE, in_bits=True), TakingTurns(VOCAB_SIZE, in_bits=False)]
LENGTH = 16


@pytest.mark.parametrize("part", slow_but([0], range(3)))
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_tokens_and_logprobs_are_those_of_a_cpu(device: str, part: int) -> None:
    """Penalties, masks, grammars, filters, custom processors and logprobs."""
    seen: Counter[str] = Counter()
    for seed in range(8 * part, 8 * part + 8):
        expected, plain, found = (random_sequences(seed, GRAMMARS) for _ in range(3))
        run(expected, iter(dict, None), LENGTH)
        run(plain, iter(dict, None), LENGTH, torch.device(device))
        run(found, random_drafts(random.Random(seed), found, {one.row: one.tokens for one in expected}), LENGTH, torch.device(device))
        for one, *others in zip(expected, plain, found, strict=True):
            for other in others:
                for ours, theirs in zip(other.output[:LENGTH], one.output, strict=True):
                    assert ours[:1] == theirs[:1], one.params
                    if len(theirs) > 1:
                        (logprob, rank, ids, logprobs), (own, own_rank, own_ids, own_logprobs) = ours[1:], theirs[1:]
                        assert (rank, ids) == (own_rank, own_ids)
                        assert [logprob, *logprobs] == pytest.approx([own, *own_logprobs], abs=1e-5)
                        seen["logprobs"] += 1
            seen["accepted"] += others[1].num_accepted
            seen["failed"] += one.failed
            seen["grammar"] += one.params.grammar is not None
            seen["penalties"] += one.params.repetition_penalty != 1.0
            seen["processors"] += len(one.params.processors)
    assert min(seen.values()) > 0, seen
