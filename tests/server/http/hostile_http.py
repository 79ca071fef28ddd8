"""What no client would send, by a generator of random numbers: bodies that are nearly right, and bytes that are nearly HTTP."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

TOOL = {"type": "object", "properties": {"city": {"enum": ["Bath"]}}, "required": ["city"], "additionalProperties": False}
OURS: dict[str, Any] = {
    **{"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "n": 2, "stop": ["x", "yz"], "stop_token_ids": [3, 4]},
    **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 2.5, "7": -100}},
    **{"bad_words": ["the"], "allowed_token_ids": [5, 6, 7], "banned_token_ids": [9], "min_tokens": 1, "ignore_eos": True},
    **{"include_stop_str_in_output": True, "skip_special_tokens": False, "timeout": 5.0, "max_drafts": 0},
    **{"structured_output": {"json_schema": {"type": "boolean"}}, "reasoning": {"closing": "e", "opened": True, "max_tokens": 2}},
    **{"priority": 3, "tenant": "a", "cache_salt": "x", "prompt_logprobs": 1, "return_token_ids": True},
    **{"user": "u", "service_tier": "flex", "metadata": {"a": "b"}, "store": True},
}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CHAT: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}], "name": "Ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "c", "content": "rain"},
]
BODIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # a path, what a body needs, and what it may have
    ("/v1/completions", {"prompt": "Once", "max_tokens": 4}, {**OURS, "logprobs": 2, "echo": True, "best_of": 2}),
    (
        "/v1/completions",
        {"prompt": [5, 6, 7], "max_tokens": 4},
        {**OURS, "logprobs": 2, "echo": True, "stream_options": {"include_usage": True}},
    ),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3}, {**OURS, "logprobs": 0}),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 6},
        {
            **OURS,
            **{"logprobs": True, "top_logprobs": 2, "reasoning_effort": "low", "max_reasoning_tokens": 3, "parallel_tool_calls": False},
            **{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}},
            **{"tools": [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}], "tool_choice": "required"},
            **{"stream_options": {"include_usage": True}, "template_kwargs": {"a": 1}, "max_completion_tokens": 5},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "rain"},
            ],
            "max_output_tokens": 6,
        },
        {
            **{"instructions": "Be brief.", "text": {"format": {"type": "json_object"}, "verbosity": "medium"}, "metadata": {"a": "b"}},
            **{"reasoning": {"effort": "low", "summary": "auto"}, "tools": [{"type": "function", "name": "weather", "parameters": TOOL}]},
            **{"tool_choice": {"type": "function", "name": "weather"}, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
            **{"truncation": "disabled", "store": False, "temperature": 0.5, "top_p": 0.5, "seed": 3, "priority": 1},
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Bath"}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "rain", "is_error": False}]},
            ],
            "max_tokens": 6,
        },
        {
            **{"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], "temperature": 0.5, "top_k": 3},
            **{"tools": [{"name": "weather", "input_schema": TOOL}], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            **{"thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["x"], "metadata": {"user_id": "u"}},
            **{"service_tier": "auto", "output_config": {"effort": "low"}},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Weather?"}]}, {"system": "Be brief."}),
    ("/v1/responses/input_tokens", {"input": "Weather?"}, {"instructions": "Be brief."}),
    ("/v1/embeddings", {"input": ["a", "b"]}, {"dimensions": 8, "encoding_format": "base64", "pooling": "mean", "normalize": False}),
    ("/tokenize", {"prompt": "a b"}, {"add_special_tokens": False, "with_pieces": True, "model": "demo"}),
    ("/tokenize", {"messages": CHAT}, {"add_generation_prompt": True, "tools": [], "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"tokens": [5, 6, 7]}, {"skip_special_tokens": True}),
]
STREAMED = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3.5, 1e308, -0.0, 2**31, 2**63, -(2**63), 10**30, "", "x", "\0", "\u2028", "é" * 300, "null"),
    *([], [[]], {}, {"": {}}, [None], [1], ["x"], {"type": "text"}, {"type": "function"}, [{}], [{"role": "user"}], {"a": [{}]}),
    *("auto", "none", "function", "text", {"type": []}, {"type": {}}, [[5], [6]], ["a", 5], [-1], [10**6], ("demo"), "a" * 20_000),
]


def any_value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every entry within a value: what holds it, and its name or index there."""
    found = []
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        found += [(value, key), *places(inner)]
    return found


def any_json(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path, and a body for it in which up to three things are wrong."""
    path, needed, possible = rng.choice(BODIES)
    names = rng.sample(list(possible), min(len(possible), rng.choice([0, 1, 2, 4, 8])))
    body = copy.deepcopy({**needed, **{name: possible[name] for name in names}})
    if path in STREAMED and rng.random() < 0.5:
        body["stream"] = True
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        holder, key = rng.choice(places(body) or [({}, "")])
        match rng.randrange(6):
            case 0 if key in holder or isinstance(holder, list):
                del holder[key]
            case 1:
                holder[rng.choice(["x", "type", "name", "prompt", "messages", ""]) if isinstance(holder, dict) else key] = any_value(rng)
            case 2 if isinstance(holder, list):
                holder.insert(key, any_value(rng))
            case _:
                holder[key] = any_value(rng)
    return path, body


def spoiled(rng: random.Random, data: bytes) -> bytes:
    """`data` with up to three accidents."""
    found = bytearray(data)
    for _ in range(rng.randint(0, 3)):
        start = rng.randint(0, len(found))
        end = min(len(found), start + rng.choice([1, 1, 4, 40]))
        match rng.randrange(4):
            case 0 if start < end:
                found[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
            case 1:
                del found[start:end]
            case 2:
                found[start:start] = found[start:end] or rng.randbytes(3)
            case _:
                del found[rng.choice([start, len(found)]) :]
    return bytes(found)


def any_request(rng: random.Random) -> bytes:
    """The bytes of a request; its head is not always right."""
    path, body = any_json(rng)
    content = rng.choices([json.dumps(body).encode(), spoiled(rng, json.dumps(body).encode()), rng.randbytes(50)], [4, 3, 1])[0]
    headers = rng.sample(ODD_HEADERS, rng.choice([0, 0, 1, 2]))
    if rng.random() < 0.2:
        cut = rng.randint(0, len(content))
        headers.append(b"transfer-encoding: chunked")
        parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in (content[:cut], content[cut:]) if part]
        content = b"".join(parts) + rng.choice([b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"", b"-1\r\n", b"fffffffffffffffff\r\n"])
    else:
        headers.append(b"content-length: %d" % (len(content) if rng.random() < 0.9 else rng.choice([0, 1, len(content) + 9, 2**40])))
    verb = rng.choice([b"POST"] * 9 + [b"GET", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"post", b"PRI"])
    target = (
        path.encode() if rng.random() < 0.9 else rng.choice([b"/", b"*", b"//", b"/%ff%00", b"/v1/models/%2e%2e/x?a=b#c", b"http://[::1/x"])
    )
    version = rng.choice([b"HTTP/1.1"] * 9 + [b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.1 "])
    return b"\r\n".join([b" ".join([verb, target, version]), b"host: localhost", *headers]) + b"\r\n\r\n" + content


ODD_HEADERS = [
    *(
        b"expect: 100-continue",
        b"expect: nothing",
        b"connection: close",
        b"connection: upgrade\r\nupgrade: h2c",
        b"transfer-encoding: gzip",
    ),
    *(b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\nsec-websocket-version: 13", b"content-encoding: gzip"),
    *(
        b"content-type: text/plain",
        b"x-request-id: \xff\x80",
        b"x-request-id: " + b"y" * 300,
        b"traceparent: zz",
        b"authorization: Basic \x7f",
    ),
    *(
        b"x-api-key: ",
        b"accept: nothing",
        b"content-length: 3",
        b"content-length: -1",
        b"cookie: a=b",
        b"x y: z",
        b"x-long: " + b"y" * 30_000,
    ),
    *(b"origin: null", b"host: y", b": empty", b"range: bytes=0-1", b"if-none-match: *", b"te: trailers"),
]
KINDS: list[Callable[[random.Random], bytes]] = [
    any_request,
    lambda rng: any_request(rng) + any_request(rng),
    lambda rng: spoiled(rng, any_request(rng)),
    lambda rng: rng.randbytes(rng.randint(0, 500)),
    lambda rng: b"GET " + rng.randbytes(rng.randint(0, 100)).replace(b"\n", b"") + b" HTTP/1.1\r\n\r\n",
    lambda rng: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(20),
    lambda rng: b"\x16\x03\x01\x02\x00" + rng.randbytes(100),
]


def any_bytes(rng: random.Random) -> bytes:
    return rng.choices(KINDS, [4, 2, 6, 1, 1, 1, 1])[0](rng)
