"""What the scripts of engines have alike: their prompts, and how an engine is timed that computes step after step. They run in environments
without this package, beside this file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Protocol


class Stepping(Protocol):
    """An engine that requests are given to, and that computes a step of all of them when it is told to."""

    def add(self, ids: list[int], tokens: int) -> object: ...

    def step(self) -> float: ...

    def is_busy(self) -> bool: ...


def prompt(length: int, row: int = 0) -> list[int]:
    """The ids of a prompt, which differ by row."""
    return [10 + (at + 7 * row) % 4000 for at in range(length)]


def steps(engine: Stepping, given: dict[str, Any]) -> dict[str, float]:
    """The milliseconds of decode steps by number of rows, and of a prefill."""
    found = {}
    for rows in given["rows"]:
        for row in range(rows):
            engine.add(prompt(given["context"], row), given["repeats"] + 1)
        engine.step()  # the prompts, and each row's first token
        taken = []
        while engine.is_busy():
            taken.append(engine.step())
        found[str(rows)] = statistics.median(taken[2:])
    taken = []
    for _ in range(4):  # the first one may compile
        engine.add(prompt(given["prefill"]), 1)
        taken.append(engine.step())
    return {**found, "prefill": min(taken)}


def perplexity(logprobs: Sequence[float]) -> dict[str, float]:
    return {"perplexity": math.exp(-sum(logprobs) / len(logprobs))}
