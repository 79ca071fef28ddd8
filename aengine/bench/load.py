"""The load itself: sends the items of a workload to a target and notes when chunks come back.

Owns times and order (arrivals, turns, the limit of concurrent requests); knows nothing of engines or protocols.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from aengine.api.outputs import DraftUsage
from aengine.bench.workload import Item


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens that came at one moment."""

    num_tokens: int
    token_ids: tuple[int, ...] = ()  # empty where the target does not report them
    drafts: tuple[DraftUsage, ...] = ()  # of the whole request, in a last chunk without tokens


class Target(Protocol):
    """The engine or server that is measured."""

    name: str

    def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[Chunk, None]:
        """Generation of exactly so many tokens. Closing the generator cancels the request."""


@dataclass(slots=True)
class Outcome:
    """What became of one item. Moments in seconds on time.perf_counter, durations in milliseconds; durations need a chunk."""

    prompt_tokens: int
    sent: float
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    drafts: tuple[DraftUsage, ...] = ()
    error: str | None = None

    @property
    def completed(self) -> bool:
        return self.error is None and bool(self.chunk_times)

    @property
    def output_tokens(self) -> int:
        return sum(self.chunk_tokens)

    @property
    def ttft(self) -> float:
        return 1e3 * (self.chunk_times[0] - self.sent)

    @property
    def e2el(self) -> float:
        return 1e3 * (self.chunk_times[-1] - self.sent)

    @property
    def tpot(self) -> float:
        """0 where there is one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Between chunks: the moment at which a gap ended, and its duration."""
        return [(after, 1e3 * (after - before)) for before, after in itertools.pairwise(self.chunk_times)]


async def run_load(
    target: Target, items: Sequence[Item], *, max_concurrency: int | None = None, on_done: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Send every item at its time; returns the outcomes in the order of the items. An item that fails says so in its outcome."""
    gate = asyncio.Semaphore(max_concurrency or max(1, len(items)))
    start = time.perf_counter()
    tasks: list[asyncio.Task[tuple[tuple[int, ...], Outcome]]] = []

    async def run(item: Item) -> tuple[tuple[int, ...], Outcome]:
        """The whole prompt, and the outcome."""
        prompt = item.prompt
        if item.after is not None:
            prompt_before, before = await tasks[item.after]
            prompt = (*prompt_before, *before.token_ids, *prompt)
        await asyncio.sleep(max(0.0, start + item.arrival - time.perf_counter()))
        async with gate:
            outcome = await _send(target, prompt, item.output_tokens)
        on_done(outcome)
        return prompt, outcome

    tasks += [asyncio.create_task(run(item)) for item in items]
    return [outcome for _, outcome in await asyncio.gather(*tasks)]


async def _send(target: Target, prompt: Sequence[int], output_tokens: int) -> Outcome:
    clock = time.perf_counter
    outcome = Outcome(len(prompt), clock())
    try:
        async with aclosing(target.send(prompt, output_tokens)) as chunks:
            async for chunk in chunks:
                outcome.drafts = chunk.drafts
                if chunk.num_tokens:
                    outcome.chunk_times.append(clock())
                    outcome.chunk_tokens.append(chunk.num_tokens)
                    outcome.token_ids.extend(chunk.token_ids)
    except Exception as error:  # the run goes on, and the report counts it
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome
