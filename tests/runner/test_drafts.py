"""Drafts change nothing of what a model's sequences get: neither tokens nor logprobs, whatever the drafts are."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from driver import GREEDY, demo_runner

from aengine.runner.model_runner import ModelRunner
from aengine.scheduler.plan import RowParams, TokenLogprobs
from aengine.scheduler.request import Request, SchedulerConfig
from aengine.scheduler.scheduler import Scheduler

NUM_PROMPTS = 12


def random_params(rng: random.Random, seed: int) -> RowParams:
    params = GREEDY if rng.random() < 0.3 else replace(GREEDY, temperature=rng.choice([0.3, 1.0, 1.5]), seed=seed)
    for changes in (
        {"top_k": rng.choice([1, 5, 100])},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"logprobs": rng.choice([0, 2])},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.3},
        {"logit_bias": ((rng.randrange(100), 4.0),)},
        {"bad_words": ((rng.randrange(100), rng.randrange(100)), (rng.randrange(100),))},
        {"min_tokens": 6, "stop_ids": (rng.randrange(100),)},
        {"processors": (no_repeat,)},
    ):
        if rng.random() < 0.2:
            params = replace(params, **changes)
    return params


def no_repeat(tokens: list[int], logits: np.ndarray) -> np.ndarray:
    """A custom processor: not the same token twice in a row."""
    if tokens:
        logits[tokens[-1]] = -np.inf
    return logits
