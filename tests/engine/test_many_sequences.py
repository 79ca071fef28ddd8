"""What one request does must not hold up the stream of another."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from aengine import AsyncEngine, QueueFullError, SamplingParams, TokenStream

pytestmark = pytest.mark.anyio


def yardstick() -> float:
    """What others may add to a silence: the CPU seconds of a fixed amount of Python, about 0.4 on a fast machine."""
    before = time.process_time()
    count = 12_000_000
    while count:
        count -= 1
    return time.process_time() - before


async def longest_silence(stream: TokenStream, num_tokens: int, act: Callable[[], None] = lambda: None) -> float:
    """The most that this process works from `act` to the next token of `stream`, or between two of the next ones: in seconds of its own
    CPU time, which other processes of the machine do not change."""
    longest = 0.0
    before = time.process_time()
    act()
    for _ in range(num_tokens):
        await stream.__anext__()
        now = time.process_time()
        longest = max(longest, now - before)
        before = now
    return longest


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("same_prompt", [False, True])
async def test_many_sequences(same_prompt: bool) -> None:
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
            more = yardstick()
            quiet = await longest_silence(bystander, 40)
            busy = await longest_silence(bystander, 60, submit)
            cancelling = await longest_silence(bystander, 5, cancel)
        assert len(streams) == 32, "as many as 4,096 sequences are"
        assert busy < quiet + more
        assert cancelling < quiet + more
