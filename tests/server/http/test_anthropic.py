"""`/v1/messages`: its events, objects and errors are Anthropic's, and its messages are the chat that they mean."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, RawMessageStreamEvent
from chat_engine import CALL, PROMPT, TOOL, TURN, ChatEngine
from http_harness import Serving, serving_http
from pydantic import TypeAdapter

from aengine import AsyncEngine, SamplingParams
from aengine.api.errors import EngineDeadError, QueueFullError
from aengine.api.outputs import AdapterInfo, FinishReason

pytestmark = pytest.mark.anyio

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOLS = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "How is it?"}], "tools": TOOLS}
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]


async def read_events(serve: Serving, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await serve.post("/v1/messages", {**body, "stream": True})
    assert response.status_code == 200, response.text
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert f"event: {found[-1]['type']}" == name
        if found[-1]["type"] not in ("ping", "error"):
            EVENT.validate_json(data.removeprefix("data: "), strict=True)
    return found


@pytest.mark.parametrize(
    ("text", "reason", "stop", "content", "stop_reason"),
    [
        ("It is fine.", FinishReason.EOS, None, [{"type": "text", "text": "It is fine."}], "end_turn"),
        ("It is", FinishReason.STOP_STRING, " fine", [{"type": "text", "text": "It is"}], "stop_sequence"),
        (
            TURN,
            FinishReason.EOS,
            None,
            [
                {"type": "thinking", "thinking": "Where is it?", "signature": ""},
                {"type": "text", "text": "I shall look."},
                {"type": "tool_use", "id": "", "name": "weather", "input": {"city": "Bath"}},
            ],
            "tool_use",
        ),
        (CALL[:56], FinishReason.MAX_TOKENS, None, [{"type": "tool_use", "id": "", "name": "weather", "input": {}}], "max_tokens"),
        ("", FinishReason.CONTEXT_LENGTH, None, [], "model_context_window_exceeded"),
    ],
)
async def test_events_add_up_to_the_message(
    text: str, reason: FinishReason, stop: str | None, content: list[dict[str, Any]], stop_reason: str
) -> None:
    async with serving_http(ChatEngine(text, reason, stop)) as serve:
        response = await serve.post("/v1/messages", {**BODY, "request_id": "r"})
        events = await read_events(serve, {**BODY, "request_id": "r"})
    Message.model_validate_json(response.content, strict=True)
    message = response.json()
    for block in message["content"]:
        block.update({"id": ""} if "id" in block else {})
    assert message["content"] == content
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop)
    kinds = [kind for kind, _ in groupby(event["type"] for event in events)]
    assert kinds == ["message_start", "ping", *BLOCK * len(content), "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert {**events[-2]["delta"], "usage": events[-2]["usage"]} == {key: message[key] for key in ("stop_reason", "stop_sequence", "usage")}
    usage = message["usage"]  # of a prompt of three tokens, one of which was cached
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], events[0]["message"]["usage"]["input_tokens"]) == (2, 1, 2)
    for index, block in enumerate(content):
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == index]
        field = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}[block["type"]]
        written = "".join(delta.get(field, "") for delta in deltas)
        assert written == block.get(field, CALL[44:56] if reason is FinishReason.MAX_TOKENS else CALL[44:60])


async def test_messages_are_the_chat_that_they_mean() -> None:
    engine = ChatEngine("Fine.")
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "rain"}]}
    body = {
        **BODY,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "How is it?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Where is it?", "signature": ""},
                    {"type": "text", "text": "I shall look."},
                    {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Bath"}},
                ],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
            {"role": "assistant", "content": "It"},
        ],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "stop_sequences": ["."],
        "metadata": {"user_id": "u" * 200},
        **{"temperature": 0.5, "top_k": 3, "top_p": 0.5, "speed": "standard", "priority": 3},
    }
    async with serving_http(engine) as serve:
        assert (await serve.post("/v1/messages", body)).status_code == 200
        counted = await serve.post("/v1/messages/count_tokens", {**body, "max_tokens": None})
    assert counted.json() == {"input_tokens": len(PROMPT)}
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bath"}}}
    assert engine.messages == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "I shall look.", "reasoning_content": "Where is it?", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "weather", "content": [{"type": "text", "text": "rain"}]},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
        {"role": "assistant", "content": "It"},
    ]
    assert engine.fields["continue_final_message"]
    assert [tool["function"] for tool in engine.fields["tools"]] == [TOOL]
    assert engine.fields["template_kwargs"] == {"enable_thinking": True}
    asked = engine.submitted.get_nowait().call
    params = asked["params"]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.stop) == (9, 0.5, 3, 0.5, (".",))
    assert (params.reasoning.max_tokens, len(asked["tenant"]), asked["priority"]) == (5, 32, 3)
    assert json.loads(params.structured_output.json_schema)["properties"] == TOOL["parameters"]["properties"]  # type: ignore[index]


async def test_an_adapter_is_a_model() -> None:
    engine = ChatEngine("Fine.")
    engine.adapters = (AdapterInfo("polite", 8, ("q_proj",), 1),)
    async with serving_http(engine) as serve:
        entries = (await serve.client.get("/v1/models")).json()["data"]
        assert [(entry["id"], entry["parent"], entry["root"]) for entry in entries] == [("fake", None, "fake"), ("polite", "fake", "fake")]
        for path, prompt in (("/v1/messages", "messages"), ("/v1/responses", "input")):
            body = {"model": "polite", prompt: BODY["messages"], **({"max_tokens": 9} if prompt == "messages" else {})}
            assert (await serve.post(path, body)).json()["model"] == "polite"
            assert engine.submitted.get_nowait().call["adapter"] == "polite"


async def test_all_that_is_wrong_has_its_path() -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "document", "source": {}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "x", "input": "y"}], "name": "me"},
        ],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}, {"name": "a b"}],
        "thinking": {"type": "enabled"},
        "tool_choice": {"type": "sometimes"},
        **{"temperature": 1.5, "frequency": 1, "store": True, "container": "c", "mcp_servers": [], "stop_sequences": "."},
    }
    async with serving_http(ChatEngine()) as serve:
        response = await serve.post("/v1/messages", body, headers={"x-request-id": "mine"})
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert error["request_id"] == response.headers["request-id"] == "mine"
    found = {violation["field"]: violation["message"] for violation in error["error"]["violations"]}
    paths = {"messages[0].content[0].type", "messages[1].content[0].input", "messages[1].name", "tools[1].name", "thinking.budget_tokens"}
    assert set(found) == paths | {"tool_choice.type", "max_tokens", "temperature", "frequency", "store", "stop_sequences"}
    assert found["frequency"].startswith("Extra inputs are not permitted")


async def test_errors_have_anthropics_shape(tmp_path: Path) -> None:
    engine = ChatEngine()
    tokens = tmp_path / "tokens"
    tokens.write_text("me secret\n")
    engine.refusal = QueueFullError("full")
    async with serving_http(engine, token_file=str(tokens)) as serve:
        refused = await serve.post("/v1/messages", BODY)
        full = await serve.post("/v1/messages", BODY, headers={"x-api-key": "secret"})
        engine.refusal = None
        engine.script = [*ChatEngine("It is").script[:1], EngineDeadError("no more")]
        serve.client.headers["authorization"] = "Bearer secret"
        events = await read_events(serve, BODY)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert (full.status_code, full.json()["error"]["type"], full.headers["retry-after"]) == (529, "overloaded_error", "1")
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "overloaded_error")


async def test_anthropics_client_reads_what_the_engine_writes() -> None:
    chat = [{"role": "user", "content": "Hello"}]
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine, serving_http(engine) as serve:
        expected = await engine.generate(chat, SamplingParams(temperature=0, max_tokens=9))
        asked: Any = {"model": "demo", "messages": chat, "max_tokens": 9, "extra_body": {"temperature": 0}}
        async with AsyncAnthropic(base_url=f"http://{serve.server.http_address}", api_key="none") as client:
            whole = await client.messages.create(**asked)
            assert whole.content[0].text == expected.text
            async with client.messages.stream(**asked) as stream:
                text = "".join([text async for text in stream.text_stream])
                message = await stream.get_final_message()
            assert (text, message.usage.output_tokens) == (expected.text, expected.usage.completion_tokens)
            tokens = await client.messages.count_tokens(model="demo", messages=asked["messages"])
            assert tokens.input_tokens == expected.usage.prompt_tokens
