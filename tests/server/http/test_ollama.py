"""`/api/`: Ollama's own client reads what its API has, of the demo model and of outputs with reasoning and calls of tools."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest
from chat_engine import CALL, TOOL, ChatEngine
from http_harness import Serving, serving_http

from aengine import AsyncEngine
from aengine.api.errors import EngineDeadError
from aengine.api.outputs import AdapterInfo

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "How is it?"}]
TOOLS = [{"type": "function", "function": TOOL}]
GREEDY = {"temperature": 0, "num_predict": 6}


@pytest.fixture
async def serve() -> AsyncIterator[Serving]:
    async with AsyncEngine("demo", kv_cache_memory="32MiB") as engine, serving_http(engine) as serve:
        yield serve


def client_of(serve: Serving) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=f"http://{serve.server.http_address}")


async def test_chats_and_texts(serve: Serving) -> None:
    client = client_of(serve)
    whole = await client.chat("demo", MESSAGES, options=GREEDY)
    assert whole.message.role == "assistant"
    assert (whole.done, whole.done_reason, whole.eval_count, whole.model) == (True, "length", 6, "demo")
    assert whole.prompt_eval_count
    assert whole.total_duration is not None
    assert whole.total_duration >= (whole.eval_duration or 0) > 0
    parts = [part async for part in await client.chat("demo:latest", MESSAGES, options=GREEDY, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [*[False] * (len(parts) - 1), True]
    text = await client.generate("demo", "It is a truth", raw=True, options=GREEDY)
    pieces = [part async for part in await client.generate("demo", "It is a truth", raw=True, options=GREEDY, stream=True)]
    assert "".join(part.response for part in pieces) == text.response
    completion = await serve.post("/v1/completions", {"prompt": "It is a truth", "temperature": 0, "max_tokens": 6})
    assert completion.json()["choices"][0]["text"] == text.response
    chat = await client.generate("demo", "How is it?", options=GREEDY)
    assert chat.response == whole.message.content
    system = await client.generate("demo", "How is it?", system="Be kind.", options=GREEDY)
    assert (system.prompt_eval_count or 0) > (chat.prompt_eval_count or 0)


async def test_options_are_those_of_requests(serve: Serving) -> None:
    client = client_of(serve)
    stopped = await client.chat("demo", MESSAGES, options={**GREEDY, "num_predict": -1, "stop": ["a"], "num_ctx": 4096, "mirostat": 0})
    assert stopped.done_reason == "stop"
    assert "a" not in (stopped.message.content or "")
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    long = await client.generate("demo", "a", raw=True, options={"num_predict": -2, "logit_bias": {}, "seed": 1})
    assert (long.eval_count or 0) > 16
    for call in (client.chat("demo", MESSAGES, format=schema), client.generate("demo", "a", raw=True, format=schema)):
        answer: Any = await call
        assert json.loads(answer.message.content if hasattr(answer, "message") else answer.response) == {"n": 7}
    told = {"stream": False, "logprobs": True, "top_logprobs": 2, "options": GREEDY}
    for path, body in (("/api/chat", {"messages": MESSAGES}), ("/api/generate", {"prompt": "a", "raw": True})):
        logprobs = (await serve.post(path, {**told, **body})).json()["logprobs"]
        assert [len(each["top_logprobs"]) for each in logprobs] == [2] * 6
    for body, message in (
        ({"messages": MESSAGES, "what": 1}, "there is no field what"),
        ({"messages": MESSAGES, "options": {"temperature": -1}}, "temperature: -1.0 is not in [0, 100]"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": MESSAGES, "format": "xml"}, "format"),
        ({"model": "other", "messages": MESSAGES}, "model 'other' is not served here"),
    ):
        refused = await serve.post("/api/chat", body)
        assert refused.status_code == (404 if "model" in body else 400)
        assert message in refused.json()["error"]
    with pytest.raises(ollama.ResponseError, match="suffix: is not possible"):
        await client.generate("demo", "a", suffix="b")


async def test_what_is_served(serve: Serving) -> None:
    client = client_of(serve)
    assert [model.model for model in (await client.list()).models] == ["demo"]
    assert [model.model for model in (await client.ps()).models] == ["demo"]
    shown = await client.show("demo:latest")
    assert shown.capabilities == ["completion", "embedding"]
    assert (shown.modelinfo or {})["qwen3.context_length"] == 2048
    assert (await client.generate("demo", "")).done_reason == "load"
    assert (await serve.client.get("/api/version")).json()["version"]
    found = await client.embed("demo", ["one", "two"])
    again = await serve.post("/v1/embeddings", {"input": ["one", "two"]})
    assert [list(one) for one in found.embeddings] == [one["embedding"] for one in again.json()["data"]]
    assert list((await client.embed("demo", "one")).embeddings[0]) == list(found.embeddings[0])
    assert len((await client.embeddings("demo", "one")).embedding) == 256
    refused = await serve.post("/api/embed", {"input": ["a", 3]})
    assert (refused.status_code, refused.json()["error"]) == (400, "input[1]: is not a string")


async def test_reasoning_and_calls_of_tools() -> None:
    engine = ChatEngine(f"<think>Let me see.</think>{CALL}")
    engine.adapters = (AdapterInfo("tuned", 1, (), 1),)
    async with serving_http(engine) as serve:
        client = client_of(serve)
        whole = await client.chat("tuned", MESSAGES, tools=TOOLS, think=True)
        parts = [part async for part in await client.chat("fake", MESSAGES, tools=TOOLS, stream=True)]
        for message in (whole.message, next(part.message for part in parts if part.message.tool_calls)):
            (call,) = message.tool_calls or ()
            assert (call.function.name, call.function.arguments) == (TOOL["name"], {"city": "Bath"})
        assert whole.message.thinking == "".join(part.message.thinking or "" for part in parts) == "Let me see."
        assert whole.done_reason == parts[-1].done_reason == "stop"
        turn = [
            *MESSAGES,
            {"role": "assistant", "content": "", "thinking": "So.", "tool_calls": [{"function": {"name": "a", "arguments": {"x": 1}}}]},
            {"role": "tool", "tool_name": "a", "content": "3"},
        ]
        await client.chat("fake", turn)
        assert engine.messages[1]["tool_calls"][0]["function"] == {"name": "a", "arguments": {"x": 1}}
        assert engine.messages[1]["reasoning_content"] == "So."
        assert engine.messages[2]["tool_call_id"] == engine.messages[1]["tool_calls"][0]["id"]
        assert engine.messages[2]["name"] == "a"
        picture = base64.b64encode(b"not a picture").decode()
        await client.chat("fake", [{"role": "user", "content": "What is it?", "images": [picture]}])
        assert engine.messages[0]["content"] == [{"type": "text", "text": "What is it?"}, {"type": "image", "image": b"not a picture"}]


async def test_errors_are_lines() -> None:
    """Also one within a stream, and no comment is sent to a client that waits."""
    engine = ChatEngine("It is fine.")
    engine.script[2] = EngineDeadError("the step thread died")  # type: ignore[call-overload]
    async with serving_http(engine) as serve:
        response = await serve.post("/api/chat", {"messages": MESSAGES})
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert [line["message"]["content"] for line in lines[:-1]] == ["It", " is"]
        assert "error" in lines[-1]
        assert response.headers["content-type"] == "application/x-ndjson"


FIELDS = (
    *("model", "messages", "prompt", "system", "images", "suffix", "raw", "stream", "options", "format", "think", "keep_alive", "context"),
    *("tools", "logprobs", "top_logprobs", "input", "dimensions", "truncate", "name", "session", "what"),
)
VALUES: tuple[Any, ...] = (
    *(None, 0, -1, 2**70, 1.5, True, False, "", "a", "json", ":latest", "demo", [], {}, [1], ["a"], [{}], [None], [[["x"]]]),
    *([{"role": "user"}], MESSAGES, [{"role": "tool", "content": 3}], [{"role": "user", "content": "x", "images": ["!!"]}]),
    *([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "x"}}]}], [{"role": "assistant", "tool_calls": "x"}]),
    *({"type": "object"}, {"num_predict": "x"}, {"stop": [1]}, {"temperature": {}}, {"seed": -1}, "high"),
)


async def test_bodies_that_are_nearly_right_have_an_answer(serve: Serving) -> None:
    rng = random.Random(1)
    for _ in range(250):
        path = rng.choice(["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"])
        body = {field: rng.choice(VALUES) for field in rng.sample(FIELDS, rng.randrange(6))}
        if rng.random() < 0.7:
            body["options"] = {"num_predict": 2}
        response = await serve.post(path, body)
        assert response.status_code < 500, (path, body)
        if response.status_code >= 400:
            assert response.json()["error"], (path, body)
