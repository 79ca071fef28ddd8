"""What no figure of a request shows: the engine's log while it starts, how late the event loop wakes, how soon cancelled pages are free."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from aengine.api.params import SamplingParams

if TYPE_CHECKING:
    from aengine.engine.async_engine import AsyncEngine

LAG_INTERVAL = 0.005


@contextmanager
def start_up_log() -> Iterator[list[str]]:
    """A list that fills, while inside, with the messages of the package at level INFO and above, from all threads: which attention backend
    and why, graphs, memory. A figure means little without them."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("aengine")
    level = logger.level
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@asynccontextmanager
async def loop_lag() -> AsyncIterator[list[float]]:
    """A list that fills, while inside, with how many milliseconds late the loop woke up each time."""
    lags: list[float] = []

    async def sample() -> None:
        while True:
            due = time.perf_counter() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            lags.append(1e3 * (time.perf_counter() - due))

    task = asyncio.ensure_future(sample())
    try:
        yield lags
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def cancel_to_free(engine: AsyncEngine, prompt: list[int], times: int = 20) -> list[float]:
    """Milliseconds from `aclose()` of a stream in the middle of its output until its pages are free."""
    waits: list[float] = []
    for _ in range(times):
        stream = engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
        async for token in stream:
            if token.index == 0 and stream.usage.completion_tokens >= 4:
                break
        start = time.perf_counter()
        await stream.aclose()
        waits.append(1e3 * (time.perf_counter() - start))
    return waits
