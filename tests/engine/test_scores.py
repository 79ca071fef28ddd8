"""`prompt_logprobs_from` and `score()`: of the end of a prompt is told what is told of it as a whole; its beginning is computed once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import transformers
from http_harness import serving_http

from aengine import LLM, AsyncEngine, InvalidRequestError, SamplingParams
from aengine.client import AsyncClient
from aengine.engine.tier_traffic import TierTraffic
from aengine.models.loading.hub import resolve_model

PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of"
CONTINUATIONS = [" a wife", " a wife.", " money", " a dog and of a cat", " nothing at all", [5, 6, 7]]
WHOLE = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "32MiB", "page_size": 4}


def test_scores_are_those_of_transformers() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model("demo"), dtype=torch.float32)
    with LLM("demo", **SETTINGS) as llm:
        own = llm.call(lambda engine: engine.tokenize(PROMPT))
        scores = llm.score(PROMPT, CONTINUATIONS, top_logprobs=1)
        for score, continuation in zip(scores, CONTINUATIONS, strict=True):
            ids = [each.token_id for each in score.tokens]
            given = [*own, *continuation] if isinstance(continuation, list) else llm.call(lambda e, t=PROMPT + continuation: e.tokenize(t))
            assert given[-len(ids) :] == ids
            assert given[: -len(ids)] == own[: len(given) - len(ids)]
            with torch.no_grad():
                logprobs = model(torch.tensor([given])).logits[0].float().log_softmax(-1)
            start = len(given) - len(ids)
            expected = [float(logprobs[at - 1, given[at]]) for at in range(start, len(given))]
            assert [each.logprob for each in score.tokens] == pytest.approx(expected, abs=1e-4)
            assert score.logprob == pytest.approx(sum(expected), abs=1e-3)
            assert score.is_greedy is all(int(logprobs[at - 1].argmax()) == given[at] for at in range(start, len(given)))
        cached = sorted(score.usage.cached_prompt_tokens for score in scores)
        assert cached[1:] == [(len(own) - 1) // 4 * 4] * 5 or cached[1] >= (len(own) - 2) // 4 * 4
        again = llm.score(PROMPT, CONTINUATIONS, top_logprobs=1)
        assert [score.tokens for score in again] == [score.tokens for score in scores]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"attention_backend": "torch_native"}, {"host_kv_memory": 8 << 20}],
    ids=["kernels", "chunks", "torch", "host"],
)
def test_what_is_told_is_what_is_told_of_all(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierTraffic, "_is_worth", lambda *given: True)

    async def run() -> None:
        async with AsyncEngine("demo", **SETTINGS, **options) as engine:
            ids = (await engine.tokenize(PROMPT)) * 3
            whole = (await engine.generate(ids, WHOLE)).prompt_logprobs
            assert whole is not None
            for first in (0, 1, 2, 4, 5, len(ids) // 2, len(ids) - 1, len(ids), len(ids) + 9):
                await engine.flush_cache()
                params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2, prompt_logprobs_from=first)
                for again in range(3):
                    found = await engine.generate(ids, params)
                    assert found.prompt_logprobs is not None
                    assert len(found.prompt_logprobs) == len(ids)
                    assert found.prompt_logprobs[:first] == (None,) * min(first, len(ids))
                    for told, known in zip(found.prompt_logprobs[max(first, 1) :], whole[max(first, 1) :], strict=True):
                        assert told is not None
                        assert known is not None
                        assert (told.token_id, told.rank) == (known.token_id, known.rank)
                        assert told.logprob == pytest.approx(known.logprob, abs=1e-4)
                    if again:
                        most = min(max(first - 1, 0), len(ids) - 1)
                        assert found.usage.cached_prompt_tokens == most // 4 * 4
            several = SamplingParams(max_tokens=4, prompt_logprobs=0, prompt_logprobs_from=40, n=3, seed=1)
            for output in await asyncio.gather(*(engine.generate(ids, several) for _ in range(3))):
                assert output.prompt_logprobs is not None
                assert [each is None for each in output.prompt_logprobs] == [at < 40 for at in range(len(ids))]

    asyncio.run(run())


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_over_the_wire(anyio_backend: str) -> None:
    async with AsyncEngine("demo", **SETTINGS) as engine:
        expected = await engine.score(PROMPT, CONTINUATIONS, top_logprobs=2)
        async with serving_http(engine, port=0) as serve, AsyncClient(serve.server.address) as client:
            found = await client.score(PROMPT, CONTINUATIONS, top_logprobs=2)
        for one, other in zip(found, expected, strict=True):
            assert [each.token_id for each in one.tokens] == [each.token_id for each in other.tokens]
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.anyio
async def test_what_is_refused() -> None:
    async with AsyncEngine("demo", **SETTINGS) as engine:
        with pytest.raises(InvalidRequestError, match=r"continuations\[1\]: has no token"):
            await engine.score(PROMPT, [" a", ""])
        with pytest.raises(InvalidRequestError, match="prompt: has no token"):
            await engine.score([], [" a"])
        with pytest.raises(InvalidRequestError, match="token id 99999999"):
            await engine.score([5], [[99999999]])
        assert await engine.score(PROMPT, []) == []
        assert engine.stats().running == 0
