"""What no figure of a request shows: the engine's log while it starts, how late the event loop wakes, how soon cancelled pages are free.

Time from the start of a process to its first token: `aengine-bench startup`. Each run is a process of its own, as a user starts one."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
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


_PROGRAM = """
import json, sys, time
import anyio
from aengine import AsyncEngine, EngineConfig, SamplingParams

async def main(settings, prompt):
    imported = time.time()
    async with AsyncEngine(EngineConfig(**settings)) as engine:
        ready = time.time()
        async for _ in engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)):
            break
        first = time.time()
    print(json.dumps({"ready": ready, "first_token": first, "closed": time.time()}))

anyio.run(main, *json.loads(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class StartUp:
    """Seconds after the start of the process."""

    ready: float
    first_token: float
    exited: float


def measure_startup(settings: dict[str, object], prompt_tokens: int, runs: int) -> Sequence[StartUp]:
    """`settings`: fields of `EngineConfig`. The first run may find cold file caches. Raises RuntimeError with the last line that a
    failed run wrote."""
    results: list[StartUp] = []
    prompt = [10 + i % 50 for i in range(prompt_tokens)]
    for _ in range(runs):
        start = time.time()
        done = subprocess.run([sys.executable, "-c", _PROGRAM, json.dumps([settings, prompt])], capture_output=True, text=True)
        exited = time.time() - start
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}")
        moments = json.loads(done.stdout.splitlines()[-1])
        results.append(StartUp(moments["ready"] - start, moments["first_token"] - start, exited))
    return results
