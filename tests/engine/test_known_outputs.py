"""Requests that begin with output they have: what comes is what the undisturbed request would have brought behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from known_cases import check_rests, requests
from oracle_engine import idle
from slow_cases import slow_but
from speculating import demo
from speculation_cases import CONTEXT, TEXTS

from aengine import (
    AsyncEngine,
    Completion,
    ContextLengthError,
    FinishReason,
    InvalidRequestError,
    QueueFullError,
    Reasoning,
    SamplingParams,
    StructuredOutput,
)
from aengine.chat import stream_chat

pytestmark = pytest.mark.anyio
SIZES: dict[str, Any] = {"dtype": "float32", "max_model_len": CONTEXT, "page_size": 4, "max_num_batched_tokens": 128}
PAGE_BYTES = 20480
PARAMS = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)

YES_OR_NO = StructuredOutput(choice=("yes", "no"))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("seed", "count"), slow_but([(1, 100)], [(1, 100), (2, 300)]))
async def test_random_requests(seed: int, count: int, speculation: bool) -> None:
    """In a crowd that is preempted."""
    pytest.importorskip("llguidance")
    memory = 50 * PAGE_BYTES * (1 + speculation)  # the draft model is as large as the model
    async with demo(**SIZES, adapters={"lora": "demo-lora"}, max_num_seqs=8, kv_cache_memory=memory) as engine:
        assert await check_rests(engine, engine, requests(seed, count), seed, 12) > count // 2
        assert engine.stats().preemptions
        assert idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), slow_but([(11, 15)], [(11, 15), (12, 80)]))
async def test_with_the_torch_executor(seed: int, count: int) -> None:
    """What another engine has begun."""
    pytest.importorskip("llguidance")
    options = {**SIZES, "attention_backend": "torch_native", "adapters": {"lora": "demo-lora"}, "kv_cache_memory": 32 << 20}
    async with AsyncEngine("demo", **options) as begins, AsyncEngine("demo", **options) as engine:
        assert engine.model_info.executor == "torch"
        assert await check_rests(begins, engine, requests(seed, count), seed, 4)


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", **SIZES, kv_cache_memory=32 << 20) as running:
        yield running


async def rest_of(engine: AsyncEngine, params: SamplingParams, *cuts: int | None, prompt: str = TEXTS[0]) -> tuple[Completion, Completion]:
    """A request as a whole, and its rest when its sequences are cut there; None: this one has ended."""
    whole = await engine.generate(prompt, params)
    known = [None if at is None else one.token_ids[:at] for at, one in zip(cuts, (whole, *whole.others), strict=True)]
    return whole, await engine.generate(prompt, params, known_outputs=known)


async def test_sequences_that_have_ended_get_nothing(engine: AsyncEngine) -> None:
    """The first that goes on takes the place of the first: it brings the logprobs of the prompt, and the others share its pages."""
    params = replace(PARAMS, n=4, prompt_logprobs=2)
    before = engine.stats()
    whole, rest = await rest_of(engine, params, None, 7, None, 12)
    assert rest.prompt_logprobs == whole.prompt_logprobs
    assert [one.token_ids for one in (rest, *rest.others)] == [(), whole.others[0].token_ids[7:], (), whole.others[2].token_ids[12:]]
    assert [one.finish_reason for one in (rest, *rest.others)] == [None, FinishReason.MAX_TOKENS] * 2
    assert rest.usage.completion_tokens == 60
    stats = engine.stats()
    assert stats.completion_tokens - before.completion_tokens == 120 + 60 - 7 - 12, "only what is computed here"
    assert stats.prompt_tokens - before.prompt_tokens == 2 * whole.usage.prompt_tokens
    assert idle(engine)


async def test_a_stream_left_early(engine: AsyncEngine) -> None:
    params = replace(PARAMS, n=3, max_tokens=None)
    async with engine.stream(TEXTS[0], params, known_outputs=[[5], None, []]) as stream:
        assert {(await stream.__anext__()).index for _ in range(12)} == {0, 2}
        info = engine.request_info(stream.request_id)
        assert info is not None
        assert info.usage.completion_tokens >= 13
        await stream.aclose()
        assert [token.index async for token in stream] == [0, 2]
        completion = stream.completion()
    cancelled = FinishReason.CANCELLED
    assert [one.finish_reason for one in (completion, *completion.others)] == [cancelled, None, cancelled]
    assert idle(engine)


async def test_text_that_was_held_back_comes_with_the_rest(engine: AsyncEngine) -> None:
    """A stop string that began in the known tokens, and one that turned out to be none."""
    whole = await engine.generate(TEXTS[0], PARAMS)
    texts = [engine.tokenizer.decode(list(whole.token_ids[:count])) for count in range(len(whole.token_ids))]
    at = len(texts[11]) - 1  # within the eleventh token
    for stop in (whole.text[at : at + 6], whole.text[at : at + 6] + "\x00"):
        params = replace(PARAMS, stop=(stop,))
        stopped, rest = await rest_of(engine, params, 11)
        expected = (FinishReason.STOP_STRING, stop) if stop in whole.text else (FinishReason.MAX_TOKENS, None)
        assert (rest.finish_reason, rest.stop_reason) == expected
        assert rest.text == stopped.text[len(texts[11]) - 1 :]
        assert rest.token_ids == stopped.token_ids[11:]


async def test_the_budget_of_reasoning_counts_known_tokens(engine: AsyncEngine) -> None:
    pytest.importorskip("llguidance")
    thinks = Reasoning(closing="</think>", opened=True, max_tokens=12)
    for params in (
        replace(PARAMS, reasoning=thinks),
        replace(PARAMS, ignore_eos=False, reasoning=thinks, structured_output=StructuredOutput(regex="[a-z]{40}")),
        replace(PARAMS, reasoning=replace(thinks, max_tokens=None, closing="e")),
    ):
        for at in (1, 11, 13):
            whole, rest = await rest_of(engine, params, at)
            assert rest.token_ids == whole.token_ids[at:]
            assert rest.usage == replace(whole.usage, cached_prompt_tokens=rest.usage.cached_prompt_tokens)
            assert rest.usage.reasoning_tokens > 1


async def test_a_context_that_is_nearly_full(engine: AsyncEngine) -> None:
    params = replace(PARAMS, max_tokens=None)
    whole = await engine.generate([5] * 100, params)
    assert len(whole.token_ids) == CONTEXT - 100
    rest = await engine.generate([5] * 100, params, known_outputs=[whole.token_ids[:-1]])
    assert (rest.token_ids, rest.finish_reason) == (whole.token_ids[-1:], FinishReason.CONTEXT_LENGTH)
    with pytest.raises(ContextLengthError) as refused:
        await engine.generate([5] * 100, params, known_outputs=[whole.token_ids])
    assert (refused.value.field, refused.value.limit, refused.value.got) == ("known_outputs", CONTEXT, CONTEXT + 1)
    with pytest.raises(ContextLengthError) as refused:
        await engine.generate("a b " * 25, params, known_outputs=[[5] * 100])
    assert refused.value.field == "known_outputs"


@pytest.mark.parametrize(
    ("known", "params", "reason"),
    [
        ([], {}, "0 entries are not one for each of 1 sequences"),
        ([[1], [2]], {}, "2 entries are not one for each of 1 sequences"),
        ([[1]], {"n": 2}, "1 entries are not one for each of 2 sequences"),
        ([None, None], {"n": 2}, "every sequence has ended"),
        ([[1, 4096]], {}, "token id 4096 is not in [0, 4095]"),
        ([[-1]], {}, "from -1 to -1"),
        ([[1.5]], {}, "entry 0, [1.5] is not a list of token ids or None"),
        ([7], {}, "entry 0, 7 is not a list of token ids or None"),
        ("ab", {}, "'ab' is not a list"),
        ([[1] * 30], {}, "an entry of 30 tokens is not below max_tokens (30)"),
        ([[1, 4093]], {"ignore_eos": False}, "entry 0: token 4093 ends it"),
        ([[], [1, 9]], {"n": 2, "stop_token_ids": (9,)}, "entry 1: token 9 ends it"),
        ([[1] * 29], {"stop": ("\x22\x22",)}, "entry 0: its text has the stop string"),
        (
            [[1] * 3],
            {"ignore_eos": False, "structured_output": YES_OR_NO},
            "entry 0: token 1 does not match the grammar",
        ),
        (
            [[1] * 5],
            {"reasoning": Reasoning(closing="</think>", opened=True, max_tokens=3)},
            "entry 0: token 1 is not what closes the reasoning",
        ),
    ],
)
async def test_what_is_refused(engine: AsyncEngine, known: Any, params: dict[str, Any], reason: str) -> None:
    pytest.importorskip("llguidance")
    async with engine.stream(TEXTS[0], PARAMS) as other:
        with pytest.raises(InvalidRequestError) as refused:
            await engine.stream(TEXTS[0], replace(PARAMS, **params), known_outputs=known).started()
        assert refused.value.field == "known_outputs"
        assert reason in str(refused.value)
        assert len([token async for token in other]) == PARAMS.max_tokens
    assert idle(engine)


async def test_what_cannot_go_on(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError, match="known_outputs: an embedding has no output"):
        await engine.embed("a", known_outputs=[[1]])
    with pytest.raises(InvalidRequestError, match="known_outputs: is not possible where outputs are parsed"):
        stream_chat(engine, [{"role": "user", "content": "a"}], known_outputs=[[1]])


async def test_known_tokens_count_as_queued(engine: AsyncEngine) -> None:
    async with AsyncEngine("demo", **SIZES, kv_cache_memory=32 << 20, max_queued_tokens=60) as small:
        await small.pause()
        params = replace(PARAMS, n=2)
        async with small.stream([5] * 10, params, known_outputs=[None, [6] * 25]):
            with pytest.raises(QueueFullError, match="35 tokens wait already; 35 more"):
                small.stream([5] * 10, params, known_outputs=[[6] * 25, None])
            async with small.stream([5] * 10, params, known_outputs=[[6] * 15, None]):
                await small.unpause()
        assert idle(small)
        await small.generate([5] * 50, PARAMS)


async def test_min_tokens_count_known_tokens(engine: AsyncEngine) -> None:
    params = replace(PARAMS, ignore_eos=False, logit_bias={4093: 100.0}, min_tokens=12)
    whole, rest = await rest_of(engine, params, 5)
    assert len(whole.token_ids) == 13
    assert (rest.token_ids, rest.finish_reason) == (whole.token_ids[5:], FinishReason.EOS)


async def test_cached_tokens_are_those_of_the_prompt(engine: AsyncEngine) -> None:
    """The whole has left pages of its output, too."""
    whole, rest = await rest_of(engine, PARAMS, 20, prompt=TEXTS[1])
    assert rest.usage.cached_prompt_tokens == rest.usage.prompt_tokens == whole.usage.prompt_tokens
