"""Sessions of an engine: what of the history of a conversation was rewritten, and how many are known."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from grpc_harness import serving
from http_harness import serving_http
from oracle_engine import OracleEngine

from aengine import AsyncEngine, InvalidRequestError, Router, SamplingParams
from aengine.api import runtime
from aengine.chat import stream_chat
from aengine.client import AsyncClient

pytestmark = pytest.mark.anyio
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
PARAMS = SamplingParams(seed=9, max_tokens=20, ignore_eos=True)


async def test_what_was_rewritten_is_told() -> None:
    async with OracleEngine() as engine:
        first = await engine.generate(PROMPT, PARAMS, session="a")
        assert first.usage.rewritten_tokens == 0
        history = [*PROMPT, *first.token_ids]
        for seed, (prompt, session, rewritten) in enumerate(
            [
                ([*history, 4, 4], "a", 0),
                ([*history[:7], 49, 4], "b", 0),
                ([*history, 4], None, 0),
            ],
            10,
        ):
            usage = (await engine.generate(prompt, replace(PARAMS, seed=seed), session=session)).usage
            assert usage.rewritten_tokens == rewritten, session
        third = await engine.generate([*history[:7], 49, 4], replace(PARAMS, seed=20), session="a")
        assert third.usage.rewritten_tokens == len(history) + 2 + 20 - 1 - 7
        fourth = await engine.generate([*history[:7], 49], replace(PARAMS, seed=21), session="a", tenant="other")
        assert fourth.usage.rewritten_tokens == 0
        assert engine.stats().sessions == 3
        assert engine.stats().session_tokens > 0


async def test_only_so_many_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MOST_REMEMBERED", 2)
    async with OracleEngine() as engine:
        for number in range(3):
            await engine.generate(PROMPT, replace(PARAMS, seed=number), session=str(number))
        assert [(await engine.generate([5], replace(PARAMS, seed=7 + n), session=str(n))).usage.rewritten_tokens > 0 for n in (2, 0)] == [
            True,
            False,
        ]


@pytest.mark.parametrize("session", ["", "x" * 129, 5])
async def test_names(session: object) -> None:
    async with OracleEngine() as engine:
        with pytest.raises(InvalidRequestError, match="session: "):
            engine.stream(PROMPT, PARAMS, session=session)  # type: ignore[arg-type]


async def ids_of(engine: AsyncEngine, request_id: str) -> list[int]:
    """Of the prompt of a request that has ended, and of its output."""
    tokens = engine._started().registry._find_tokens(request_id)
    return [*tokens.prompt.tolist(), *tokens.outputs[0]]


DRAWN = SamplingParams(seed=4, temperature=1.3, max_tokens=24, min_tokens=24)
ENDS = [replace(DRAWN, min_tokens=23, logit_bias={token: 100.0}) for token in (4095, 4093)]
"""With the token that the template of the demo model writes behind an answer, and with another one that ends it."""


@pytest.mark.parametrize("params", [DRAWN, *ENDS])
@pytest.mark.parametrize("parsed", [False, True])
async def test_history_is_left_as_it_was(parsed: bool, params: SamplingParams) -> None:
    """Drawn at random, tokens are mostly not those that the tokenizer makes of their text."""
    async with AsyncEngine("demo", dtype="float32") as engine:

        async def turn(messages: list[dict[str, Any]], name: str, **fields: Any) -> tuple[str, int]:
            if not parsed:
                output = await engine.generate(messages, params, request_id=name, session="s", **fields)
                return output.text, output.usage.rewritten_tokens
            async with stream_chat(engine, messages, params, request_id=name, session="s", **fields) as stream:
                async for _ in stream:
                    pass
                return stream.message.content or "", stream.usage.rewritten_tokens

        messages: list[dict[str, Any]] = [{"role": "user", "content": "Who is Mr. Darcy?"}]
        answer, _ = await turn(messages, "a")
        first = await ids_of(engine, "a")
        said = [*messages, {"role": "assistant", "content": answer}]
        follow_up = [*said, {"role": "user", "content": "And Mr. Bingley?"}]
        assert (await turn(follow_up, "text"))[1] > 0
        rendered = (await ids_of(engine, "text"))[:-24]
        assert rendered[: len(first)] != first

        await turn(messages, "a-again")
        assert (await ids_of(engine, "a-again")) == first
        answer, rewritten = await turn(follow_up, "b", keep_history="ids")
        second = await ids_of(engine, "b")
        assert (second[: len(first) - 1], rewritten) == (first[:-1], 0)
        texts = [await engine.detokenize(ids, skip_special_tokens=False) for ids in (second[:-24], rendered)]
        assert texts[0] == texts[1]

        third = [*follow_up, {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
        assert (await turn(third, "c", keep_history="ids"))[1] == 0
        assert (await ids_of(engine, "c"))[: len(second) - 1] == second[:-1]

        for edited in (
            [{**third[0], "content": "x"}, *third[1:]],
            [*third[:3], {"role": "assistant", "content": "What was never said."}, third[4]],
            third[2:],
            third[:3],
        ):
            await turn(third, "again", keep_history="ids")
            await turn(edited, "edited", keep_history="ids")
            assert (await ids_of(engine, "edited"))[:-24] == list(await rendered_ids(engine, edited)), "it is another history"
        with pytest.raises(InvalidRequestError, match="keep_history: 'ids' is for a request with a session"):
            await engine.generate(messages, DRAWN, keep_history="ids")
        with pytest.raises(InvalidRequestError, match="keep_history: 'all' is not 'text' or 'ids'"):
            await engine.generate(messages, DRAWN, session="s", keep_history="all")


async def test_a_conversation_whose_list_goes_on_while_its_answer_is_read() -> None:
    async with AsyncEngine("demo", dtype="float32") as engine:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Who is Mr. Darcy?"}]
        stream = engine.stream(messages, DRAWN, session="s", request_id="a")
        await anext(stream)
        messages.append({"role": "assistant", "content": ""})
        async for _ in stream:
            pass
        messages[-1]["content"] = stream.completion().text
        first = await ids_of(engine, "a")
        messages.append({"role": "user", "content": "And Mr. Bingley?"})
        await engine.generate(messages, DRAWN, session="s", request_id="b", keep_history="ids")
        assert (await ids_of(engine, "b"))[: len(first)] == first


async def rendered_ids(engine: AsyncEngine, messages: list[dict[str, Any]]) -> list[int]:
    chat = await engine.render_chat(messages)
    return await engine.tokenize(chat.text, add_special_tokens=False, literals=chat.literals)


async def test_a_router_has_no_history() -> None:
    async with Router("demo", replicas=1, threads=1) as router:
        with pytest.raises(InvalidRequestError, match="keep_history: 'ids' is for the engine itself"):
            await router.generate([{"role": "user", "content": "x"}], DRAWN, session="s", keep_history="ids")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_history_is_kept_by_servers(door: str, anyio_backend: str) -> None:
    messages = [{"role": "user", "content": "Who is Mr. Darcy?"}]
    async with AsyncEngine("demo", dtype="float32") as engine, AsyncExitStack() as stack:
        if door == "http":
            serve = await stack.enter_async_context(serving_http(engine))
        else:
            server = (await stack.enter_async_context(serving(engine))).server
            client = await stack.enter_async_context(AsyncClient(server.address))

        async def turn(chat: list[dict[str, Any]], keep_history: str) -> tuple[dict[str, Any], int]:
            if door == "grpc":
                output = await client.generate(chat, DRAWN, session="s", keep_history=keep_history)
                return {"role": "assistant", "content": output.text}, output.usage.rewritten_tokens
            body = {"messages": chat, "seed": 4, "temperature": 1.3, "max_tokens": 24, "min_tokens": 24, "session": "s"}
            answer = (await serve.post("/v1/chat/completions", {**body, "keep_history": keep_history})).json()
            return answer["choices"][0]["message"], answer["usage"]["prompt_tokens_details"]["rewritten_tokens"]

        for keep_history in ("text", "ids"):
            answer, _ = await turn(messages, "text")
            _, rewritten = await turn([*messages, answer, {"role": "user", "content": "And Mr. Bingley?"}], keep_history)
            assert (rewritten == 0) is (keep_history == "ids")
