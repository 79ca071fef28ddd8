"""200 random mixed steps on real KV: every sequence gets what it gets alone, on fresh pages and in one piece.

The idea of the KV oracle in tests/scheduler, on real contents: a slot that holds another token's KV, or that was not written when it was
read, changes the logprobs of every later token of the sequence by far more than rounding does.
"""

from __future__ import annotations

import pathlib
from dataclasses import replace

import numpy as np
import pytest
from crowd import VOCAB, Crowd, Member
from driver import GREEDY, Driver
from gpu_cases import FP8_ON_CUDA, ON_CPU, ON_CUDA, Case, params, save_small
from slow_cases import slow_but

from aengine.runner.runner import ModelRunner

pytestmark = pytest.mark.slow


def random_prompt(rng: np.random.Generator) -> list[int]:
    return rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist()


def alone(runner: ModelRunner, member: Member) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs of a sequence's output, and those of the likeliest tokens in their place, computed as one prompt in one step."""
    driver = Driver(runner)
    sequence = driver.add(member.tokens, replace(GREEDY, prompt_logprobs=1))
    (scored,) = driver.run_step([sequence]).prompt_logprobs
    assert scored.start == 1
    first = member.prompt_len - scored.start
    return scored.logprobs.token_logprobs[first:], scored.logprobs.top_logprobs[first:, 0]


@pytest.mark.parametrize("case", params((*ON_CPU, *ON_CUDA, *FP8_ON_CUDA)))
@pytest.mark.parametrize(("family", "page_size"), slow_but([("mistral-windowed", 4)], [("qwen3", 16), ("mistral-windowed", 4)]))
def test_a_sequence_in_a_crowd_is_the_sequence_alone(family: str, page_size: int, case: Case, tmp_path: pathlib.Path) -> None:
    save_small(family, tmp_path, case.dtype)
    runner = case.runner(tmp_path, page_size=page_size)
    crowd = Crowd(runner, seed=page_size, prompts=random_prompt)
    crowd.run(200)
    runner.close()
    members = [member for member in crowd.everyone if len(member.tokens) > member.prompt_len]
    assert crowd.copies > 5, "pages were copied"
    assert crowd.preemptions > 5, "rows began anew"
    assert len(members) > 30

    fresh = case.runner(tmp_path, page_size=page_size)
    differences = []
    for member in members:
        chosen, likeliest = alone(fresh, member)
        differences.append(likeliest - chosen)  # 0 where the token is the one that it would be alone
        if member.logprobs:
            differences.append(np.abs(chosen - member.logprobs))
    fresh.close()
    case.check(np.concatenate(differences))
