"""`/v1/responses`: its events and objects are OpenAI's, strictly, and its input is the chat that it means."""

from __future__ import annotations

import json
import pathlib
from collections.abc import AsyncIterator
from itertools import groupby
from typing import Any

import pytest
from chat_engine import CALL, TOOL, TURN, ChatEngine
from http_harness import Serving, raw, request_bytes, serving_http
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from aengine import AsyncEngine, SamplingParams
from aengine.api.errors import ConfigError, EngineDeadError
from aengine.api.outputs import FinishReason
from aengine.server.app import Server

pytestmark = pytest.mark.anyio

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGES = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", **TOOL}]
TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
REASONING = [kind.replace("output_text", "reasoning_text") for kind in TEXT]
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


async def read_events(serve: Serving, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await serve.post("/v1/responses", {**body, "stream": True})
    assert response.status_code == 200, response.text
    found = []
    for number, event in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert (f"event: {found[-1]['type']}", found[-1]["sequence_number"]) == (name, number)
    return found


@pytest.mark.parametrize(
    ("text", "reason", "kinds", "last", "statuses"),
    [
        ("It is fine.", FinishReason.EOS, TEXT, "completed", ["completed"]),
        (TURN, FinishReason.EOS, [*REASONING, *TEXT, *CALLED], "completed", ["completed"] * 3),
        (CALL + CALL, FinishReason.STOP_TOKEN, [*CALLED, *CALLED], "completed", ["completed"] * 2),
        (CALL[:56], FinishReason.MAX_TOKENS, CALLED, "incomplete", ["incomplete"]),
        ("It is", FinishReason.DEADLINE, TEXT, "incomplete", ["incomplete"]),
        ("", FinishReason.EOS, [], "completed", []),
    ],
)
async def test_events_add_up_to_the_response(text: str, reason: FinishReason, kinds: list[str], last: str, statuses: list[str]) -> None:
    body = {"input": "How is it?", "tools": TOOLS, "request_id": "r", "reasoning": {"effort": "low"}, "metadata": {"a": "b"}}
    async with serving_http(ChatEngine(text, reason)) as serve:
        response = await serve.post("/v1/responses", body)
        events = await read_events(serve, body)
    whole = Response.model_validate_json(response.content, strict=True)
    written = response.json()
    assert (whole.status, [item["status"] for item in written["output"]]) == (last, statuses)
    found = [kind.removeprefix("response.") for kind, _ in groupby(event["type"] for event in events)]
    assert found == ["created", "in_progress", *kinds, last]
    times = {"created_at": 0, "completed_at": 0}
    output = written["output"]
    for item in output + events[-1]["response"]["output"]:
        if item["type"] == "function_call":
            item["call_id"] = "random"
    assert {**events[-1]["response"], **times} == {**written, **times}
    assert [event["item"]["id"] for event in events if event["type"].endswith("item.done")] == [item["id"] for item in output]
    for index, item in enumerate(output):
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in events if "delta" in event and event["output_index"] == index) == said
    assert (whole.output_text, whole.metadata) == (text if kinds == TEXT else "I shall look." if text == TURN else "", {"a": "b"})


async def test_input_is_the_chat_that_it_means() -> None:
    engine = ChatEngine("Fine.")
    body = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "How is "}, {"type": "input_text", "text": "it?"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Where is it?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I shall look.", "annotations": []}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Bath"}'},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
            {"role": "developer", "content": "Go on."},
        ],
        "tools": [*TOOLS, {"type": "function", "name": "other"}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}},
        "reasoning": {"effort": "none", "summary": "auto"},
        "chat_template_kwargs": {"date": "today"},
        **{"max_output_tokens": 7, "temperature": 0, "top_k": 3, "user": "me", "service_tier": "flex", "store": True, "background": False},
    }
    async with serving_http(engine) as serve:
        response = await serve.post("/v1/responses", body)
        assert (response.status_code, response.json()["service_tier"]) == (200, "flex")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bath"}}}
    parts = [{"type": "text", "text": "How is "}, {"type": "text", "text": "it?"}]
    said = [{"type": "text", "text": "I shall look."}]
    assert engine.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "reasoning_content": "Where is it?", "content": said, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "weather", "content": "rain"},
        {"role": "system", "content": "Go on."},
    ]
    assert [tool["function"] for tool in engine.fields["tools"]] == [TOOL]
    assert engine.fields["template_kwargs"] == {"enable_thinking": False, "date": "today"}
    asked = engine.submitted.get_nowait().call
    params = asked["params"]
    assert (params.max_tokens, params.temperature, params.top_k, asked["tenant"], asked["priority"]) == (7, 0, 3, "me", 10)
    assert params.structured_output.json_schema == '{"type": "object"}'


async def test_all_that_is_wrong_has_its_path() -> None:
    body = {
        "input": [{"role": "user", "content": [{"type": "input_file"}]}, {"type": "item_reference", "id": "x"}, 3],
        "tools": [{"type": "web_search"}, {"type": "custom"}, {"type": "namespace", "name": "n", "tools": [{"type": "function"}]}],
        "tool_choice": {"type": "function", "name": "x"},
        "text": {"format": {"type": "json_schema", "schema": {"type": "no such"}}, "verbosity": "low"},
        **{
            "n": 2,
            "max_output_token": 1,
            "previous_response_id": "x",
            "include": ["pages"],
            "temperature": -1,
            "background": True,
            "store": False,
        },
    }
    async with serving_http(ChatEngine()) as serve:
        error = (await serve.post("/v1/responses", body)).json()["error"]
    paths = {"input[0].content[0].type", "input[1].type", "input[2]", "tools[1].name", "tools[2].tools[0].name", "tool_choice"}
    paths |= {"text.format.name", "n", "max_output_token", "previous_response_id", "temperature", "background"}
    found = {violation["field"]: violation["message"] for violation in error["violations"]}
    assert set(found) == paths
    assert found["previous_response_id"].endswith("the response 'x' is not stored")
    assert found["max_output_token"].endswith("did you mean max_output_tokens?")
    assert (error["param"], error["code"]) == (error["violations"][0]["field"], "invalid_field")


CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
NAMESPACE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}, CUSTOM]}


async def test_custom_tools_and_namespaces_are_functions_to_the_model() -> None:
    spoken = [("agents__spawn", {}), ("patch", {"input": "*** Begin\n"}), ("agents__patch", {"other": 1})]
    engine = ChatEngine("".join(f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in spoken))
    body: dict[str, Any] = {"input": "Go on.", "tools": [CUSTOM, NAMESPACE, {"type": "web_search"}]}
    calls = [
        {"type": "function_call", "name": "spawn", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call", "name": "patch", "input": "*** Begin\n"},
        {"type": "custom_tool_call", "name": "patch", "namespace": "agents", "input": '{"other": 1}'},
    ]
    async with serving_http(engine) as serve:
        output = (await serve.post("/v1/responses", body)).json()["output"]
        assert [{key: item[key] for key in call} for item, call in zip(output, calls, strict=True)] == calls
        assert [tool["function"]["name"] for tool in engine.fields["tools"]] == ["patch", "agents__spawn", "agents__patch"]
        assert engine.fields["tools"][0]["function"]["parameters"]["properties"]["input"]["description"] == "start: /.+/"
        events = await read_events(serve, body)
        assert [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"] == [
            "*** Begin\n",
            '{"other": 1}',
        ]
        assert [item["item"]["type"] for item in events if item["type"] == "response.output_item.done"] == [call["type"] for call in calls]
        results = [{"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"} for item in output]
        await serve.post("/v1/responses", {**body, "input": [{"role": "user", "content": "Go on."}, *output, *results]})
    said = [(call["function"]["name"], call["function"]["arguments"]) for call in engine.messages[1]["tool_calls"]]
    assert said == [*spoken[:2], ("agents__patch", {"input": '{"other": 1}'})]
    assert [message["content"] for message in engine.messages[2:]] == ["done"] * 3


async def test_a_stream_that_fails_says_so() -> None:
    engine = ChatEngine()
    engine.script = [*ChatEngine("It is").script[:1], EngineDeadError("no more")]
    async with serving_http(engine) as serve:
        events = await read_events(serve, {"input": "How is it?"})
    assert events[-1]["type"] == "response.failed"
    assert (events[-1]["response"]["status"], events[-1]["response"]["error"]["code"]) == ("failed", "server_error")
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "It"


async def test_openais_client_reads_what_the_engine_writes() -> None:
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine, serving_http(engine) as serve:
        client = AsyncOpenAI(base_url=f"http://{serve.server.http_address}/v1", api_key="none")
        expected = await engine.generate([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=9, logprobs=1))
        asked: Any = {"model": "demo", "input": "Hello", "temperature": 0, "max_output_tokens": 9, "top_logprobs": 1}
        asked["include"] = ["message.output_text.logprobs"]
        async with client.responses.stream(**asked) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            response = await stream.get_final_response()
        assert "".join(deltas) == response.output_text == expected.text
        logprobs = response.output[0].content[0].logprobs  # type: ignore[union-attr,index]
        assert [round(one.logprob, 6) for one in logprobs or ()] == [
            round(one.logprob, 6) for one in (expected.logprobs or ())[:-1]
        ]  # not the end
        assert (response.usage.input_tokens, response.usage.output_tokens) == (expected.usage.prompt_tokens, len(expected.token_ids))  # type: ignore[union-attr]
        assert (await client.responses.input_tokens.count(input="Hello")).input_tokens == expected.usage.prompt_tokens
        await client.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/v1/responses", {"input": "x"}), ("/v1/messages", {"max_tokens": 9, "messages": MESSAGES})])
async def test_a_client_that_leaves_ends_its_generation(path: str, body: dict[str, Any], stream: bool) -> None:
    engine = ChatEngine()
    engine.script = ChatEngine("It is").script[:1]
    async with serving_http(engine) as serve, raw(serve) as (reader, writer):
        writer.write(request_bytes(path, {**body, "stream": stream}))
        generation = await engine.submitted.get()
        if stream:
            await reader.readuntil(b'"It')
        writer.close()
        await generation.closed.wait()


async def test_the_time_limit_holds_while_a_chat_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, limits, stream = ChatEngine("Fine."), [], ChatEngine.stream

    def noted(self: ChatEngine, *args: Any, timeout: float, **fields: Any) -> Any:
        limits.append(timeout)
        return stream(self, *args, timeout=timeout, **fields)

    monkeypatch.setattr(ChatEngine, "stream", noted)
    async with serving_http(engine) as serve:
        for seconds in (60.0, 1e-6):
            assert (await serve.post("/v1/responses", {"input": "x", "timeout": seconds})).status_code == 200
    assert limits[0] < 60
    assert 0 < limits[1] < 1e-6


def openai_client(serve: Serving) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://{serve.server.http_address}/v1", api_key="x")


@pytest.fixture(scope="module")
async def demo_engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", max_num_seqs=4) as engine:
        yield engine


# ---- stored ------------------------------------------------------------------------------------------------------------


async def test_a_response_is_gone_on_from_by_its_id() -> None:
    engine = ChatEngine("Fine.")
    async with serving_http(engine) as serve:
        first = (await serve.post("/v1/responses", {"input": "How is it?", "instructions": "Be brief.", "request_id": "a"})).json()
        assert first["store"] is True
        body = {"input": [{"role": "user", "content": "Sure?"}], "previous_response_id": first["id"], "request_id": "b"}
        second = (await serve.post("/v1/responses", body)).json()
        assert second["previous_response_id"] == first["id"]
        events = await read_events(serve, {"input": "Really?", "previous_response_id": second["id"], "request_id": "c"})
        refused = await serve.post("/v1/responses", {"input": "x", "previous_response_id": second["id"], "request_id": "b"})
        assert refused.json()["error"]["message"].endswith("the response 'resp_b' would come before itself")
        third = events[-1]["response"]
        said = [message["content"] for message in engine.messages if message["role"] == "user"]
        assert [str(content) for content in said] == [str([{"type": "text", "text": "How is it?"}]), "Sure?", "Really?"]
        assert [message["role"] for message in engine.messages] == ["user", "assistant", "user", "assistant", "user"], "instructions stay"
        assert (await serve.client.get(f"/v1/responses/{third['id']}")).json() == third
        items = (await serve.client.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
        assert [(item["type"], item["content"]) for item in items] == [("message", [{"type": "input_text", "text": "How is it?"}])]

        assert (await serve.client.request("DELETE", f"/v1/responses/{first['id']}")).json() == {
            **{"id": first["id"], "object": "response", "deleted": True}
        }
        assert (await serve.client.get(f"/v1/responses/{first['id']}")).status_code == 404
        refused = await serve.post("/v1/responses", {"input": "x", "previous_response_id": third["id"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
        assert first["id"] in refused.json()["error"]["message"]

        kept = (await serve.post("/v1/responses", {"input": "x", "store": False, "request_id": "d"})).json()
        assert kept["store"] is False
        assert (await serve.client.get(f"/v1/responses/{kept['id']}")).status_code == 404
        assert (await serve.client.get(f"/v1/responses/{third['id']}/pages")).status_code == 404


async def test_in_the_background(demo_engine: AsyncEngine) -> None:
    """The same as otherwise; whoever comes later reads all events, or those behind one."""
    body = {"input": "Once", "max_output_tokens": 40, "temperature": 0}
    async with serving_http(demo_engine) as serve, openai_client(serve) as client:
        expected = (await serve.post("/v1/responses", body)).json()
        begun: Any = await client.responses.create(**body, model="", background=True)
        assert (begun.status, begun.background) in (("queued", True), ("in_progress", True))
        found = await client.responses.retrieve(begun.id)
        while found.status == "in_progress":
            found = await client.responses.retrieve(begun.id)
        assert (found.status, found.output_text) == (expected["status"], Response(**expected).output_text)

        stream: Any = await client.responses.create(**body, model="", background=True, stream=True)
        seen = [await anext(stream) for _ in range(5)]
        await stream.close()
        name = seen[0].response.id
        rest: Any = await client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
        seen += [event async for event in rest]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == found.output_text
        again: Any = await client.responses.retrieve(name, stream=True)
        assert [event.model_dump() async for event in again] == [event.model_dump() for event in seen]
        refused = await serve.client.get(f"/v1/responses/{begun.id}?stream=true")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


async def test_cancelling_in_the_background(demo_engine: AsyncEngine) -> None:
    async with serving_http(demo_engine) as serve, openai_client(serve) as client:
        begun = await client.responses.create(input="Once", model="", background=True, extra_body={"ignore_eos": True})
        cancelled = await client.responses.cancel(begun.id)
        assert cancelled.status == "cancelled"
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        await client.responses.delete(begun.id)
        assert (await serve.client.get(f"/v1/responses/{begun.id}")).status_code == 404
        running = await client.responses.create(input="Once", model="", background=True, extra_body={"ignore_eos": True})
        await client.responses.delete(running.id)
        assert (await serve.client.get(f"/v1/responses/{running.id}")).status_code == 404
        assert demo_engine.stats().running == 0


async def test_a_journal_of_a_server_before(demo_engine: AsyncEngine, tmp_path: pathlib.Path) -> None:
    """What it stored is there, and what ran goes on and says the same."""
    asked: dict[str, Any] = {"input": "Once", "model": "", "max_output_tokens": 200, "background": True, "stream": True}
    async with serving_http(demo_engine, journal=str(tmp_path)) as serve, openai_client(serve) as client:
        stored = (await serve.post("/v1/responses", {"input": "Once", "max_output_tokens": 3})).json()
        stream: Any = await client.responses.create(**asked, extra_body={"ignore_eos": True})
        seen = [await anext(stream) for _ in range(20)]
        with pytest.raises(ConfigError, match=r"journal: .* another process uses it"):
            await Server(demo_engine, port=None, http_port=0, journal=str(tmp_path)).start()
    async with serving_http(demo_engine, journal=str(tmp_path)) as serve, openai_client(serve) as client:
        assert (await serve.client.get(f"/v1/responses/{stored['id']}")).json() == stored
        name = seen[0].response.id
        whole: Any = await client.responses.retrieve(name, stream=True)
        told = [event.model_dump() async for event in whole]
        assert told[: len(seen)] == [event.model_dump() for event in seen]
        assert told[-1]["response"]["usage"]["output_tokens"] == 200
