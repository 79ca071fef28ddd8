"""OpenAI's Python client against the HTTP door, as it comes: tools, structured output, logprobs, errors, retries, clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from chat_engine import CALL, TOOL, TURN, ChatEngine
from fake_engine import FakeEngine, tokens
from http_harness import Serving, serving_http

from aengine import AsyncEngine, SamplingParams
from aengine.api.errors import EngineDeadError, QueueFullError, RequestIdInUseError

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "How is it?"}]
TOOLS: Any = [{"type": "function", "function": TOOL}]
NO_SUCH_KEY = "none"


class Weather(pydantic.BaseModel):
    """What has no text that is as long as the model likes."""

    kind: Literal["sun", "rain"]
    warm: bool


@asynccontextmanager
async def client_of(serve: Serving, *, retries: int = 0, between: Callable[[Any], None] | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    """`between` is called with every response that the client is to try again after, which it does at once."""

    async def look(response: Any) -> None:
        if response.is_error and between is not None:
            between(response)
            response.headers["retry-after-ms"] = "1"

    transport = openai.DefaultAsyncHttpxClient(event_hooks={"response": [look]})
    address = f"http://{serve.server.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=address, api_key=NO_SUCH_KEY, max_retries=retries, http_client=transport) as client:
        yield client


async def test_a_turn_with_tools_and_the_next_one() -> None:
    engine = ChatEngine(TURN)
    async with serving_http(engine) as serve, client_of(serve) as client:
        async with client.chat.completions.stream(model="fake", messages=MESSAGES, tools=TOOLS) as stream:
            events = [event async for event in stream]
            streamed = (await stream.get_final_completion()).choices[0]
        whole = (await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)).choices[0]
        for choice in (streamed, whole):
            (call,) = choice.message.tool_calls or ()
            assert call.type == "function"
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I shall look.")
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bath"})
            assert choice.message.model_extra is not None
            assert choice.message.model_extra["reasoning_content"] == "Where is it?"
        (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert (done.name, json.loads(done.arguments)) == ("weather", {"city": "Bath"})
        assert "".join(event.delta for event in events if event.type == "content.delta") == "I shall look."
        engine.write("Rain.")
        told = [*MESSAGES, whole.message.model_dump(), {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "rain"}]  # type: ignore[index]
        after = await client.chat.completions.create(model="fake", messages=told, tools=TOOLS)
        assert after.choices[0].message.content == "Rain."
    _, said, result = engine.messages
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bath"}}
    assert (result["role"], result["name"], result["content"]) == ("tool", "weather", "rain")


async def test_calls_of_responses_and_the_next_turn() -> None:
    engine = ChatEngine(TURN + CALL)
    tools: Any = [{"type": "function", "strict": False, **TOOL}]
    async with serving_http(engine) as serve, client_of(serve) as client:
        async with client.responses.stream(model="fake", input="How is it?", tools=tools) as stream:
            async for _ in stream:
                pass
            response = await stream.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Bath"}] * 2
        assert response.output_text == "I shall look."
        engine.write("Rain.")
        results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
        given: Any = [*MESSAGES, *(item.model_dump() for item in response.output), *results]
        assert (await client.responses.create(model="fake", input=given, tools=tools)).output_text == "Rain."
    assert [message["role"] for message in engine.messages] == ["user", "assistant", "tool", "tool"]


async def test_structured_output_and_logprobs() -> None:
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine, serving_http(engine) as serve, client_of(serve) as client:
        parsed = await client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Weather, seed=1)
        assert parsed.choices[0].message.parsed is not None
        answer = await client.responses.parse(model="demo", input="How is it?", text_format=Weather)
        assert answer.output_parsed is not None
        tool = openai.pydantic_function_tool(Weather)
        forced: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        called = await client.chat.completions.parse(model="demo", messages=MESSAGES, **forced)
        assert isinstance((called.choices[0].message.tool_calls or [])[0].function.parsed_arguments, Weather)
        expected = await engine.generate(MESSAGES, SamplingParams(temperature=0, max_tokens=5, logprobs=2))
        asked: Any = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 5, "logprobs": True}
        stream = await client.chat.completions.create(**asked, top_logprobs=2, stream=True)
        entries = [entry async for chunk in stream for entry in chunk.choices[0].logprobs.content or ()]
        known = expected.logprobs or ()
        assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in known], rel=1e-3)
        assert [len(entry.top_logprobs) for entry in entries] == [2] * len(known)
        cut = client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Weather, max_completion_tokens=1)
        with pytest.raises(openai.LengthFinishReasonError):
            await cut


async def test_errors_are_the_exceptions_that_the_client_has_for_them(tmp_path: Path) -> None:
    engine = ChatEngine()
    async with serving_http(engine) as serve, client_of(serve, retries=2) as client:

        async def fails(kind: type[openai.APIStatusError], **fields: Any) -> openai.APIStatusError:
            with pytest.raises(kind) as caught:
                await client.with_options(max_retries=0).chat.completions.create(**{"model": "fake", "messages": MESSAGES, **fields})
            assert caught.value.request_id
            return caught.value

        wrong = await fails(openai.BadRequestError, messages=[{"role": "user", "content": [{"type": "input_audio"}]}])
        assert (wrong.param, wrong.code, wrong.type) == ("messages[0].content[0].type", "invalid_field", "invalid_request_error")
        assert (await fails(openai.NotFoundError, model="gpt")).code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.fine_tuning.jobs.list()
        for raised, kind in ((QueueFullError("full"), openai.RateLimitError), (ZeroDivisionError("no"), openai.InternalServerError)):
            engine.refusal = raised
            await fails(kind)
        engine.refusal = RequestIdInUseError(())
        with pytest.raises(openai.ConflictError):
            await client.chat.completions.create(model="fake", messages=MESSAGES)  # is not tried again, which would take seconds
        engine.refusal, engine.script = None, [*ChatEngine("It is").script[:1], EngineDeadError("no more")]
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="the engine is dead") as caught:
            [chunk async for chunk in stream]
        assert caught.value.code == "engine_dead"
    names = tmp_path / "tokens"
    names.write_text("me secret\n")
    async with serving_http(engine, token_file=str(names)) as serve, client_of(serve) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        assert [model.id async for model in await client.with_options(api_key="secret").models.list()] == ["fake"]


async def test_the_client_tries_again_until_the_server_takes_requests() -> None:
    engine, statuses = FakeEngine(tokens("It ", "is"), running=False), []
    async with serving_http(engine) as serve:

        def between(response: Any) -> None:
            statuses.append((response.status_code, response.headers["retry-after"]))
            engine.running = True
            engine.refusal = QueueFullError("full") if len(statuses) == 1 else None

        async with client_of(serve, retries=2, between=between) as client:
            task = asyncio.ensure_future(client.completions.create(model="fake", prompt="x"))
            await serve.server.set_serving()
            assert (await task).choices[0].text == "It is"
    assert [status for status, _ in statuses] == [503, 429]
    assert all(int(seconds) > 0 for _, seconds in statuses)


async def test_a_client_that_leaves_cancels() -> None:
    engine = FakeEngine()
    async with serving_http(engine) as serve, client_of(serve) as client:
        stream = await client.completions.create(model="fake", prompt="x", stream=True)
        request = await engine.submitted.get()
        request.push(tokens("It ", "is", reason=None))  # type: ignore[arg-type]
        async for chunk in stream:
            assert chunk.choices[0].text
            break
        await stream.close()
        await request.closed.wait()
        whole = asyncio.ensure_future(client.completions.create(model="fake", prompt="x"))
        request = await engine.submitted.get()
        whole.cancel()
        await request.closed.wait()
