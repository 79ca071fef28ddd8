"""The load itself: sends the items of a workload to a target and notes when chunks come back.

Owns times and order (arrivals, turns, the limit of requests at once); knows nothing of engines or protocols.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from aengine.bench.workload import Item


@dataclass(frozen=True, slots=True)
class Chunk:
    """What came at one moment."""

    num_tokens: int
    token_ids: tuple[int, ...] = ()  # where the target tells them


class Target(Protocol):
    """Whoever answers."""

    name: str

    def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[Chunk, None]:
        """Greedy generation of exactly so many tokens. Closing the generator cancels the request."""


@dataclass(slots=True)
class Outcome:
    """What became of one item. Times in seconds on time.perf_counter."""

    prompt_tokens: int
    sent: float
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        return sum(self.chunk_tokens)

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Between chunks: when a gap ended, and how long it was."""
        return [(after, after - before) for before, after in itertools.pairwise(self.chunk_times)]


def answered(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that did not fail."""
    return [outcome for outcome in outcomes if outcome.error is None and outcome.chunk_times]


def tokens_by_second(outcomes: Sequence[Outcome], start: float) -> Counter[int]:
    """How many tokens came in each whole second after `start`."""
    seconds = Counter[int]()
    for outcome in outcomes:
        for time_of, tokens in zip(outcome.chunk_times, outcome.chunk_tokens, strict=True):
            seconds[int(time_of - start)] += tokens
    return seconds


async def run_load(
    target: Target, items: Sequence[Item], *, max_concurrency: int | None = None, on_done: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Send every item at its time; returns the outcomes in the order of the items. An item that fails says so in its outcome."""
    gate = asyncio.Semaphore(max_concurrency or max(1, len(items)))
    start = time.perf_counter()
    done = [asyncio.Event() for _ in items]
    outcomes: list[Outcome | None] = [None] * len(items)
    prompts: list[tuple[int, ...]] = [item.prompt for item in items]

    async def one(index: int) -> None:
        item = items[index]
        try:
            if item.after is not None:
                await done[item.after].wait()
                before = outcomes[item.after]
                assert before is not None
                if item.continues:
                    prompts[index] = (*prompts[item.after], *before.token_ids, *item.prompt)
            delay = start + item.arrival - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            async with gate:
                outcome = outcomes[index] = await _measure(target, prompts[index], item.output_tokens)
            on_done(outcome)
        finally:
            done[index].set()

    await asyncio.gather(*(one(index) for index in range(len(items))))
    return [outcome for outcome in outcomes if outcome is not None]


async def _measure(target: Target, prompt: Sequence[int], output_tokens: int) -> Outcome:
    clock = time.perf_counter
    outcome = Outcome(len(prompt), clock())
    try:
        async with aclosing(target.send(prompt, output_tokens)) as chunks:
            async for chunk in chunks:
                outcome.chunk_times.append(clock())
                outcome.chunk_tokens.append(chunk.num_tokens)
                outcome.token_ids.extend(chunk.token_ids)
    except Exception as error:  # the run goes on, and the report counts it
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome
