"""Forks: streams that go on from anywhere in another one bring what that one brings, and compute nothing again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import anyio
import pytest
from known_cases import check_forks, requests
from oracle_engine import OracleEngine, idle, step_with_the_loop, until
from slow_cases import slow_but
from speculating import also_with_drafts, demo
from speculation_cases import CONTEXT

from aengine import AsyncEngine, EngineStateError, ForkPoint, InvalidRequestError, SamplingParams, StructuredOutput
from aengine.api import runtime

pytestmark = pytest.mark.anyio
PROMPT = [1, 2, 3, 4, 5, 6]
PARAMS = SamplingParams(seed=9, max_tokens=60, ignore_eos=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("seed", "count"), slow_but([(1, 60)], [(1, 60), (2, 200)]))
async def test_random_requests(seed: int, count: int, speculation: bool) -> None:
    """In a crowd that is preempted: forks of streams that run and of those that have ended."""
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": CONTEXT, "page_size": 4, "max_num_batched_tokens": 128}
    memory = 100 * 20480 * (1 + speculation)  # the draft model is as large as the model
    async with demo(**options, adapters={"lora": "demo-lora"}, max_num_seqs=12, kv_cache_memory=memory) as engine:
        assert await check_forks(engine, requests(seed, count), seed, 8) > count // 2
        await until(lambda: idle(engine))


@pytest.mark.parametrize("at", [0, 1, 13, 16, 40])
async def test_a_fork_computes_what_it_brings(at: int) -> None:
    async with OracleEngine() as engine:
        step_with_the_loop(engine)
        stream = engine.stream(PROMPT, PARAMS)
        read = [await anext(stream) for _ in range(40)]
        fork = stream.fork(at)
        forked = [token.token_id async for token in fork]
        rest = [token.token_id async for token in stream]
        whole = [token.token_id for token in read] + rest
        assert forked == whole[at:]
        assert fork.usage.completion_tokens == 60
        assert engine.runner.num_computed == len(PROMPT) + 59 + (60 - at)  # of the fork the last token before it, and all but its last
        assert fork.usage.cached_prompt_tokens == len(PROMPT) - (at == 0)


async def test_a_fork_of_what_has_ended_finds_its_pages() -> None:
    async with OracleEngine() as engine:
        whole = (await engine.generate(PROMPT, PARAMS, request_id="a")).token_ids
        before = engine.runner.num_computed
        fork = engine.fork("a", 41)
        assert [token.token_id async for token in fork] == list(whole[41:])
        assert engine.runner.num_computed - before <= (60 - 41) + 4  # and a page that was not full
        assert (await engine.generate(ForkPoint("a", 59, same_params=True))).token_ids == whole[59:]


async def test_other_parameters_and_several_sequences() -> None:
    async with AsyncEngine("demo", dtype="float32") as engine:
        stream = engine.stream("Once upon a time", SamplingParams(seed=3, n=3, max_tokens=24, temperature=1.0))
        tokens: list[list[int]] = [[], [], []]
        async for token in stream:
            if token.token_id >= 0:
                tokens[token.index].append(token.token_id)
        second = tokens[1][:11]
        for params in (
            SamplingParams(seed=8, max_tokens=20, temperature=1.0, frequency_penalty=1.0),
            SamplingParams(seed=8, max_tokens=20, n=2, temperature=1.2, stop=("never",)),
            SamplingParams(max_tokens=40, temperature=0.0, logprobs=2, structured_output=StructuredOutput(regex="[A-Za-z ,.]{30}")),
        ):
            if params.structured_output is not None:
                second = []
            known = await engine.generate("Once upon a time", params, known_outputs=[second] * params.n)
            async with stream.fork(len(second), params, index=1) as fork:
                async for _ in fork:
                    pass
                found = fork.completion()
            assert (found.token_ids, found.text, found.finish_reason) == (known.token_ids, known.text, known.finish_reason)
            assert [one.token_ids for one in found.others] == [one.token_ids for one in known.others]
            assert found.usage.completion_tokens == known.usage.completion_tokens
        params = SamplingParams(seed=8, max_tokens=20, temperature=1.0)
        known = await engine.generate("Once upon a time", params, known_outputs=[[*tokens[1][:5], 70, 71]])
        async with stream.fork(5, params, index=1, then=[70, 71]) as fork:
            assert [token.token_id async for token in fork] == list(known.token_ids)
            assert fork.usage.completion_tokens == known.usage.completion_tokens
        with pytest.raises(InvalidRequestError, match="known_outputs: token id 1000000 is not in"):
            stream.fork(5, then=[1_000_000])


@also_with_drafts
async def test_rewinding() -> None:
    async with OracleEngine() as engine:
        stream = engine.stream(PROMPT, PARAMS, request_id="a")
        whole = [(await anext(stream)).token_id for _ in range(30)]
        stream.rewind(12)
        assert stream.request_id != "a"
        whole[12:] = [(await anext(stream)).token_id for _ in range(30)]
        stream.rewind(35, request_id="b")
        assert stream.request_id == "b"
        whole[35:] = [token.token_id async for token in stream]
        assert tuple(whole) == stream.completion().token_ids == tuple(engine.solo(9)[0])
        assert stream.usage.completion_tokens == 60
        await stream.aclose()
        stream.rewind(20)  # of one that has ended
        assert [token.token_id async for token in stream] == whole[20:]
        for to in (-1, 61):
            with pytest.raises(InvalidRequestError, match=rf"to: {to} is not in \[0, 60\]"):
                stream.rewind(to)
        await until(lambda: idle(engine))


async def test_rewinding_computes_nothing_again() -> None:
    async with OracleEngine() as engine:
        step_with_the_loop(engine)
        stream = engine.stream(PROMPT, PARAMS)
        for _ in range(30):
            await anext(stream)
        before = engine.runner.num_computed
        stream.rewind(21)
        async for _ in stream:
            pass
        assert engine.runner.num_computed - before <= 60 - 21 + 3  # and steps of the one in whose place it is, until it has begun


async def test_a_tree_holds_the_pages_of_its_tokens() -> None:
    """64 leaves, each a fork of another node."""
    rng = random.Random(1)
    async with OracleEngine(max_num_seqs=80, max_num_batched_tokens=200) as engine:
        endless = replace(PARAMS, max_tokens=None)
        root = engine.stream(PROMPT * 30, endless)
        for _ in range(40):
            await anext(root)
        streams = [root]
        for num_leaves in (8, 56):
            await engine.pause()
            places = [(stream, stream.usage.completion_tokens + stream.unread) for stream in streams]
            leaves = [parent.fork(most, endless) for parent, most in rng.choices(places, k=num_leaves)]
            await engine.unpause()
            for leaf in leaves:
                await anext(leaf)
            streams += leaves
        await engine.pause()
        distinct = len(PROMPT * 30) + sum(one.usage.completion_tokens + one.unread - one.known_lengths[0] for one in streams)
        assert engine.stats().running == 65
        assert engine.stats().pages_used <= distinct // 4 + 2 * len(streams)  # each has a page that begins and one that ends within it
        await engine.unpause()
        for stream in streams:
            await stream.aclose()


async def test_what_cannot_be_forked() -> None:
    async with OracleEngine() as engine:
        stream = engine.stream(PROMPT, PARAMS, request_id="a", cache_salt="x")
        await anext(stream)
        for at in (-1, 2000):
            with pytest.raises(InvalidRequestError, match=f"at: {at} is not in "):
                stream.fork(at)
        for index in (-1, 1):
            with pytest.raises(InvalidRequestError, match=f"index: {index} is"):
                stream.fork(index=index)
        for name, value in {"cache_salt": "y", "adapter": "z", "known_outputs": [[1]], "images": [b""]}.items():
            with pytest.raises(InvalidRequestError, match=f"{name}: "):
                engine.fork("a", **{name: value})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="tools: it is for chat messages, and the prompt is a fork"):
            engine.fork("a", tools=[{}])
        with pytest.raises(InvalidRequestError, match="prompt: request 'nobody' is not known, or has ended too long ago"):
            engine.fork("nobody")
        with pytest.raises(InvalidRequestError, match="prompt: it is a fork, and an embedding has no output"):
            await engine.embed(ForkPoint("a"))
        assert engine.fork("a", 0, cache_salt="x").request_id not in ("a", None)
        several = engine.stream(PROMPT, replace(PARAMS, n=2))
        with pytest.raises(InvalidRequestError, match="to: a stream of several sequences"):
            several.rewind(0)


async def test_before_the_prompt_is_known() -> None:
    async with AsyncEngine("demo") as engine:
        stream = engine.stream("Once upon a time " * 200, PARAMS, request_id="a")  # which a thread tokenizes
        with pytest.raises(EngineStateError, match="its prompt is not tokenized yet"):
            stream.fork(0)
        with pytest.raises(InvalidRequestError, match="its prompt is not tokenized yet"):
            engine.fork("a")
        await stream.started()
        async with stream.fork(0) as fork:
            assert (await anext(fork)).token_id == (await anext(stream)).token_id


async def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MOST_REMEMBERED", 3)
    async with OracleEngine() as engine:
        for number in range(5):
            await engine.generate(PROMPT, replace(PARAMS, max_tokens=2), request_id=str(number))
        assert [number for number in range(5) if _is_known(engine, str(number))] == [2, 3, 4]
    monkeypatch.setattr(runtime, "REMEMBERED_BYTES", 4 * (len(PROMPT) + 2))
    async with OracleEngine() as engine:
        for number in range(2):
            await engine.generate(PROMPT, replace(PARAMS, max_tokens=2), request_id=str(number))
        assert not _is_known(engine, "0")


def _is_known(engine: AsyncEngine, request_id: str) -> bool:
    try:
        engine.fork(request_id, 0).cancel()
    except InvalidRequestError:
        return False
    return True


async def test_the_source_ends_while_the_fork_waits() -> None:
    """Then its pages are found in the cache, or computed again."""
    async with OracleEngine(max_num_seqs=1) as engine:
        stream = engine.stream(PROMPT, PARAMS)
        for _ in range(10):
            await anext(stream)
        fork = stream.fork(7)  # there is no row for it
        with anyio.fail_after(30):
            assert [token.token_id async for token in stream][-1] == engine.solo(9)[0][-1]
            assert [token.token_id async for token in fork] == engine.solo(9)[0][7:]


async def test_rewinding_where_there_is_one_row() -> None:
    async with OracleEngine(max_num_seqs=1) as engine:
        step_with_the_loop(engine)
        stream = engine.stream(PROMPT, PARAMS)
        read = [(await anext(stream)).token_id for _ in range(20)]
        stream.rewind(9)
        with anyio.fail_after(30):
            assert read[:9] + [token.token_id async for token in stream] == engine.solo(9)[0]
        await until(lambda: idle(engine))
