"""Anthropic's Python client against the HTTP door, as it comes: tools, structured output, errors, retries, clients that leave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from chat_engine import CALL, TOOL, TURN, ChatEngine
from http_harness import Serving, serving_http
from test_clients_openai import Weather

from aengine import AsyncEngine
from aengine.api.errors import EngineDeadError, QueueFullError

pytestmark = pytest.mark.anyio

ASKED: Any = {"model": "fake", "max_tokens": 64, "messages": [{"role": "user", "content": "How is it?"}]}
TOOLS: Any = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]


def client_of(serve: Serving, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://{serve.server.http_address}", **{"api_key": "none", "max_retries": 0, **options})


async def test_a_turn_with_tools_and_the_next_one() -> None:
    engine = ChatEngine(TURN + CALL)
    async with serving_http(engine) as serve, client_of(serve) as client:
        async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            kinds = {event.type async for event in stream}
            message = await stream.get_final_message()
        assert {"text", "thinking", "input_json", "content_block_stop", "message_stop"} <= kinds
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert message.stop_reason == "tool_use"
        calls: Any = [block for block in message.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"city": "Bath"}] * 2
        engine.write("Rain.")
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
        told = [*ASKED["messages"], {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        after: Any = await client.messages.create(**{**ASKED, "messages": told}, tools=TOOLS)
        assert after.content[0].text == "Rain."
    assert [message["role"] for message in engine.messages] == ["user", "assistant", "tool", "tool"]
    assert [json.dumps(call["function"]["arguments"]) for call in engine.messages[1]["tool_calls"]] == ['{"city": "Bath"}'] * 2


async def test_structured_output() -> None:
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine, serving_http(engine) as serve, client_of(serve) as client:
        parsed = await client.messages.parse(**{**ASKED, "model": "demo"}, output_format=Weather)
        assert isinstance(parsed.parsed_output, Weather)


async def test_errors_are_the_exceptions_that_the_client_has_for_them(tmp_path: Path) -> None:
    engine = ChatEngine()
    names = tmp_path / "tokens"
    names.write_text("me secret\n")
    async with serving_http(engine, token_file=str(names)) as serve, client_of(serve, api_key="secret") as client:

        async def fails(kind: type[anthropic.APIStatusError], **fields: Any) -> anthropic.APIStatusError:
            with pytest.raises(kind) as caught:
                await client.messages.create(**{**ASKED, **fields})
            assert caught.value.request_id
            return caught.value

        assert (await fails(anthropic.BadRequestError, extra_body={"temperature": 3})).type == "invalid_request_error"
        assert (await fails(anthropic.NotFoundError, model="claude")).type == "not_found_error"
        engine.refusal = QueueFullError("full")
        assert (await fails(anthropic.OverloadedError)).type == "overloaded_error"
        engine.refusal, engine.script = None, [*ChatEngine("It is").script[:1], EngineDeadError("no more")]
        with pytest.raises(anthropic.APIStatusError, match="the engine is dead"):
            async with client.messages.stream(**ASKED) as stream:
                await stream.until_done()
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="other").messages.create(**ASKED)


async def test_the_client_tries_again_where_the_queue_is_full() -> None:
    engine = ChatEngine("Fine.")
    engine.refusal = QueueFullError("full")
    statuses = []

    async def look(response: Any) -> None:
        if response.is_error:
            statuses.append(response.status_code)
            engine.refusal = None
            response.headers["retry-after-ms"] = "1"

    transport = anthropic.DefaultAsyncHttpxClient(event_hooks={"response": [look]})
    async with serving_http(engine) as serve, client_of(serve, max_retries=1, http_client=transport) as client:
        message: Any = await client.messages.create(**ASKED)
    assert (message.content[0].text, statuses) == ("Fine.", [529])


async def test_a_client_that_leaves_cancels() -> None:
    engine = ChatEngine()
    engine.script = []
    async with serving_http(engine) as serve, client_of(serve) as client:
        opening = asyncio.ensure_future(client.messages.create(**ASKED, stream=True))
        request = await engine.submitted.get()
        request.push(ChatEngine("It is").script[:1])
        async for event in await opening:
            assert event.type == "message_start"
            break
        await (await opening).close()
        await request.closed.wait()
