"""`/v1/completions` and `/v1/chat/completions` with the demo model: what OpenAI's client reads, against the engine itself."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
from http_harness import Serving, serving_http

from aengine import AsyncEngine, SamplingParams
from aengine.server.http import body_parameters, chat_completions, completions

pytestmark = pytest.mark.anyio

GREEDY = {"temperature": 0, "max_tokens": 8}
MESSAGES = [{"role": "user", "content": "How do you do?"}]
PROMPT = "It is a truth universally acknowledged"


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine:
        yield engine


@pytest.fixture(scope="module")
async def serve(engine: AsyncEngine) -> AsyncIterator[Serving]:
    async with serving_http(engine, limit=None) as serve:
        yield serve


async def test_a_completion_is_that_of_the_engine(engine: AsyncEngine, serve: Serving) -> None:
    expected = await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
    response = (await serve.post("/v1/completions", {"model": "demo", "prompt": PROMPT, **GREEDY})).json()
    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert response["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    chunks = await serve.events("/v1/completions", {"prompt": PROMPT, **GREEDY, "stream_options": {"include_usage": True}})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == expected.text
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    chunks = await serve.events("/v1/completions", {"prompt": PROMPT, **GREEDY, "stream_options": {"continuous_usage_stats": True}})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert (counts, counts[-1]) == (sorted(counts), 8)
    assert chunks[-1]["choices"]


async def test_a_chat_is_that_of_the_engine(engine: AsyncEngine, serve: Serving) -> None:
    expected = await engine.generate(MESSAGES, SamplingParams(temperature=0, max_tokens=8))
    response = (await serve.post("/v1/chat/completions", {"messages": MESSAGES, **GREEDY})).json()
    assert response["choices"][0]["message"]["content"] == expected.text
    chunks = await serve.events("/v1/chat/completions", {"messages": MESSAGES, **GREEDY})
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected.text
    assert chunks[-1]["choices"][0]["finish_reason"] == response["choices"][0]["finish_reason"]


async def test_an_echo_has_the_logprobs_of_the_prompt(engine: AsyncEngine, serve: Serving) -> None:
    """What evaluations of likelihoods ask for, by text and by ids, whole and as a stream, with and without an output."""
    ids = await engine.tokenize(PROMPT)
    expected = await engine.generate(ids, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, logprobs=2))
    assert expected.prompt_logprobs is not None
    scores = [entry.logprob for entry in expected.prompt_logprobs if entry is not None]
    wanted = {"echo": True, "logprobs": 2, "temperature": 0}
    response = (await serve.post("/v1/completions", {"prompt": [ids, ids[:3]], "max_tokens": 0, **wanted})).json()
    for choice, length in zip(response["choices"], (len(ids), 3), strict=True):
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(scores[: length - 1], rel=1e-3)
        assert "".join(found["tokens"]) == choice["text"] == PROMPT[: len(choice["text"])]
        assert [
            choice["text"][start : start + len(text)] for start, text in zip(found["text_offset"], found["tokens"], strict=True)
        ] == found["tokens"]
        assert all(text in top for top, text in zip(found["top_logprobs"][1:], found["tokens"][1:], strict=True)), "the token is among them"
    assert response["usage"]["completion_tokens"] == 0
    chunks = await serve.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, **wanted})
    columns = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed = [one for column in columns for one in column["token_logprobs"]]
    assert expected.logprobs is not None
    assert streamed[1:] == pytest.approx([*scores, expected.logprobs[0].logprob], rel=1e-3)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + expected.text


async def test_several_prompts_and_sequences(engine: AsyncEngine, serve: Serving) -> None:
    prompts, params = ["It is", "She was"], {"n": 2, "seed": 5, "max_tokens": 6, "temperature": 0.8}
    expected = []
    for prompt in prompts:
        completion = await engine.generate(prompt, SamplingParams(**params))  # type: ignore[arg-type]
        expected += [completion.text, completion.others[0].text]
    response = (await serve.post("/v1/completions", {"prompt": prompts, **params})).json()
    assert [choice["text"] for choice in response["choices"]] == expected
    texts = ["", "", "", ""]
    for chunk in await serve.events("/v1/completions", {"prompt": prompts, **params, "return_token_ids": True}):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == expected
    refused = (await serve.post("/v1/completions", {"prompt": ["a", [5000]], "best_of": 1})).json()["error"]
    assert refused["param"] == "prompt[1]"


async def test_logprobs_of_a_chat(engine: AsyncEngine, serve: Serving) -> None:
    expected = await engine.generate(MESSAGES, SamplingParams(temperature=0, max_tokens=8, logprobs=2))
    wanted = {"messages": MESSAGES, **GREEDY, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    (choice,) = (await serve.post("/v1/chat/completions", wanted)).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"] == list(expected.token_ids)
    for entry, known in zip(entries, expected.logprobs or (), strict=True):
        assert entry["logprob"] == pytest.approx(known.logprob, rel=1e-3)
        assert [one["token_id"] for one in entry["top_logprobs"]] == list(known.top_logprobs)
        assert bytes(entry["bytes"]).decode() == entry["token"]
    chunks = await serve.events("/v1/chat/completions", wanted)
    streamed = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert [(entry["token_id"], entry["logprob"]) for entry in streamed] == [
        (entry["token_id"], pytest.approx(entry["logprob"], rel=1e-3)) for entry in entries
    ]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Bath"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
WRONG = [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}]
NAMED = {"type": "function", "function": {"name": "weather"}}


async def test_calls_and_formats_are_enforced(serve: Serving) -> None:
    wanted = {"messages": MESSAGES, "max_tokens": 200, "tools": TOOLS, "tool_choice": NAMED}
    (choice,) = (await serve.post("/v1/chat/completions", wanted)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"], call["function"]["name"]) == ("tool_calls", None, "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Bath"}
    deltas = [chunk["choices"][0]["delta"] for chunk in await serve.events("/v1/chat/completions", wanted)]
    calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
    assert json.loads("".join(one["function"]["arguments"] for one in calls)) == {"city": "Bath"}
    assert [one["function"]["name"] for one in calls if "id" in one] == ["weather"]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [2**64 + 1]}}}
    (choice,) = (await serve.post("/v1/chat/completions", {"messages": MESSAGES, "response_format": schema})).json()["choices"]
    assert choice["message"]["content"].strip() == "18446744073709551617"


async def test_an_answer_has_a_limit(engine: AsyncEngine) -> None:
    async with serving_http(engine, max_message_bytes=4000) as serve:
        for path, wanted in (("/v1/completions", {"prompt": "a", "logprobs": 20}), (CHAT, {"messages": MESSAGES, "top_logprobs": 20})):
            response = await serve.post(
                path, {**wanted, "logprobs": wanted.get("logprobs", True), "n": 4, "max_tokens": 8, "ignore_eos": True}
            )
            assert (response.status_code, response.json()["error"]["code"]) == (400, "answer_too_large")


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    (CHAT, {"messages": []}, ["messages"]),
    (CHAT, {}, ["messages"]),
    (CHAT, {"messages": [{"role": "user"}, "x", {"role": "tool", "content": "y"}]},
     ["messages[1]", "messages[0].content", "messages[2].tool_call_id"]),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
     ["messages[0].content[0].type"]),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, ["tool_choice"]),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required", "tools": [{"type": "web"}]}, ["tool_choice"]),
    (CHAT, {"messages": MESSAGES, "tool_choice": {"type": "custom", "custom": {}}}, ["tool_choice.type", "tool_choice.function"]),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "web"}, {"type": "function", "function": {"name": "a b"}}]},
     ["tools[1].function.name"]),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required", "tools": WRONG}, ["tools"]),
    (CHAT, {"messages": MESSAGES, "max_reasoning_tokens": 2**31}, ["max_reasoning_tokens"]),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, ["top_logprobs"]),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 99}, ["top_logprobs"]),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, ["response_format.json_schema"]),
    (CHAT, {"messages": MESSAGES, "prediction": {"type": "code"}}, ["prediction.type", "prediction.content"]),
    (CHAT, {"messages": MESSAGES, "functions": [], "web_search_options": {}, "audio": {}}, ["functions"]),
    (CHAT, {"messages": MESSAGES, "guided_regex": "("}, ["guided_regex"]),
    (CHAT, {"messages": MESSAGES, "mirostat": 2, "n_predict": 0}, ["mirostat", "n_predict"]),
    (CHAT, {"messages": MESSAGES, "guided_json": {}, "response_format": {"type": "json_object"}}, ["guided_json"]),
    (CHAT, {"messages": MESSAGES, "structured_outputs": {"json": "{"}}, ["structured_outputs.json"]),
    (CHAT, {"messages": MESSAGES, "structured_outputs": {"json": {}, "tag": 1}}, ["structured_outputs.tag"]),
    (TEXT, {"prompt": "a", "max_tokens": 10**6, "clamp_max_tokens": False}, ["max_tokens"]),
    (TEXT, {"prompt": "a", "max_tokens": 10**6, "min_tokens": 10**6}, ["min_tokens"]),
    (CHAT, {"messages": MESSAGES, "structured_output": {"regex": "("}}, ["structured_output.regex"]),
    (CHAT, {"messages": MESSAGES, "service_tier": "flex", "priority": 3}, ["priority"]),
    (CHAT, {"messages": MESSAGES, "user": "u" * 129, "max_completion_tokens": 0}, ["max_completion_tokens"]),
    (TEXT, {"prompt": "a", "stream_options": {}, "best_of": 2, "suffix": "x"}, ["suffix", "best_of"]),
    (TEXT, {"prompt": "a", "max_tokens": 0, "tools": []}, ["max_tokens", "tools"]),
    (TEXT, {"prompt": ["a", 3, {}], "n": 0, "stop": [1]}, ["prompt[1]", "prompt[2]", "n", "stop"]),
]  # fmt: skip


async def test_every_violation_has_the_path_of_its_field(serve: Serving) -> None:
    for path, body, fields in REFUSED:
        response = await serve.post(path, body)
        assert response.status_code == 400, body
        assert sorted(one["field"] for one in response.json()["error"]["violations"]) == sorted(fields), response.text


async def test_every_field_that_is_documented_is_taken(serve: Serving) -> None:
    for path, module in ((CHAT, chat_completions), (TEXT, completions)):
        body: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
        unknown = [
            *module.TAKEN,
            *module.REFUSED,
            *body_parameters.IGNORED,
            *body_parameters.PARAMS,
            *body_parameters.OPTIONS,
            *body_parameters.OF_OTHERS,
        ]
        unknown += [*body_parameters.IGNORED_OF_OTHERS, *getattr(module, "IGNORED", ()), "tempo"]
        response = await serve.post(path, {**body, **{name: ["this"] for name in unknown if name not in body}})
        told = [one["field"] for one in response.json()["error"]["violations"] if "Unrecognized" in one["message"]]
        assert told == ["tempo"]
        response = await serve.post(
            path, {**body, **dict.fromkeys(unknown[:-1]), **body, "store": True, "metadata": {"a": "b"}, "max_tokens": 1}
        )
        assert response.status_code == 200, "a null is as good as no field"


async def test_max_tokens_is_what_is_left_at_most(engine: AsyncEngine, serve: Serving) -> None:
    full = engine.model_info.max_model_len
    long = {"prompt": [5] * (full - 9), "max_tokens": full, "ignore_eos": True}
    for path, body, most in (
        (TEXT, long, "max_tokens"),
        (TEXT, {**long, "max_tokens": -1}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a " * (full - 40)}], "ignore_eos": True}, "max_completion_tokens"),
    ):
        response = (await serve.post(path, {most: 10**6, **body})).json()
        assert (response["choices"][0]["finish_reason"], response["usage"]["total_tokens"]) == ("length", full)


IN_VAIN: list[tuple[str, dict[str, Any], set[str]]] = [
    (CHAT, {"messages": MESSAGES, "prediction": {"type": "content", "content": "x" * 70_000}, "verbosity": "low", "web_search_options": {}},
     {"verbosity", "web_search_options"}),
    (CHAT, {"messages": MESSAGES, "tools": [*TOOLS, {"type": "custom", "custom": {"name": "patch"}}], "service_tier": "fast"},
     {"tools of type custom", "service_tier"}),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "extreme", "seed": -1, "max_tokens": -1, "stop": "e", "user": "u" * 200,
            "top_logprobs": 0, "stream_options": {"include_usage": True}, "cache_prompt": True, "mirostat": 0, "typical_p": 1.0},
     {"cache_prompt"}),
    (CHAT, {"messages": [*MESSAGES, {"role": "assistant", "content": None}, *MESSAGES], "timings_per_token": True}, {"timings_per_token"}),
    (TEXT, {"prompt": "a", "client_metadata": {}, "store": True}, {"client_metadata", "store"}),
]  # fmt: skip


async def test_what_changes_nothing_is_ignored_and_logged_once(engine: AsyncEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine.server.core.core")
    async with serving_http(engine) as serve:
        for path, body, ignored in IN_VAIN:
            caplog.clear()
            for _ in range(2):
                response = await serve.post(path, {"max_tokens": 4, **body})
                assert response.status_code == 200, response.text
            told = [record.message.partition(": ")[2].partition(" (")[0] for record in caplog.records]
            assert sorted(told) == sorted(ignored)


SCHEMA = {"enum": ["one"]}
GRAMMARS: list[dict[str, Any]] = [
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"guided_regex": '"one"'},
    {"guided_choice": ['"one"']},
    {"guided_grammar": 'root ::= "\\"one\\""'},
    {"grammar": 'root ::= "\\"one\\""'},
    {"json_schema": SCHEMA},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"structured_outputs": {"choice": ['"one"']}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
]


async def test_grammars_have_the_names_of_others(serve: Serving) -> None:
    for fields in GRAMMARS:
        response = await serve.post(CHAT, {"messages": MESSAGES, "n_predict": 40, **fields})
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"].strip() == '"one"'


async def test_tools_that_are_left_out(engine: AsyncEngine) -> None:
    """They are told in a header, or refused, in each dialect."""
    tools = [{"type": "web_search"}, {"type": "b\r\nad"}]
    named = [{**tool, "name": "a"} for tool in tools]
    asked = (
        (CHAT, {"messages": MESSAGES, "tools": [*TOOLS, *tools]}),
        ("/v1/responses", {"input": "hi", "tools": tools}),
        (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 2, "tools": named},
        ),
    )
    async with serving_http(engine) as serve:
        for path, body in asked:
            for stream in (False, True):
                response = await serve.post(path, {**body, "stream": stream})
                assert response.status_code == 200, response.text
                assert response.headers["warning"] == '199 aengine "left out: tools of type web_search, another"'
        assert "warning" not in (await serve.post(CHAT, {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 2})).headers
    async with serving_http(engine, unsupported_tools="refuse") as serve:
        for path, body in asked:
            response = await serve.post(path, body)
            assert response.status_code == 400
            assert "type web_search, another is not possible" in response.text


async def test_outputs_that_repeat_themselves(serve: Serving) -> None:
    """Under our name and that of vLLM."""
    same = {"prompt": [9, 9], "temperature": 0, "max_tokens": 30, "logit_bias": {"9": 100}, "ignore_eos": True}
    for name, fields, count in (
        ("stop_on_repetition", {"max_cycle": 2, "min_count": 5}, 5),
        ("repetition_detection", {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}, 6),
    ):
        (choice,) = (await serve.post("/v1/completions", {**same, name: fields})).json()["choices"]
        assert choice["finish_reason"] == "repetition"
        usage = (await serve.post("/v1/completions", {**same, name: fields})).json()["usage"]
        assert usage["completion_tokens"] == count
    off = await serve.post("/v1/completions", {**same, "repetition_detection": {"max_pattern_size": 0}})
    assert off.json()["choices"][0]["finish_reason"] == "length"
    refused = await serve.post("/v1/completions", {**same, "repetition_detection": {"max_pattern_size": 2, "min_count": 1}})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("repetition_detection: min_count: 1 is not in [2, 4096]")


async def test_some_tools_are_allowed(serve: Serving) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    allowed = {"mode": "required", "tools": [NAMED, {"type": "web_search"}]}
    wanted = {"messages": MESSAGES, "tools": [other, *TOOLS], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    (choice,) = (await serve.post(CHAT, {**wanted, "seed": 3})).json()["choices"]
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"weather"}


async def test_the_client_of_openai(serve: Serving) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{serve.server.http_address}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in await client.models.list()] == ["demo"]
        messages: Any = MESSAGES
        whole = await client.chat.completions.create(model="demo", messages=messages, temperature=0, max_completion_tokens=8)
        stream = await client.chat.completions.create(
            model="demo", messages=messages, temperature=0, max_completion_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        parsed = await client.chat.completions.parse(model="demo", messages=messages, response_format=Answer, seed=1)
        assert parsed.choices[0].message.parsed in (Answer(value=True), Answer(value=False))
        for error, wrong in ((openai.NotFoundError, {"model": "gpt"}), (openai.BadRequestError, {"model": "demo", "temperature": 300})):
            with pytest.raises(error):
                await client.chat.completions.create(messages=messages, **wrong)  # type: ignore[call-overload]
        async with client.chat.completions.stream(model="demo", messages=messages, tools=TOOLS, tool_choice=NAMED) as events:  # type: ignore[arg-type]
            final = await events.get_final_completion()
        assert json.loads((final.choices[0].message.tool_calls or [])[0].function.arguments) == {"city": "Bath"}


class Answer(pydantic.BaseModel):
    value: bool


async def test_a_branch_goes_on_within_another_answer(engine: AsyncEngine, serve: Serving) -> None:
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 24}
    for path, asked in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})):
        whole = (await serve.post(path, {**asked, **sampling, "return_token_ids": True})).json()
        ids = whole["choices"][0]["token_ids"]
        branch = {"id": whole["id"], "at": 10, "same_params": True}
        found = (await serve.post("/v1/completions", {"branch": branch, "return_token_ids": True})).json()
        assert found["choices"][0]["token_ids"] == ids[10:]
        assert found["usage"]["completion_tokens"] == len(ids)
        prompt = asked.get("prompt", MESSAGES)
        expected = await engine.generate(prompt, SamplingParams(seed=4, temperature=1.0, max_tokens=20), known_outputs=[[*ids[:3], 70]])
        body = {"branch": {"id": whole["id"], "at": 3, "then": [70]}, "seed": 4, "temperature": 1.0, "max_tokens": 20}
        assert "".join(chunk["choices"][0]["text"] for chunk in await serve.events("/v1/completions", body)) == expected.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"branch": {"id": "cmpl-nobody"}}, "branch"),
        ({"branch": {}}, "branch.id"),
        ({"branch": {"id": "a", "at": -1}}, "branch.at"),
        ({"branch": {"id": "a", "then": ["b"]}}, "branch.then"),
        ({"branch": {"id": "a", "what": 1}}, "branch.what"),
        ({"branch": {"id": "a"}, "prompt": "b"}, "prompt"),
        ({"branch": {"id": "a"}, "echo": True}, "echo"),
        ({"branch": 5}, "branch"),
    ],
)
async def test_branches_that_are_none(serve: Serving, body: dict[str, Any], param: str) -> None:
    response = await serve.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("name", ["session", "prompt_cache_key", "x-session-id"])
async def test_sessions(engine: AsyncEngine, serve: Serving, name: str) -> None:
    """By a field of ours, one of OpenAI's, or a header."""
    headers = {"x-session-id": "the session"} if name == "x-session-id" else {}
    body = {"prompt": PROMPT, **GREEDY, "user": name, **({} if headers else {name: "the session"})}
    for rewritten in (0, 7):
        response = await serve.client.post("/v1/completions", json=body, headers=headers)
        assert response.json()["usage"]["prompt_tokens_details"]["rewritten_tokens"] == rewritten
    assert await engine.touch("the session", name) > 8
