"""What one request does must not hold up the stream of another."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from slow_cases import NOT_IN_CI

from aengine import AsyncEngine, QueueFullError, SamplingParams, TokenStream

pytestmark = pytest.mark.anyio
MOST_CALLS = 200
"""Of functions, for each of the sequences that are submitted or cancelled: about 100 for the former and 60 for the latter."""


@pytest.fixture
def calls() -> Iterator[Counter[int]]:
    """How many calls of functions each thread has made, of this one and of those that begin: a measure of work that other processes of
    the machine do not change."""
    counts: Counter[int] = Counter()

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            counts[threading.get_ident()] += 1

    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(count)
    sys.setprofile(count)
    yield counts
    sys.setprofile(before[0])
    threading.setprofile(before[1])


async def most_calls(calls: Counter[int], stream: TokenStream, num_tokens: int, act: Callable[[], None]) -> int:
    """The most calls of all threads from `act` to the next token of `stream`, or between two of the next ones."""
    most, before = 0, calls.total()
    act()
    for _ in range(num_tokens):
        await stream.__anext__()
        now = calls.total()
        most, before = max(most, now - before), now
    return most


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("same_prompt", [False, True])
@NOT_IN_CI
async def test_many_sequences(same_prompt: bool, calls: Counter[int]) -> None:
    """Many requests with n=128 at once, which nobody reads; then all are cancelled at once."""
    streams: list[TokenStream] = []

    def submit() -> None:
        for i in range(60):
            params = SamplingParams(seed=i, n=128, max_tokens=64, ignore_eos=True)
            try:
                streams.append(engine.stream([5 if same_prompt else 5 + i] * 40, params))
            except QueueFullError:
                continue

    def cancel() -> None:
        for stream in streams:
            stream.cancel()

    async with AsyncEngine("demo", kv_cache_memory=128 << 20) as engine:
        async with engine.stream("It is a truth", SamplingParams(seed=1, ignore_eos=True)) as bystander:
            await bystander.__anext__()
            busy = await most_calls(calls, bystander, 60, submit)
            cancelling = await most_calls(calls, bystander, 5, cancel)
        assert len(streams) == 32, "as many as 4,096 sequences are"
        assert busy < MOST_CALLS * 4096
        assert cancelling < MOST_CALLS * 4096
