"""The load and its figures, on targets that are scripts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence

import pytest

from aengine.api.outputs import DraftUsage
from aengine.bench.load_run import Item, LengthRange, Lengths, RequestOutcome, TokenChunk, multi_turn, run_load
from aengine.bench.report import Speculation, show_summary, summarise

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Echo:
    """Answers with the length of the prompt, again and again."""

    name = "echo"

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.running = self.peak = 0

    async def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[TokenChunk, None]:
        self.prompts.append(tuple(prompt))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            for _ in range(output_tokens):
                await asyncio.sleep(0)
                yield TokenChunk(1, (len(prompt),))
        finally:
            self.running -= 1


async def test_a_turn_repeats_the_conversation() -> None:
    echo = Echo()
    items = multi_turn(Lengths(1, LengthRange(2, 2), LengthRange(3, 3), 100), num_turns=3)
    outcomes = await run_load(echo, items)
    assert [outcome.prompt_tokens for outcome in outcomes] == [2, 7, 12]
    assert echo.prompts[1] == (*items[0].prompt, 2, 2, 2, *items[1].prompt)
    assert echo.prompts[2] == (*echo.prompts[1], 7, 7, 7, *items[2].prompt)


@pytest.mark.parametrize(("limit", "peak"), [(1, 1), (3, 3), (None, 8)])
async def test_the_limit_of_requests_at_once_is_kept(limit: int | None, peak: int) -> None:
    echo = Echo()
    await run_load(echo, [Item((1,), 5)] * 8, max_concurrency=limit)
    assert echo.peak == peak


async def test_a_failure_is_an_outcome() -> None:
    class Broken(Echo):
        async def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[TokenChunk, None]:
            yield TokenChunk(1)
            if prompt[0] == 1:
                raise RuntimeError("no")

    outcomes = await run_load(Broken(), [Item((0,), 1), Item((1,), 1)])
    assert [outcome.error for outcome in outcomes] == [None, "RuntimeError: no"]
    summary = summarise(outcomes)
    assert (summary.completed, summary.failed, dict(summary.errors)) == (1, 1, {"RuntimeError: no": 1})


def test_figures_by_their_definitions() -> None:
    first = RequestOutcome(10, sent=0.0, chunk_times=[0.5, 0.6, 0.8], chunk_tokens=[1, 2, 1])
    second = RequestOutcome(20, sent=1.0, chunk_times=[1.25], chunk_tokens=[1])
    summary = summarise([first, second], {"ttft": 300.0})
    assert summary.duration == pytest.approx(1.25)
    assert (summary.prompt_tokens, summary.output_tokens) == (30, 5)
    assert summary.output_tokens_per_second == pytest.approx(4.0)
    assert summary.total_tokens_per_second == pytest.approx(28.0)
    assert summary.requests_per_second == pytest.approx(1.6)
    assert summary.ttft.median == pytest.approx(375.0)
    assert (summary.itl.mean, summary.itl.maximum) == (pytest.approx(150.0), pytest.approx(200.0))
    assert summary.tpot.mean == pytest.approx(100.0)  # the request with one token is left out
    assert summary.e2el.maximum == pytest.approx(800.0)
    assert summary.goodput == pytest.approx(0.8)
    assert summary.tokens_per_chunk == pytest.approx(1.25)
    assert summary.peak_concurrency == 1
    assert summary.peak_output_tokens_per_second == 4


def test_nothing_measured_is_no_error() -> None:
    summary = summarise([RequestOutcome(1, 0.0, error="x")])
    assert summary.completed == 0
    assert math.isnan(summary.ttft.mean)


async def test_drafts_of_requests_are_summed() -> None:
    class Drafting(Echo):
        async def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[TokenChunk, None]:
            async for chunk in super().send(prompt, output_tokens):
                yield chunk
            yield TokenChunk(0, drafts=(DraftUsage("ngram", 1, 4, prompt[0]), DraftUsage("grammar", 1, 1, 1)))

    outcomes = await run_load(Drafting(), [Item((2,), 5), Item((1,), 5)])
    assert [len(outcome.chunk_times) for outcome in outcomes] == [5, 5]
    summary = summarise(outcomes)
    assert summary.speculation == Speculation((DraftUsage("ngram", 2, 8, 3), DraftUsage("grammar", 2, 2, 2)), 10 / 5, 1 + 5 / 4)
    line = "  drafts: ngram 8 tokens, 38 % right; grammar 2 tokens, 100 % right; tokens per step 2.00, with drafts 2.25"
    assert line in show_summary("x", summary).splitlines()
    assert summarise([RequestOutcome(1, 0.0, [1.0], [1])]).speculation is None
