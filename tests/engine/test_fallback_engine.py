"""The demo model in the code of transformers gives what the native one gives, whatever is asked for; in process and over gRPC."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest
from server_process import server_process

from aengine import AsyncEngine, Completion, SamplingParams, StructuredOutput
from aengine.client import AsyncClient

PROMPTS = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "The",
    "It was a dark and stormy night when the carriage stopped before the inn",
    "She said nothing, and he",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
REQUESTS = [
    GREEDY,
    replace(GREEDY, logprobs=3, prompt_logprobs=2),
    replace(GREEDY, repetition_penalty=1.3, bad_words=("the",)),
    SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=32, structured_output=StructuredOutput(regex="[a-z]{3,9}, [0-9]{4}")),
]
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


@asynccontextmanager
async def demo(model_impl: str) -> AsyncIterator[AsyncEngine]:
    sizes = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "page_size": 4, "kv_cache_memory": 16 << 20}
    async with AsyncEngine("demo", dtype="float32", model_impl=model_impl, **sizes) as engine:
        yield engine


async def all_of(engine: AsyncEngine) -> dict[tuple[int, int], Completion]:
    """Every request for every prompt, all at once."""
    results: dict[tuple[int, int], Completion] = {}

    async def run(prompt: int, request: int) -> None:
        results[prompt, request] = await engine.generate(PROMPTS[prompt], REQUESTS[request])

    async with anyio.create_task_group() as group:
        for prompt in range(len(PROMPTS)):
            for request in range(len(REQUESTS)):
                group.start_soon(run, prompt, request)
    return results


@pytest.mark.slow
async def test_the_engine_gives_what_the_native_one_gives(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="aengine")
    async with demo("native") as engine:
        expected = await all_of(engine)
    async with demo("transformers") as engine:
        assert (engine.model_info.implementation, engine.model_info.executor) == ("transformers", "torch")
        found = await all_of(engine)
        again = await engine.generate(PROMPTS[0], GREEDY)
    assert "runs in the code of transformers, without our CPU stack and fused operations, which is slower (asked for)" in caplog.text
    assert "the self-check took" in caplog.text
    assert again.usage.cached_prompt_tokens > 0
    assert again.token_ids == expected[0, 0].token_ids
    for key, completion in expected.items():
        assert found[key].token_ids == completion.token_ids, key
        assert found[key].finish_reason == completion.finish_reason
        for ours, theirs in ((found[key].logprobs, completion.logprobs), (found[key].prompt_logprobs, completion.prompt_logprobs)):
            assert (ours is None) == (theirs is None)
            numbers = [[one and one.logprob for one in each or ()] for each in (ours, theirs)]
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)


@pytest.mark.slow
async def test_the_server_takes_the_flag() -> None:
    async with demo("native") as engine:
        expected = await engine.generate(PROMPTS[0], GREEDY)
    with server_process("--model-impl", "transformers", "--dtype", "float32") as server:
        async with AsyncClient(server.address) as client:
            assert (await client.generate(PROMPTS[0], GREEDY)).token_ids == expected.token_ids
            assert client.model_info.implementation == "transformers"
