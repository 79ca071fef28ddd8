"""Chats with an engine, in this process and behind a server: calls that a grammar enforces, and reasoning with a budget."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from grpc_harness import serving
from outputs import TOOLS

from aengine import AsyncEngine, EngineBase, FinishReason, InvalidRequestError, RequestOptions, SamplingParams, StructuredOutput
from aengine.chat import ChatFormat, ChatMessage, ChatOutputOptions, Event, ReasoningDelta, prepare_chat, stream_chat
from aengine.chat.preparation import grammar_of
from aengine.client import AsyncClient
from aengine.structured.json_schema import fit_schema

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "How is it in Bath?"}]
THINKS = ChatFormat("hermes", "think")
LONG = SamplingParams(seed=3, max_tokens=400)
PARAMS = SamplingParams(seed=3, max_tokens=60)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def local() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", kv_cache_memory=64 * 1024 * 1024) as engine:
        yield engine


@pytest.fixture(scope="module")
async def remote(local: AsyncEngine) -> AsyncIterator[AsyncClient]:
    async with serving(local, limit=None) as serve, AsyncClient(serve.server.address) as client:
        yield client


@pytest.fixture(params=["local", "remote"])
async def engine(request: pytest.FixtureRequest, local: AsyncEngine, remote: AsyncClient) -> EngineBase:
    return local if request.param == "local" else remote


async def read(engine: EngineBase, **fields: Any) -> tuple[ChatMessage, Any, Any]:
    async with stream_chat(engine, **{"messages": CHAT, "params": PARAMS, **fields}) as stream:
        events = [event async for event in stream]
    assert ChatMessage.of(events) == stream.message
    return stream.message, stream, events


async def test_an_answer_is_what_the_engine_writes(engine: EngineBase) -> None:
    message, stream, _ = await read(engine)
    completion = await engine.generate(CHAT, PARAMS)
    assert message == ChatMessage(completion.text)
    assert (stream.finish_reason, stream.usage.completion_tokens) == (completion.finish_reason, len(completion.token_ids))
    assert stream.usage.prompt_tokens == completion.usage.prompt_tokens


async def test_required_calls(engine: EngineBase) -> None:
    small = {"type": "object", "properties": {"days": {"$ref": "#/$defs/days"}}, "required": ["days"], "additionalProperties": False}
    small["$defs"] = {"days": {"enum": [1, 2]}}
    tools = [{"type": "function", "function": {"name": name, "parameters": small}} for name in ("weather", "now")]
    message, stream, _ = await read(engine, params=LONG, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = message.tool_calls
    assert call.complete
    assert call.name in ("weather", "now")
    assert json.loads(call.arguments)["days"] in (1, 2)
    assert (message.content, stream.finish_reason) == ("", FinishReason.EOS)
    message, _, _ = await read(engine, params=LONG, tools=tools, tool_choice="now")
    assert [(call.name, json.loads(call.arguments)["days"] in (1, 2)) for call in message.tool_calls] == [("now", True)]


SEVERAL = {
    "type": "object",
    "properties": {
        "days": {"type": "integer"},
        "place": {"$ref": "#/$defs/place"},
        "free": {"type": "object"},
        "open": {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        "both": {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"enum": [1]}}, "required": ["b"]}]},
        "one": {"anyOf": [{"type": "object", "properties": {"c": {"maximum": 3, "type": "number"}}}, {"type": "null"}]},
    },
    "anyOf": [{"required": ["days"]}, {"required": ["place"]}],
    "$defs": {
        "place": {"type": "object", "properties": {"city": {"enum": ["Bath"]}}},
        "base": {"properties": {"a": {"enum": [2]}}, "required": ["a"]},
    },
}


def test_arguments_have_what_their_schema_lists_alone() -> None:
    grammar = grammar_of("all", [{"name": "all", "parameters": SEVERAL}, {"name": "none", "parameters": {}}], parallel=True)
    assert grammar is not None
    schema = json.loads(str(grammar.json_schema))
    properties = schema["properties"]
    assert schema["additionalProperties"] is schema["$defs"]["place"]["additionalProperties"] is False
    assert properties["days"] == {"type": "integer", "minimum": -(10**15 - 1), "maximum": 10**15 - 1}
    assert properties["one"]["anyOf"][0]["additionalProperties"] is False
    assert properties["one"]["anyOf"][0]["properties"]["c"]["maximum"] == 3
    assert (properties["free"], properties["open"]) == (SEVERAL["properties"]["free"], SEVERAL["properties"]["open"])  # type: ignore[index]
    assert (properties["both"], schema["$defs"]["base"]) == (SEVERAL["properties"]["both"], SEVERAL["$defs"]["base"])  # type: ignore[index]
    grammar = grammar_of("required", [{"name": "none", "parameters": {}}], parallel=True)
    assert grammar is not None
    schema = json.loads(str(grammar.json_schema))
    assert schema["maxItems"] == 8
    assert schema["$defs"]["tool0"] == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [{"day": 1}]},
        {"properties": {"hour": {}}, "const": {"day": 1}},
        {"properties": {"hour": {}}, "anyOf": [{"enum": [{"day": 1}]}]},
        {"required": ["day"]},
        {"properties": {"hour": {}}, "required": ["day"]},
    ],
)
@pytest.mark.parametrize("place", ["whole", "within"])
def test_arguments_may_have_what_their_schema_names_elsewhere(schema: dict[str, Any], place: str) -> None:
    parameters = schema if place == "whole" else {"type": "object", "properties": {"a": {"type": "object", **schema}}, "required": ["a"]}
    grammar = grammar_of("f", [{"name": "f", "parameters": parameters}], parallel=True)
    assert grammar is not None
    fit_schema(str(grammar.json_schema))  # would raise where nothing satisfies it


async def test_required_calls_end(local: AsyncEngine) -> None:
    """Though the demo model, which knows no tools, would go on with properties, digits and calls."""
    parameters = {"type": "object", "properties": {"days": {"type": "integer"}, "city": {"enum": ["Bath"]}}, "required": ["days"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("weather", "now")]
    message, stream, _ = await read(local, params=SamplingParams(seed=0, max_tokens=1500), tools=tools, tool_choice="required")
    assert (message.content, stream.finish_reason) == ("", FinishReason.EOS)
    assert 1 <= len(message.tool_calls) <= 8
    assert all(set(json.loads(call.arguments)) <= {"days", "city"} for call in message.tool_calls)


async def test_a_required_call_that_the_limit_cuts_is_no_content(engine: EngineBase) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    for most in (1, 3, 5):
        message, stream, _ = await read(engine, params=SamplingParams(seed=3, max_tokens=most), tools=tools, tool_choice="required")
        assert (message.content, stream.finish_reason) == ("", FinishReason.MAX_TOKENS)


OPENED = {"messages": [*CHAT, {"role": "assistant", "content": "<think>"}], "continue_final_message": True, "format": THINKS}


async def test_reasoning_ends_at_its_budget(engine: EngineBase) -> None:
    free = replace(PARAMS, ignore_eos=True)
    message, stream, _ = await read(engine, params=free, max_reasoning_tokens=8, **OPENED)
    prompt = await engine.tokenize(f"{(await engine.render_chat(CHAT)).text}<think>", add_special_tokens=False)
    reasoning = await engine.generate(prompt, replace(free, max_tokens=8))
    assert message.reasoning == reasoning.text.strip()
    closed = await engine.tokenize("\n</think>\n\n", add_special_tokens=False)
    left = 60 - 8 - len(closed)
    answer = await engine.generate([*prompt, *reasoning.token_ids, *closed], replace(free, max_tokens=left))
    assert message.content == answer.text.lstrip()
    assert stream.usage.completion_tokens == 60
    assert 8 < stream.usage.reasoning_tokens <= 8 + len(closed)
    assert stream.finish_reason is answer.finish_reason


async def test_no_reasoning(engine: EngineBase) -> None:
    closed = await engine.generate(
        [*CHAT, {"role": "assistant", "content": "<think>\n\n</think>\n\n"}], PARAMS, continue_final_message=True
    )
    for fields in ({"format": THINKS}, {**OPENED, "messages": [*CHAT, {"role": "assistant", "content": "<think>\n"}]}):
        message, stream, _ = await read(engine, max_reasoning_tokens=0, **fields)
        assert (message.reasoning, stream.usage.reasoning_tokens) == ("", 0)
        if fields is not OPENED and "messages" not in fields:
            assert message.content == closed.text.lstrip()


async def test_what_is_structured_comes_after_the_reasoning(engine: EngineBase) -> None:
    params = SamplingParams(seed=3, structured_output=StructuredOutput(choice=("<think> rain.", "Sun.")))
    message, _, events = await read(engine, params=params, max_reasoning_tokens=4, request_id="one", **OPENED)
    assert isinstance(events[0], ReasoningDelta)
    assert message.content in ("<think> rain.", "Sun.")
    message, _, _ = await read(engine, params=params, max_reasoning_tokens=0, format=THINKS)
    assert (message.reasoning, message.content in ("<think> rain.", "Sun.")) == ("", True)


async def test_harmony(engine: EngineBase) -> None:
    params = SamplingParams(seed=3, structured_output=StructuredOutput(choice=("Rain.", "Sun.")))
    harmony = {"format": ChatFormat("harmony", "harmony"), "max_reasoning_tokens": 4}
    message, stream, _ = await read(engine, params=params, **harmony)
    assert message.reasoning
    assert message.content in ("Rain.", "Sun.")
    assert stream.usage.reasoning_tokens > 4
    message, _, _ = await read(engine, params=params, **{**harmony, "max_reasoning_tokens": 0})
    assert (message.reasoning, message.content in ("Rain.", "Sun.")) == ("", True)


async def test_several_sequences_have_a_parser_each(local: AsyncEngine) -> None:
    chat = ChatOutputOptions(max_reasoning_tokens=5, format=THINKS)
    options = RequestOptions(continue_final_message=True)
    prepared = await prepare_chat(local, OPENED["messages"], replace(PARAMS, n=2, temperature=1.0, ignore_eos=True), options, chat)
    parsers, events = [prepared.parser(), prepared.parser()], [list[Event](), list[Event]()]
    async with local.stream(prepared.prompt, prepared.params, prepared.options) as stream:
        async for token in stream:
            events[token.index] += parsers[token.index].feed(token.text)
        completion = stream.completion()
    for index, one in enumerate((completion, *completion.others)):
        events[index] += parsers[index].finish()
        assert "".join(event.source for event in events[index]) == one.text
        reasoning, _, content = one.text.partition("</think>")
        assert ChatMessage.of(events[index]) == ChatMessage(content.lstrip(), reasoning.strip())
    assert completion.text != completion.others[0].text


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "other", "tools": TOOLS}, "tool_choice"),
        (
            {"tool_choice": "required", "tools": TOOLS, "params": SamplingParams(structured_output=StructuredOutput(json_object=True))},
            "structured_output",
        ),
        ({"params": SamplingParams(n=2, temperature=1)}, "n"),
        ({"max_reasoning_tokens": -1, "format": THINKS}, "max_reasoning_tokens"),
        ({"params": SamplingParams(detokenize=False)}, "detokenize"),
        ({"max_reasoning_tokens": 5}, "max_reasoning_tokens"),
    ],
)
async def test_what_is_refused(local: AsyncEngine, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        stream_chat(local, CHAT, **fields)
    assert [violation.field for violation in refused.value.violations] == [field]


async def test_tools_of_which_no_grammar_can_be_made(engine: EngineBase) -> None:
    tools = [{"name": "f", "parameters": {"not": {}}}]
    for choice in ("f", "required"):
        with pytest.raises(InvalidRequestError) as refused:
            await read(engine, tools=tools, tool_choice=choice)
        assert [violation.field for violation in refused.value.violations] == ["tools"]


def test_references_in_schemas_still_reach_their_places() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/b"}, "again": {"$ref": "#"}}, "$defs": {"b": {"type": "integer"}}}
    grammar = grammar_of("required", [{"name": "f", "parameters": schema}], parallel=True)
    assert grammar is not None
    written = json.loads(str(grammar.json_schema))
    assert written["$defs"]["tool0"]["properties"] == {"a": {"$ref": "#/$defs/tool0/$defs/b"}, "again": {"$ref": "#/$defs/tool0"}}
