"""Small models of every family against Transformers: the logprobs of what they generate, with every attention backend of the device."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from driver import GREEDY, Driver
from gpu_cases import FAMILIES, FP8_ON_CUDA, ON_CPU, ON_CUDA, Case, params, save_small
from slow_cases import slow_but

from aengine.runner.runner import ModelRunner

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * at + 3 * i) % 199 for i in range(1 + 9 * at)] for at in range(6)]
COUNT = 24


@torch.no_grad()
def reference_logprobs(model: transformers.PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """[len(tokens) - 1, vocab_size]: row i is of the token after tokens[: i + 1]."""
    return model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1).numpy()


def generate(driver: Driver, with_logprobs: bool, num_adapters: int) -> list[tuple[list[int], list[float]]]:
    """`COUNT` greedy tokens for each prompt, all prompts together, and their logprobs where asked for. Prompts take turns with adapters of
    the keys from 1 on, and none."""
    row_params = replace(GREEDY, logprobs=1) if with_logprobs else GREEDY
    sequences = [driver.add(prompt, row_params, at % (1 + num_adapters)) for at, prompt in enumerate(PROMPTS)]
    logprobs: dict[int, list[float]] = {s.row: [] for s in sequences}
    while running := [s for s in sequences if len(s.output) < COUNT]:
        before = {s.row: len(s.output) for s in running}
        order = [s for s in running if s.decodes] + [s for s in running if not s.decodes]
        result = driver.run_step(running)
        grown = [s for s in order if len(s.output) > before[s.row]]
        if result.logprobs is not None:
            for s, logprob in zip(grown, result.logprobs.token_logprobs.tolist(), strict=True):
                logprobs[s.row].append(logprob)
    return [(s.output, logprobs[s.row]) for s in sequences]


@pytest.mark.parametrize("case", params((*ON_CPU, *ON_CUDA, *FP8_ON_CUDA)))
@pytest.mark.parametrize("family", slow_but(["qwen3", "mistral-windowed"], FAMILIES))
def test_a_family_generates_what_transformers_would(family: str, case: Case, tmp_path: pathlib.Path) -> None:
    model = save_small(family, tmp_path, case.dtype)
    assert_generates(model, case.runner(tmp_path), case)


def assert_generates(
    model: transformers.PreTrainedModel, runner: ModelRunner, case: Case, adapted: Sequence[transformers.PreTrainedModel] = ()
) -> None:
    """What the model would, within the tolerance of the case; and rows with adapters what the `adapted` ones would."""
    differences, same = [], 0
    for with_logprobs in (True, False):  # without them a graph chooses the tokens itself
        generated = generate(Driver(runner, chunk=16), with_logprobs, len(adapted))
        for at, (prompt, (output, logprobs)) in enumerate(zip(PROMPTS, generated, strict=True)):
            expected = reference_logprobs([model, *adapted][at % (1 + len(adapted))], prompt + output)[len(prompt) - 1 :]
            chosen = expected[np.arange(COUNT), output]
            differences.append(expected.max(-1) - chosen)  # 0 where the token is the reference's
            same += int((expected.argmax(-1) == output).sum())
            if with_logprobs:
                differences.append(np.abs(chosen - logprobs))
    runner.close()
    case.check(np.concatenate(differences))
    assert same >= case.tolerance.same * 2 * COUNT * len(PROMPTS)
