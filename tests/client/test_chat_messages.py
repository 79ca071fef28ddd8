"""Chats on the wire: what a client writes is what a server reads."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from fake_engine import FakeEngine
from google.protobuf.message import Message

from aengine import AsyncEngine, InvalidRequestError, RequestOptions, SamplingParams
from aengine.api.request import MAX_OPTION_CHARACTERS, read_messages
from aengine.v1.generation_pb2 import ChatMessage, ChatPrompt, ContentPart
from aengine.v1.generation_service_pb2 import GenerateRequest
from aengine.wire.names import CHAT, field_of
from aengine.wire.request import MAX_EXTRA_CHARACTERS, read_request, write_request

CALL = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": {"größe": 1, "b": [1.5, None, True, -7]}}}
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([{"role": "system", "content": ""}, {"role": "user", "content": "a"}], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]}], {}),
    "calls": (
        [
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "b"},
            {"role": "tool", "content": "c", "tool_call_id": "a1", "name": None},
        ],
        {"tools": [{"z": 1, "a": "ü"}, {}]},
    ),
    "options": (
        [{"role": "user", "content": "a"}],
        {"add_generation_prompt": False, "continue_final_message": True, "template_kwargs": {"z": False, "a": {"b": 2.0}}},
    ),
    "opened": ([{"role": "user", "content": "a"}], {"add_generation_prompt": True}),
}


async def read(request: Message) -> Any:
    engine = cast(AsyncEngine, FakeEngine())
    wanted, _ = await read_request(GenerateRequest.FromString(request.SerializeToString()), engine)
    return wanted


@pytest.mark.anyio
@pytest.mark.parametrize("name", CHATS)
async def test_what_is_written_is_read(name: str) -> None:
    messages, fields = CHATS[name]
    options = RequestOptions(**fields)
    got = await read(write_request(messages, SamplingParams(), options))
    expected = read_messages(messages)
    for message in expected:
        message.setdefault("content", None)  # which the renderer takes for the same
    assert json.dumps(got.options.tools) == json.dumps(options.tools)  # in the same order
    assert (got.prompt, got.options) == (expected, options)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("chat", "path", "sentence"),
    [
        ({"tools": ["{}", "[1]"]}, "tools[1]", "'[1]' is not a JSON object"),
        ({"tools": ["{a"]}, "tools[0]", "'{a' is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ({"tools": ["[" * 65536]}, "tools[0]", "is not JSON: "),
        ({"tools": ['{"a": NaN}']}, "tools", "it holds nan, which is no JSON value"),
        ({"tools": ["{}"] * (MAX_OPTION_CHARACTERS // 2 + 1)}, "tools", "262146 characters of JSON are more than 262144"),
        ({"tools": ["[" * 65537]}, "tools", "65537 commas and opening brackets of JSON are more than 65536"),
        ({"template_kwargs": "1"}, "template_kwargs", "'1' is not a JSON object"),
        ({"template_kwargs": " " * MAX_OPTION_CHARACTERS + "{}"}, "template_kwargs", "262146 characters of JSON are more than 262144"),
        ({"template_kwargs": '{"tokenize": true}'}, "template_kwargs", "tokenize cannot be set here"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "true cannot be combined with add_generation_prompt",
        ),
    ],
    ids=["list", "no_json", "deep", "nan", "long", "values", "number", "long_kwargs", "reserved", "both"],
)
async def test_options_that_cannot_be_read(chat: dict[str, Any], path: str, sentence: str) -> None:
    request = GenerateRequest()
    request.spec.prompt.chat.CopyFrom(ChatPrompt(messages=[ChatMessage(role="user")], **chat))
    with pytest.raises(InvalidRequestError) as caught:
        await read(request)
    (violation,) = caught.value.violations
    assert violation.field == f"spec.prompt.chat.{path}"
    assert sentence in violation.description
    assert len(violation.description) < 300


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("message", "path", "sentence"),
    [
        (ChatMessage(content="a", parts=[ContentPart(text="b")]), "[0].parts", "cannot be combined with content"),
        (ChatMessage(parts=[ContentPart(text="b"), ContentPart()]), "[0].parts", "each must have text or an image"),
        (ChatMessage(extra_fields="[]"), "[0].extra_fields", "'[]' is not a JSON object"),
        (ChatMessage(extra_fields='{"role": "tool"}'), "[0].extra_fields", "role and content have fields of their own"),
        (ChatMessage(extra_fields='{"content": "a"}'), "[0].extra_fields", "role and content have fields of their own"),
        (ChatMessage(content="a", extra_fields='{"content": null}'), "[0].extra_fields", "role and content have fields of their own"),
        (ChatMessage(extra_fields=" " * (MAX_EXTRA_CHARACTERS + 1)), "", "1048577 characters of JSON are more than 1048576"),
    ],
    ids=["both", "no_text", "list", "role", "content", "null", "long"],
)
async def test_messages_that_cannot_be_read(message: ChatMessage, path: str, sentence: str) -> None:
    request = GenerateRequest()
    message.role = "user"
    request.spec.prompt.chat.messages.append(message)
    with pytest.raises(InvalidRequestError) as caught:
        await read(request)
    assert [(one.field, one.description) for one in caught.value.violations] == [(f"spec.prompt.chat.messages{path}", sentence)]


@pytest.mark.parametrize(
    ("messages", "fields", "name"),
    [
        ([{"role": "user", "content": "\ud800"}], {}, "prompt"),
        ([{"role": "user", "content": "a", "name": "\ud800"}], {}, "prompt"),
        ([{"role": "user", "content": 1}], {}, "prompt"),
        ([{"role": "user", "content": "a"}], {"tools": [{"a": "\ud800"}]}, "tools"),
        ([{"role": "user", "content": "a"}], {"template_kwargs": {"\ud800": 1}}, "template_kwargs"),
    ],
)
def test_what_cannot_be_written(messages: list[dict[str, Any]], fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        write_request(messages, SamplingParams(), RequestOptions(**fields))
    assert caught.value.field == name


def test_paths_become_names_again() -> None:
    assert [field_of(f"spec.prompt.chat.{name}") for name in CHAT.values()] == list(CHAT)
    assert {field_of(path) for path in ("spec.prompt", "spec.prompt.chat", "spec.prompt.chat.messages[0].parts")} == {"prompt"}
