"""LiteLLM, through OpenAI's API and through Anthropic's: python -m tools.compat.litellm_checks http://HOST:PORT"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

from tools.compat.checks import run_checks

MESSAGES = [{"role": "user", "content": "How do you do?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Bath", "York"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS}}]
OPENAI = {"model": "openai/demo", "api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
ANTHROPIC = {"model": "anthropic/demo", "api_base": sys.argv[1], "api_key": "none"}
litellm.suppress_debug_info = True


def complete(provider: dict[str, str], **options: Any) -> Any:
    return litellm.completion(**provider, **{"messages": MESSAGES, "max_tokens": 16, "temperature": 0, **options})


def completion() -> object:
    "completion, whole and streamed"
    whole = complete(OPENAI)
    chunks = list(complete(OPENAI, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert 0 < whole.usage.completion_tokens <= 16
    return repr(text)


def anthropic() -> object:
    "completion through Anthropic's API, whole and streamed: the same text"
    expected = complete(OPENAI).choices[0].message.content
    assert complete(ANTHROPIC).choices[0].message.content == expected
    assert "".join(chunk.choices[0].delta.content or "" for chunk in complete(ANTHROPIC, stream=True)) == expected
    return repr(expected)


def tools() -> object:
    "tools through both APIs, whole and streamed"
    found = []
    for provider in (OPENAI, ANTHROPIC):
        options: Any = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 200}
        (call,) = complete(provider, **options).choices[0].message.tool_calls
        built = litellm.stream_chunk_builder(list(complete(provider, **options, stream=True)))
        assert built is not None
        (streamed,) = built.choices[0].message.tool_calls
        for one in (call, streamed):
            assert one.function.name == "weather"
            assert json.loads(one.function.arguments)["city"] in ("Bath", "York")
        found.append(call.function.arguments)
    return found


def structured() -> object:
    "response_format with a schema"
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": PARAMETERS, "strict": True}}
    text = complete(OPENAI, response_format=schema, max_tokens=200).choices[0].message.content
    assert json.loads(text)["city"] in ("Bath", "York")
    return text


def text_completion() -> object:
    "text_completion with logprobs"
    (choice,) = litellm.text_completion(
        **{**OPENAI, "model": "text-completion-openai/demo"}, prompt="It is", max_tokens=8, logprobs=1, temperature=0
    ).choices
    assert len(choice.logprobs.token_logprobs) == 8
    return repr(choice.text)


def embedding() -> object:
    "embedding"
    data = litellm.embedding(**OPENAI, input=["How", "do you do?"], encoding_format="float").data
    return f"{len(data)} of {len(data[0]['embedding'])} numbers"


def errors() -> object:
    "errors are those of LiteLLM's own"
    found = []
    wrong: list[tuple[type[Exception], dict[str, str], dict[str, Any]]] = [
        (litellm.BadRequestError, OPENAI, {"temperature": 300}),
        (litellm.NotFoundError, {**OPENAI, "model": "openai/gpt"}, {}),
    ]
    for kind, provider, options in wrong:
        try:
            complete(provider, **options)
        except kind as error:
            found.append(type(error).__name__)
    assert len(found) == len(wrong)
    return found


run_checks([completion, anthropic, tools, structured, text_completion, embedding, errors])
